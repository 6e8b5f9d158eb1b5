"""What a conversion of weights to the names of mmkron gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

COUNTER = '.num_batches_tracked'


class Converted(NamedTuple):
    """Weights under new names. The lists leave out the step counters of batch norm, which nothing needs.

    Attributes:
        state_dict: entries of the target.
        head: ``weight`` and ``bias`` of the classifier, if the source has one.
        unused: names of the source's entries that have no place in the target.
        missing: names of the target's entries that the source does not give.
    """

    state_dict: dict[str, Tensor]
    head: dict[str, Tensor]
    unused: list[str]
    missing: list[str]


def without_counters(names: Iterable[str]) -> list[str]:
    """Names that are not of a step counter of batch norm."""
    return [name for name in names if not name.endswith(COUNTER)]
