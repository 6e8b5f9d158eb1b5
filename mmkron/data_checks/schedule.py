"""The length of a training and how often it is validated, which MMEngine takes as they are."""

from collections.abc import Iterator, Sequence
from typing import Any

from mmkron.data_checks.common import Problem

# The least value of each key; a training of -1 epochs would end at once with exit code 0.
_LEAST = dict(max_epochs=1, max_iters=1, val_begin=0, val_interval=1)


def check_schedule(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield the numbers of ``train_cfg`` that are not whole, or too small to train or to validate."""
    train_cfg = cfg.get('train_cfg')
    if 'train' not in splits or not isinstance(train_cfg, dict):
        return
    for name, least in _LEAST.items():
        value = train_cfg.get(name, least)
        whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0
        if not whole or value < least:
            yield Problem(f'train_cfg.{name}', f'must be a whole number of at least {least}, got {value!r}')
