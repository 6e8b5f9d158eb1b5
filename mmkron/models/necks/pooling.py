"""Global average pooling with dropout: the hosts' pooling necks have none, and their linear heads neither."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor

from mmkron.ops.checks import check_map
from mmkron.registry import MODELS
from mmkron.utils.checks import check_probability, check_sequence


@MODELS.register_module()
class GlobalAveragePoolingDropout(BaseModule):
    """Global average pooling, then dropout on the pooled features.

    Args:
        drop_rate: probability with which a feature is dropped in training, from 0 (inclusive) to 1 (exclusive).

    Raises:
        TypeError, ValueError: a ``drop_rate`` that is not a number or outside this range.
    """

    def __init__(self, drop_rate: float = 0.2) -> None:
        super().__init__()
        check_probability('drop_rate', drop_rate)
        self.drop_rate = drop_rate

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Map (B, C, H, W), or a sequence of them -> tuple of (B, C), one for each.

        Raises:
            TypeError, ValueError: an input that is not a floating-point map, or empty.
        """
        maps = (inputs,) if isinstance(inputs, Tensor) else inputs
        check_sequence('inputs', maps)
        for x in maps:
            check_map('inputs', x)
        return tuple(F.dropout(x.mean((2, 3)), self.drop_rate, self.training) for x in maps)
