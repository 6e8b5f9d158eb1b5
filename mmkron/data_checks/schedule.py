"""Check how long a config trains and how often it validates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mmkron.data_checks.common import Problem

# The least value of each key: MMEngine takes any, and a training of -1 epochs would end at once with exit code 0.
_LEAST = dict(max_epochs=1, max_iters=1, val_begin=0, val_interval=1)


def check_schedule(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield the numbers of ``train_cfg`` that are not whole or too small to train or to validate."""
    given = cfg.get('train_cfg') if 'train' in splits else None
    for name, least in _LEAST.items() if isinstance(given, dict) else ():
        value = given.get(name, least)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or value % 1 != 0 or value < least:
            yield Problem(f'train_cfg.{name}', f'must be a whole number of at least {least}, got {value!r}')
