"""Checks of a config's data before anything is built, one small function per check in one table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mmengine.logging import print_log

from mmkron.data_checks.class_labels import check_class_folders, check_class_names, check_label_lists
from mmkron.data_checks.coco import check_coco
from mmkron.data_checks.common import Data, Problem, describe, used_data
from mmkron.data_checks.files import check_files
from mmkron.data_checks.masks import check_mask_files, check_mask_sample, check_mask_values
from mmkron.data_checks.num_classes import check_losses, check_num_classes
from mmkron.data_checks.settings import check_mixing, check_schedule
from mmkron.utils.errors import LaunchError

QUICK, SLOW = 'quick', 'slow'


class DataError(LaunchError):
    """Data that is not on disk or does not fit its config."""


class Check(NamedTuple):
    """A check of each dataset of a kind, or of the whole config."""

    name: str
    find: Callable[[Data], Iterable[Problem]]
    host: str = 'all'  # package of the class that lists the samples of the dataset
    dataset: str = 'any'  # name of that class; 'none' for a check of the whole config
    cost: str = QUICK  # QUICK: reads the config, lists folders, and reads each annotation file once

    def applies_to(self, data: Data) -> bool:
        """Return whether the check is for a dataset."""
        if not data.key:
            return self.dataset == 'none'
        return self.dataset == 'any' or (self.host, self.dataset) == data.reader


CHECKS = (
    Check('class names', check_class_names),
    Check('files', check_files),
    Check('schedule', check_schedule, dataset='none'),
    Check('losses', check_losses, dataset='none'),
    Check('num_classes', check_num_classes),
    Check('class folders', check_class_folders, 'mmpretrain', 'CustomDataset'),
    Check('label list', check_label_lists, 'mmpretrain', 'CustomDataset'),
    Check('mixing of events', check_mixing),
    Check('label map files', check_mask_files, 'mmseg', 'BaseSegDataset'),
    Check('label map values', check_mask_sample, 'mmseg', 'BaseSegDataset'),
    Check('all label maps', check_mask_values, 'mmseg', 'BaseSegDataset', SLOW),
    Check('COCO annotations', check_coco, 'mmdet', 'CocoDataset'),
)


def find_problems(cfg: Any, splits: Sequence[str], cost: str = QUICK) -> Iterator[tuple[Check, Data, list[Problem]]]:
    """Yield each check with a dataset that it is for and the problems found there.

    Args:
        cfg: The whole config.
        splits: The loaders that will be used, of ``'train'``, ``'val'`` and ``'test'``.
        cost: The highest cost of the checks: ``'quick'`` or ``'slow'``, which includes the quick ones.
    """
    if cost not in (QUICK, SLOW):
        raise ValueError(f"cost must be 'quick' or 'slow', got {cost!r}")
    targets = [Data(cfg, splits), *used_data(cfg, splits)]
    for check in CHECKS:
        for data in targets if cost in (check.cost, SLOW) else ():
            if check.applies_to(data):
                yield check, data, list(check.find(data))


def run(cfg: Any, config: str, splits: Sequence[str], cost: str = QUICK) -> None:
    """Check the data of a config, of the path ``config``, before anything is built; log what is suspicious.

    Raises:
        DataError: If data is not on disk or does not fit the config; one message with all problems.
    """
    problems = [problem for _, _, found in find_problems(cfg, splits, cost) for problem in found]
    warnings = [problem for problem in problems if problem.warning]
    if warnings:
        print_log(describe(warnings, f'the data of {config} looks wrong:'), 'current', logging.WARNING)
    errors = [problem for problem in problems if not problem.warning]
    if errors:
        raise DataError(describe(errors, f'the data of {config} is missing or does not fit it:'))
