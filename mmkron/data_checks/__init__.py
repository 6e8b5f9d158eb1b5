"""Checks of a config's data before anything is built, one small function per check."""

from collections.abc import Sequence
from typing import Any

from mmkron.data_checks.coco import check_coco
from mmkron.data_checks.common import describe, print_warning
from mmkron.data_checks.files import describe_missing, find_missing
from mmkron.engine.errors import LaunchError

# Each takes the config and the names of the splits, and yields problems.
CHECKS = (check_coco,)


def run(cfg: Any, config: str, splits: Sequence[str]) -> None:
    """Check the data of a config; print what is suspicious.

    Args:
        cfg: The whole config.
        config: The config file's path, for the messages.
        splits: Which loaders will be used, of ``'train'``, ``'val'`` and ``'test'``.

    Raises:
        LaunchError: Data is not on disk, or does not fit the config; one message with all problems.
    """
    missing = find_missing(cfg, splits)
    if missing:
        raise LaunchError(describe_missing(missing, config))
    problems = [problem for check in CHECKS for problem in check(cfg, splits)]
    warnings = [problem for problem in problems if problem.warning]
    errors = [problem for problem in problems if not problem.warning]
    if warnings:
        print_warning(describe(warnings, f'warning: the data of {config} looks wrong:'))
    if errors:
        raise LaunchError(describe(errors, f'the data does not fit {config}:'))
