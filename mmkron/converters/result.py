"""Result of a conversion of weights, and checks that all converters share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

COUNTER = '.num_batches_tracked'


class Converted(NamedTuple):
    """Weights under new names. The lists omit the step counters of batch norm, which are not needed.

    Attributes:
        state_dict: Entries of the target.
        head: ``weight`` and ``bias`` of the classifier, if the source has one; else empty.
        unused: Names of the source's entries that have no counterpart in the target.
        missing: Names of the target's entries that have no counterpart in the source.
    """

    state_dict: dict[str, Tensor]
    head: dict[str, Tensor]
    unused: list[str]
    missing: list[str]


def check_state_dict(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a dict of names and tensors, ValueError if it is empty."""
    if not isinstance(value, Mapping):
        raise TypeError(f'{name} must be a dict of names and tensors, got {value!r}')
    if not value:
        raise ValueError(f'{name} must have at least one entry, got {value!r}')
    for key, entry in value.items():
        if not isinstance(key, str) or not isinstance(entry, Tensor):
            raise TypeError(f'{name} must be a dict of names and tensors, got {type(entry).__name__} for {key!r}')


def without_counters(names: Iterable[str]) -> list[str]:
    """Return the names except for step counters of batch norm."""
    return [name for name in names if not name.endswith(COUNTER)]
