"""Checks of a config's data before anything is built, one small function per check."""

from collections.abc import Sequence
from typing import Any

from mmkron.data_checks.class_folders import check_class_folders
from mmkron.data_checks.coco import check_coco
from mmkron.data_checks.common import check_fields, describe, print_warning
from mmkron.data_checks.files import describe_missing, find_missing
from mmkron.data_checks.masks import check_masks
from mmkron.data_checks.mixing import check_mixing
from mmkron.data_checks.num_classes import check_heads, check_num_classes
from mmkron.data_checks.schedule import check_schedule
from mmkron.engine.errors import LaunchError

# Each takes the config and the names of the splits, and yields problems.
CHECKS = (check_class_folders, check_num_classes, check_heads, check_masks, check_coco, check_mixing, check_schedule)


def run(cfg: Any, config: str, splits: Sequence[str]) -> None:
    """Check the data of a config; print what is suspicious.

    Args:
        cfg: The whole config.
        config: The config file's path, for the messages.
        splits: Which loaders will be used, of ``'train'``, ``'val'`` and ``'test'``.

    Raises:
        LaunchError: Data is not on disk, or does not fit the config; one message with all problems.
    """
    title = f'the data does not fit {config}:'
    wrong = list(check_fields(cfg, splits))
    if wrong:  # the checks below need what is of the right type
        raise LaunchError(describe(wrong, title))
    missing = find_missing(cfg, splits)
    if missing:
        raise LaunchError(describe_missing(missing, config))
    problems = [problem for check in CHECKS for problem in check(cfg, splits)]
    warnings = [problem for problem in problems if problem.warning]
    if warnings:
        print_warning(describe(warnings, f'warning: the data of {config} looks wrong:'))
    errors = [problem for problem in problems if not problem.warning]
    if errors:
        raise LaunchError(describe(errors, title))
