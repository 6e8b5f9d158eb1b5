"""Kronecker attention on the levels of a feature pyramid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from mmengine.model import BaseModule, ModuleDict
from torch import Tensor

from mmkron.layers.configs import check_init_cfg
from mmkron.layers.kronecker_attention import KroneckerAttention2d
from mmkron.ops.checks import check_map
from mmkron.registry import MODELS
from mmkron.utils.checks import check_flags, check_int, check_ints, check_sequence, resolve_indices


@MODELS.register_module()
class KroneckerNeck(BaseModule):
    """Neck that refines levels of a pyramid by ``x + scale * attention(x)``, with one scale per level.

    The scales start at zero, so the neck starts as the identity and a trained network that receives it keeps its
    outputs. It works alone or after another neck, in MMDetection and in MMSegmentation. The attention is from
    `Kronecker Attention Networks <https://arxiv.org/abs/2007.08442>`_ (KDD 2020); refining a pyramid with it is a
    choice of this project.

    Args:
        in_channels: Channels of each level.
        levels: Levels to refine; negative indices count from the end. Defaults to all. The other levels are returned
            unchanged. A level that no head reads has no gradient, so leave it out in distributed training.
        mode: As in :class:`mmkron.layers.KroneckerAttention2d`.
        maps: As in :class:`mmkron.layers.KroneckerAttention2d`.
        key_channels: As in :class:`mmkron.layers.KroneckerAttention2d`.
        norm: As in :class:`mmkron.layers.KroneckerAttention2d`.
        use_scale: Whether to divide the coefficients by the square root of the key's channels. The paper does not.
        init_cfg: Initialization of the attention layers, which have a default, or a checkpoint for the whole neck.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a level is out of range or repeated, ``mode`` or ``norm`` is unknown, or the channels do not
            match ``maps``.

    Examples:
        >>> neck = KroneckerNeck([16, 32], levels=-1, mode='qkv')
        >>> [tuple(x.shape) for x in neck([torch.randn(1, 16, 8, 8), torch.randn(1, 32, 4, 4)])]
        [(1, 16, 8, 8), (1, 32, 4, 4)]
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        levels: int | Sequence[int] | None = None,
        mode: str = 'kv',
        maps: str = 'qkv',
        key_channels: int | None = None,
        norm: str = 'softmax',
        use_scale: bool = False,
        init_cfg: dict | list | None = None,
    ) -> None:
        check_init_cfg(init_cfg)
        # MMEngine initializes children with an init_weights of their own last, except after a checkpoint.
        pretrained = isinstance(init_cfg, dict) and init_cfg.get('type') == 'Pretrained'
        super().__init__(init_cfg if pretrained else None)
        check_ints('in_channels', in_channels)
        check_flags(use_scale=use_scale)
        levels = range(len(in_channels)) if levels is None else levels
        self.in_channels = tuple(in_channels)
        self.levels = resolve_indices('levels', levels, len(in_channels))
        self.attentions = ModuleDict()
        self.scales = nn.ParameterDict()
        for level in self.levels:
            channels = in_channels[level]
            width = channels if key_channels is None else key_channels
            check_int('key_channels', width)
            scale = width**-0.5 if use_scale else 1.0
            layer_init = None if pretrained else init_cfg
            self.attentions[str(level)] = KroneckerAttention2d(
                channels, mode, maps, key_channels, norm=norm, scale=scale, init_cfg=layer_init
            )
            self.scales[str(level)] = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return levels of the same shapes for levels (B, C, H, W), one per entry of ``in_channels``.

        Raises:
            TypeError: If an input is not a floating-point tensor.
            ValueError: If the number of levels differs from ``in_channels``, or a level is not a map or has other
                channels.
        """
        check_sequence('inputs', inputs)
        if len(inputs) != len(self.in_channels):
            raise ValueError(f'inputs must be {len(self.in_channels)} levels, as in_channels, got {len(inputs)}')
        outs = list(inputs)
        for level in self.levels:
            x = inputs[level]
            check_map(f'level {level} of inputs', x, self.in_channels[level])
            outs[level] = x + self.scales[str(level)] * self.attentions[str(level)](x)
        return tuple(outs)
