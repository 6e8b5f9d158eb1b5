"""Run one check of a config's data."""

from collections.abc import Sequence
from typing import Any

from mmkron.data_checks import CHECKS, Problem, find_problems


def problems(cfg: Any, name: str, splits: Sequence[str] = ('train', 'val')) -> list[Problem]:
    """Return what the check of a name in the table finds."""
    assert name in [check.name for check in CHECKS]
    return [
        problem for check, _, found in find_problems(cfg, splits, 'slow') for problem in found if check.name == name
    ]


def texts(cfg: Any, name: str, splits: Sequence[str] = ('train', 'val')) -> tuple[list[str], list[str]]:
    """Return the texts of the errors and of the warnings that the check of a name finds."""
    found = problems(cfg, name, splits)
    return [item.text for item in found if not item.warning], [item.text for item in found if item.warning]
