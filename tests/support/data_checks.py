"""Run one check of a config's data."""

from collections.abc import Sequence
from typing import Any

from mmkron.data_checks import CHECKS, Data, Problem, used_data


def problems(cfg: Any, name: str, splits: Sequence[str] = ('train', 'val')) -> list[Problem]:
    """Return what the check of a name in the table finds."""
    (check,) = (check for check in CHECKS if check.name == name)
    targets = [Data(cfg, splits), *used_data(cfg, splits)]
    return [problem for data in targets if check.applies_to(data) for problem in check.find(data)]


def texts(cfg: Any, name: str, splits: Sequence[str] = ('train', 'val')) -> tuple[list[str], list[str]]:
    """Return the texts of the errors and of the warnings that the check of a name finds."""
    found = problems(cfg, name, splits)
    return [item.text for item in found if not item.warning], [item.text for item in found if item.warning]
