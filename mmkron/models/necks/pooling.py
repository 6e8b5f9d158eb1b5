"""Global average pooling with dropout: the hosts' pooling necks have none, and their linear heads neither."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor

from mmkron.registry import MODELS


@MODELS.register_module()
class GlobalAveragePoolingDropout(BaseModule):
    """Global average pooling, then dropout on the pooled features.

    Args:
        drop_rate: probability with which a feature is dropped in training, from 0 (inclusive) to 1 (exclusive).

    Raises:
        ValueError: a ``drop_rate`` outside this range.
    """

    def __init__(self, drop_rate: float = 0.2) -> None:
        super().__init__()
        if not 0 <= drop_rate < 1:
            raise ValueError(f'drop_rate must be in [0, 1), got {drop_rate!r}')
        self.drop_rate = drop_rate

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Map (B, C, H, W), or a sequence of them -> tuple of (B, C), one for each."""
        maps = (inputs,) if isinstance(inputs, Tensor) else inputs
        return tuple(F.dropout(x.mean((2, 3)), self.drop_rate, self.training) for x in maps)
