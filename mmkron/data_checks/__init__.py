"""Checks of a config's data before anything is built, one small function per check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mmkron.data_checks.class_folders import check_class_folders
from mmkron.data_checks.coco import check_coco
from mmkron.data_checks.common import Problem, check_fields, describe, print_warning
from mmkron.data_checks.files import describe_missing, find_missing
from mmkron.data_checks.masks import check_masks
from mmkron.data_checks.mixing import check_mixing
from mmkron.data_checks.num_classes import check_heads, check_num_classes
from mmkron.data_checks.schedule import check_schedule


class DataError(Exception):
    """Data that is not on disk or does not fit its config."""


class Check(NamedTuple):
    """A check: takes the config and the names of the splits, and yields problems."""

    find: Callable[[Any, Sequence[str]], Iterable[Problem]]
    subject: str  # what it looks at, for the table of tools/misc/check_data.py


CHECKS = (
    Check(check_class_folders, 'classes of folders and lists'),
    Check(check_num_classes, 'num_classes of the data and the metrics'),
    Check(check_heads, 'num_classes of the heads'),
    Check(check_masks, 'labels in the masks'),
    Check(check_coco, 'COCO annotations'),
    Check(check_mixing, 'mixing of samples'),
    Check(check_schedule, 'length of the schedule'),
)


def run(cfg: Any, config: str, splits: Sequence[str]) -> None:
    """Check the data of a config before anything is built; print what is suspicious.

    Args:
        cfg: The whole config.
        config: The path of the config file, for the messages.
        splits: The loaders that will be used, of ``'train'``, ``'val'`` and ``'test'``.

    Raises:
        DataError: If data is not on disk or does not fit the config; one message with all problems.
    """
    title = f'the data does not fit {config}:'
    wrong = list(check_fields(cfg, splits))
    if wrong:  # the other checks need fields of the right type
        raise DataError(describe(wrong, title))
    missing = find_missing(cfg, splits)
    if missing:
        raise DataError(describe_missing(missing, config))
    problems = [problem for check in CHECKS for problem in check.find(cfg, splits)]
    warnings = [problem for problem in problems if problem.warning]
    if warnings:
        print_warning(describe(warnings, f'warning: the data of {config} looks wrong:'))
    errors = [problem for problem in problems if not problem.warning]
    if errors:
        raise DataError(describe(errors, title))
