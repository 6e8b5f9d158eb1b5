"""Kronecker attention on the levels of a pyramid."""

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
    """Refines chosen levels of a pyramid: ``x + scale * attention(x)``, one scale a level, zero at the start.

    So the neck starts as the identity, and a trained network into which it is put keeps its outputs. It stands alone
    or after another neck, in MMDetection as in MMSegmentation. Source of the attention: Kronecker Attention Networks
    (KDD 2020); that it refines a pyramid is this project's own use.

    Args:
        in_channels: channels of each level.
        levels: which levels are refined, negatives count from the end; all by default. The others pass as they are.
            A level that no head reads has no gradient, so leave it out where processes train together.
        mode, maps, key_channels, norm: as in :class:`mmkron.layers.KroneckerAttention2d`.
        use_scale: divide the coefficients by the square root of the key's channels. The paper does not.
        init_cfg: initialisation of the attention layers, their own by default; or a checkpoint for the whole neck.

    Raises:
        TypeError, ValueError: an argument outside these choices.
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
        # MMEngine lets children that know how to initialise themselves have the last word, but after a checkpoint.
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
        """Levels (B, C, H, W), one for each entry of ``in_channels`` -> as many of the same shapes.

        Raises:
            TypeError: an input that is no floating-point tensor.
            ValueError: another number of levels; a level that is no map or has other channels.
        """
        check_sequence('inputs', inputs)
        if len(inputs) != len(self.in_channels):
            raise ValueError(f'in_channels names {len(self.in_channels)} levels, but {len(inputs)} come in')
        outs = list(inputs)
        for level in self.levels:
            x = inputs[level]
            check_map(f'level {level} of inputs', x, self.in_channels[level])
            outs[level] = x + self.scales[str(level)] * self.attentions[str(level)](x)
        return tuple(outs)
