"""Neck that refines the levels of a pyramid by Kronecker attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from mmengine.model import BaseModule, ModuleDict
from torch import Tensor

from mmkron.layers.configs import check_init_cfg
from mmkron.layers.kronecker_attention import KroneckerAttention2d, attention_scale
from mmkron.ops.checks import check_map
from mmkron.registry import MODELS
from mmkron.utils.checks import check_ints, check_sequence, resolve_indices


@MODELS.register_module()
class KroneckerNeck(BaseModule):
    """Neck that refines selected levels of a pyramid: ``x + scale * attention(x)``, with one learned scale per level.

    The scales start at zero, so the neck starts as the identity, and adding it to a trained network keeps the outputs.
    It is used alone or after another neck, in MMDetection and MMSegmentation. The attention is from `Kronecker
    Attention Networks <https://arxiv.org/abs/2007.08442>`_ (KDD 2020), section 3.4; refining a pyramid with it is a use
    of this project.

    Args:
        in_channels: Channels of each level.
        levels: Levels to refine; negative indices count from the end. Defaults to all. Other levels are returned
            unchanged. In distributed training, omit levels that no head reads, because they have no gradient.
        mode: Mode of :class:`mmkron.layers.KroneckerAttention2d`: ``'kv'``, ``'qkv'``, ``'dense'`` or ``'pooled'``.
        maps: Which of q, k and v have a linear map.
        key_channels: Channels of the mapped query and key. Defaults to the level's channels.
        norm: Normalization of the coefficients: ``'softmax'``, ``'bn_softmax'`` or ``'bn'``.
        use_scale: Whether to divide the coefficients by the square root of the key's channels. The paper does not.
        init_cfg: Initialization of the attention layers, by default their own; or a checkpoint for the whole neck.

    Raises:
        TypeError: If ``in_channels`` or ``levels`` does not consist of ints.
        ValueError: If a level is out of range or repeated, or an argument of the attention is invalid.

    Examples:
        >>> import torch
        >>> neck = KroneckerNeck((16, 32), levels=-1, mode='qkv')
        >>> outs = neck((torch.randn(1, 16, 20, 28), torch.randn(1, 32, 10, 14)))
        >>> [tuple(out.shape) for out in outs]
        [(1, 16, 20, 28), (1, 32, 10, 14)]
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
        # In MMEngine, children that define init_weights overwrite the parent's init_cfg, unless it is a checkpoint.
        pretrained = isinstance(init_cfg, dict) and init_cfg.get('type') == 'Pretrained'
        super().__init__(init_cfg if pretrained else None)
        check_ints('in_channels', in_channels)
        levels = range(len(in_channels)) if levels is None else levels
        self.in_channels = tuple(in_channels)
        self.levels = resolve_indices('levels', levels, len(in_channels))
        self.attentions = ModuleDict()
        self.scales = nn.ParameterDict()
        for level in self.levels:
            channels = in_channels[level]
            scale = attention_scale(use_scale, channels if key_channels is None else key_channels)
            layer_init = None if pretrained else init_cfg
            self.attentions[str(level)] = KroneckerAttention2d(
                channels, mode, maps, key_channels, norm=norm, scale=scale, init_cfg=layer_init
            )
            self.scales[str(level)] = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the levels, refined or unchanged, in the same shapes.

        Args:
            inputs: Map (B, C, H, W) for each entry of ``in_channels``.

        Raises:
            TypeError: If ``inputs`` is not a sequence, or a refined level is not a floating-point tensor.
            ValueError: If the number of levels differs, or a refined level is not a map or has other channels.
        """
        check_sequence('inputs', inputs)
        if len(inputs) != len(self.in_channels):
            raise ValueError(
                f'inputs must have {len(self.in_channels)} levels, one per entry of in_channels, got {len(inputs)}'
            )
        outs = list(inputs)
        for level in self.levels:
            x = inputs[level]
            check_map(f'level {level} of inputs', x, self.in_channels[level])
            outs[level] = x + self.scales[str(level)] * self.attentions[str(level)](x)
        return tuple(outs)
