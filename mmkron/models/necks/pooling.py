"""Global average pooling with dropout, which neither the pooling necks nor the linear heads of the hosts have."""

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
    """Global average pooling, followed by dropout on the pooled features.

    Args:
        drop_rate: Probability of dropping a feature in training, in [0, 1).

    Raises:
        TypeError: If ``drop_rate`` is not a number.
        ValueError: If ``drop_rate`` is not in [0, 1).
    """

    def __init__(self, drop_rate: float = 0.2) -> None:
        super().__init__()
        check_probability('drop_rate', drop_rate)
        self.drop_rate = drop_rate

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the pooled features (B, C) of each map (B, C, H, W).

        Raises:
            TypeError: If an input is not a floating-point tensor.
            ValueError: If an input is not a map or is empty.
        """
        maps = (inputs,) if isinstance(inputs, Tensor) else inputs
        check_sequence('inputs', maps)
        for x in maps:
            check_map('inputs', x)
        return tuple(F.dropout(x.mean((2, 3)), self.drop_rate, self.training) for x in maps)
