"""Output layer of DeepLabV2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn as nn
from torch import Tensor

from mmkron.layers.configs import check_init_cfg
from mmkron.layers.initialize import initialize
from mmkron.models.decode_heads.base import DecodeHead
from mmkron.registry import MODELS
from mmkron.utils.checks import check_int, check_ints, check_probability


@MODELS.register_module()
class ASPPV2Head(DecodeHead):
    """Atrous spatial pyramid pooling of DeepLabV2: the sum of four dilated 3 x 3 convolutions to the classes.

    From `DeepLab <https://arxiv.org/abs/1606.00915>`_ (TPAMI 2018), section 3.2, without batch norm and without a
    hidden layer, as in the baseline of the Kronecker Attention Networks paper. MMSegmentation's ``ASPPHead`` implements
    DeepLabV3.

    Args:
        in_channels: Channels of the features.
        channels: Unused, since there is no hidden layer; accepted because the hosts' configs set it.
        num_classes: Number of classes.
        dilations: Dilation of each convolution.
        dropout_ratio: Probability of dropout on the features.
        init_cfg: Initialization. Defaults to a normal distribution with standard deviation 0.01.
        **kwargs: Other arguments of MMSegmentation's ``BaseDecodeHead``.

    Raises:
        TypeError: If a number is not an int, or ``dilations`` is not a sequence.
        ValueError: If a number is less than 1, ``dilations`` is empty, or ``dropout_ratio`` is not in [0, 1).

    Examples:
        >>> import torch
        >>> head = ASPPV2Head(64, num_classes=21)
        >>> head([torch.randn(2, 64, 20, 28)]).shape
        torch.Size([2, 21, 20, 28])
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        channels: int | None = None,
        *,
        num_classes: int,
        dilations: Sequence[int] = (6, 12, 18, 24),
        dropout_ratio: float = 0.0,
        init_cfg: dict | list | None = None,
        **kwargs: Any,
    ) -> None:
        check_ints('dilations', dilations)
        check_int('num_classes', num_classes)
        if channels is not None:
            check_int('channels', channels)
        check_probability('dropout_ratio', dropout_ratio)
        check_init_cfg(init_cfg)
        init_cfg = dict(type='Normal', layer='Conv2d', std=0.01) if init_cfg is None else init_cfg
        super().__init__(
            in_channels,
            num_classes if channels is None else channels,
            num_classes=num_classes,
            dropout_ratio=dropout_ratio,
            init_cfg=init_cfg,
            **kwargs,
        )
        del self.conv_seg
        self.convs = nn.ModuleList(
            nn.Conv2d(self.in_channels, self.out_channels, 3, padding=dilation, dilation=dilation)
            for dilation in dilations
        )
        initialize(self)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the logits (B, num_classes, H, W) of the features (B, in_channels, H, W) that ``in_index`` selects.

        Raises:
            ValueError: If the features have other channels.
        """
        x = self._transform_inputs(inputs)
        if self.dropout is not None:
            x = self.dropout(x)
        return sum(conv(x) for conv in self.convs)
