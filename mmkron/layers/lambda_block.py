"""Lambda layer with the pooling, norm and activation of a convolutional network, and checks of its arguments.

``mmkron.layers`` does not import this module, because it needs MMCV.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn as nn
from mmcv.cnn import build_activation_layer, build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor

from mmkron.layers.lambda_layer import LambdaLayer
from mmkron.utils.checks import check_int, check_keys

LAYER_PARAMETERS = inspect.signature(LambdaLayer).parameters
# The network itself sets the others.
LAYER_ARGUMENTS = tuple(name for name in LAYER_PARAMETERS if name not in ('dim', 'dim_out', 'in_channels', 'feat_size'))


class LambdaConvBlock(BaseModule):
    """Lambda layer that replaces a convolution with norm: layer, average pooling at stride 2, norm, activation.

    Args:
        channels: Channels of input and output.
        lambda_cfg: Further arguments of :class:`mmkron.layers.LambdaLayer`.
        stride: 1 or 2.
        lambda_pool: Side of the pooling: 3 (padded by 1, which counts as zeros, as in torch) or 2.
        norm_cfg: Config of the norm.
        act_cfg: Config of the activation.
    """

    def __init__(
        self,
        channels: int,
        lambda_cfg: Mapping[str, Any],
        stride: int = 1,
        lambda_pool: int = 3,
        *,
        norm_cfg: dict,
        act_cfg: dict,
    ) -> None:
        super().__init__()
        self.layer = LambdaLayer(channels, **lambda_cfg)
        self.pool = nn.Identity()
        if stride > 1:
            even = dict(ceil_mode=True, count_include_pad=False)
            self.pool = nn.AvgPool2d(3, stride, 1) if lambda_pool == 3 else nn.AvgPool2d(2, stride, **even)
        self.norm = build_norm_layer(norm_cfg, channels)[1]
        self.act = build_activation_layer(act_cfg)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map (B, channels, ceil(H / stride), ceil(W / stride)) for a map (B, channels, H, W)."""
        return self.act(self.norm(self.pool(self.layer(x))))


def resolve_lambda_cfg(lambda_cfg: Mapping[str, Any] | None, norm_cfg: dict) -> dict[str, Any]:
    """Return the arguments of every lambda layer, with the norm of the network by default.

    Raises:
        TypeError: If ``lambda_cfg`` is neither a dict nor None.
        ValueError: If it has a key that is not an argument of the layer or that the network sets itself.
    """
    check_keys('lambda_cfg', lambda_cfg, LAYER_ARGUMENTS)
    return dict(dict(norm_cfg=norm_cfg), **(lambda_cfg or {}))


def check_heads(lambda_cfg: Mapping[str, Any], width: int, stage: str, base_channels: int) -> None:
    """Raise TypeError or ValueError unless the heads divide the width of a stage."""
    heads = lambda_cfg.get('heads', LAYER_PARAMETERS['heads'].default)
    check_int('heads of lambda_cfg', heads)
    if width % heads:
        raise ValueError(
            f'heads of lambda_cfg must divide the width of {stage}, {width} at base_channels={base_channels}; '
            f'got {heads}'
        )


def check_block_numbers(name: str, value: Any, count: int) -> None:
    """Raise ValueError unless ``value`` is a sequence of block numbers in [1, ``count``]."""
    numbers = range(1, count + 1)
    wrong_type = not isinstance(value, Sequence) or isinstance(value, str)
    if wrong_type or not all(type(i) is int and i in numbers for i in value):
        raise ValueError(f'{name} must be a sequence of ints in [1, {count}], got {value!r}')
