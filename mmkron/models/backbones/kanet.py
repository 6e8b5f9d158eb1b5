"""KANet and the networks it is compared with: MobileNetV2 built from the paper's four modules.

Source: Gao, Wang and Ji, Kronecker Attention Networks, KDD 2020 (arXiv 2007.08442), sections 3.5 and 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule, build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor

from mmkron.layers.configs import check_act_cfg, check_norm_cfg
from mmkron.layers.kronecker_attention import REDUCTIONS, KroneckerAttention2d
from mmkron.models.backbones.base import resolve_arch
from mmkron.models.backbones.mobilenet_v2 import MobileBackbone, group_rows
from mmkron.ops.kronecker import NORMS
from mmkron.registry import MODELS
from mmkron.utils.checks import check_choice, check_int, check_number

# The paper's modules (figure 4): (skip, attention).
MODULES = {
    'Base': (False, False),
    'BaseSkip': (True, False),
    'Attn': (False, True),
    'AttnSkip': (True, True),
}

# Rows: module, expansion r, channels, repeats, stride of the first block. Every row of stride 2 begins a
# stage. The reading of the text that fits the counts of the paper's tables as far as they are known; see
# configs/kanet/README.md.
KANET_LAYOUT = (
    ('BaseSkip', 1, 16, 1, 1),
    ('BaseSkip', 6, 24, 2, 2),
    ('BaseSkip', 6, 32, 2, 2),
    ('Attn', 6, 32, 1, 1),
    ('BaseSkip', 6, 64, 1, 2),
    ('AttnSkip', 6, 64, 3, 1),
    ('AttnSkip', 6, 96, 3, 1),
    ('BaseSkip', 6, 160, 1, 2),
    ('AttnSkip', 6, 160, 2, 1),
    ('AttnSkip', 6, 320, 1, 1),
)


def _exchange(layout: Sequence[tuple], modules: Mapping[str, str]) -> tuple[tuple, ...]:
    return tuple((modules.get(module, module), *rest) for module, *rest in layout)


ALL_BASE = dict.fromkeys(MODULES, 'Base')
WITHOUT_SKIPS = {'BaseSkip': 'Base', 'AttnSkip': 'Attn'}
WITHOUT_ATTENTION = {'Attn': 'Base', 'AttnSkip': 'Base'}

ARCHS: dict[str, dict[str, Any]] = {
    'kanet-kv': dict(layout=KANET_LAYOUT, attention='kv'),
    'kanet-qkv': dict(layout=KANET_LAYOUT, attention='qkv'),
    'attnnet': dict(layout=KANET_LAYOUT, attention='dense'),
    'attnnet-pool': dict(layout=KANET_LAYOUT, attention='pooled'),
    'mobilenet-v2-kao': dict(layout=_exchange(KANET_LAYOUT, WITHOUT_SKIPS), attention='kv'),
    'kanet-wo-kao': dict(layout=_exchange(KANET_LAYOUT, WITHOUT_ATTENTION), attention='kv'),
    'mobilenet-v2': dict(layout=_exchange(KANET_LAYOUT, ALL_BASE), attention='kv'),
}


@MODELS.register_module()
class KANet(MobileBackbone):
    """Kronecker attention network.

    The stages have strides 2, 4, 8, 16 and 32, and a last one is the 1 x 1 convolution before the pooling:

    ===== ======= ======== =========================
    index stride  channels blocks of ``kanet-kv``
    ===== ======= ======== =========================
    0     2       16       1
    1     4       24       2
    2     8       32       3
    3     16      96       7
    4     32      320      4
    5     32      1280     the 1 x 1 convolution
    ===== ======= ======== =========================

    Dense prediction takes ``out_indices=(1, 2, 3, 4)``.

    Args:
        arch: ``kanet-kv``, ``kanet-qkv`` (attention by KAO_KV or KAO_QKV), ``attnnet``, ``attnnet-pool`` (dense or
            pooled attention in the same places), ``mobilenet-v2-kao`` (attention modules in MobileNetV2),
            ``kanet-wo-kao`` (base modules for the attention modules), ``mobilenet-v2``; or a dict with ``layout``
            (rows of module, expansion, channels, repeats, stride; modules ``Base``, ``BaseSkip``, ``Attn``,
            ``AttnSkip``) and ``attention`` (``kv``, ``qkv``, ``dense`` or ``pooled``).
        widen_factor: factor on all channels, which stay multiples of 8; the last convolution is never narrowed.
        in_channels: channels of the image.
        stem_stride: stride of the first convolution; 1 suits images of 32 x 32 and halves every stride above.
        coefficient_norm: normalisation of the attention coefficients: ``bn_softmax`` (the paper normalises them by
            batch norm, and does not say where), ``softmax`` or ``bn``.
        out_indices: stages whose maps are returned, negatives count from the end.
        frozen_stages: -1 none, 0 the stem, k the stem and k stages.
        norm_eval: keep batch norm in evaluation mode while training.
        norm_cfg: normalisation after each convolution; None (the default) is ``dict(type='BN')``. That of the
            attention coefficients is not part of it, and its statistics are those of one process.
        act_cfg: activation; ``dict(type='ReLU6')`` by default.
        with_cp: recompute blocks in the backward pass to save memory. As everywhere in torch, their running
            statistics then move twice a step.
        init_cfg: initialisation; Xavier uniform (the paper's) by default.

    Raises:
        TypeError, ValueError: an argument outside these choices.
    """

    def __init__(
        self,
        arch: str | Mapping[str, Any] = 'kanet-kv',
        widen_factor: float = 1.0,
        in_channels: int = 3,
        stem_stride: int = 2,
        coefficient_norm: str = 'bn_softmax',
        out_indices: int | Sequence[int] = -1,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        norm_cfg: dict | None = None,
        act_cfg: dict | None = None,
        with_cp: bool = False,
        init_cfg: dict | list | None = None,
    ) -> None:
        settings = resolve_arch(arch, ARCHS)
        check_choice('stem_stride', stem_stride, (1, 2))
        check_number('widen_factor', widen_factor, above=0)
        check_choice('attention of arch', settings['attention'], REDUCTIONS)
        check_choice('coefficient_norm', coefficient_norm, NORMS)
        check_norm_cfg(norm_cfg)
        check_act_cfg(act_cfg)
        rows = group_rows(settings['layout'])
        super().__init__(
            in_channels,
            len(rows) + 1,
            out_indices,
            frozen_stages,
            norm_eval,
            with_cp,
            dict(type='Xavier', layer=['Conv1d', 'Conv2d'], distribution='uniform') if init_cfg is None else init_cfg,
        )
        norms = dict(norm_cfg=norm_cfg or dict(type='BN'), act_cfg=act_cfg or dict(type='ReLU6'))
        attention = dict(mode=settings['attention'], norm=coefficient_norm)

        def make_block(module: str, channels: int, width: int, expansion: int, stride: int, _: int) -> KANetModule:
            return KANetModule(module, channels, width, expansion, stride, attention, **norms)

        self.build(rows, widen_factor, stem_stride, make_block, norms)


class KANetModule(BaseModule):
    """The paper's four modules (figure 4), all inverted residuals of expansion r.

    - ``Base``: expand to rC, 3 x 3 depth-wise, project.
    - ``BaseSkip``: expand to (r - 1)C and concatenate the input, then as ``Base``.
    - ``Attn``: the convolutions on (r - 1)C; attention on the input gives the other C channels before the projection,
      followed by average pooling where the stride is not 1.
    - ``AttnSkip``: ``Attn`` whose attention adds its input, where the stride is 1.

    All add the input to the output where the shapes allow. The attention maps only its value and is followed by
    normalisation without activation (the text does not fix the latter).

    Args:
        module: one of the four names.
        in_channels, out_channels: C and the width of the output.
        expansion: r; at least 2 with attention.
        stride: 1 or 2.
        attention: arguments of :class:`mmkron.layers.KroneckerAttention2d`.
        norm_cfg, act_cfg: normalisation and activation.

    Raises:
        TypeError, ValueError: an argument outside these choices.
    """

    def __init__(
        self,
        module: str,
        in_channels: int,
        out_channels: int,
        expansion: int,
        stride: int,
        attention: Mapping[str, Any],
        norm_cfg: dict,
        act_cfg: dict,
    ) -> None:
        super().__init__()
        check_choice('module', module, MODULES)
        self.skip, has_attention = MODULES[module]
        check_int(f'expansion of {module}', expansion, 2 if has_attention else 1)
        check_choice('stride', stride, (1, 2))
        self.stride = stride
        self.add_input = stride == 1 and in_channels == out_channels
        norms = dict(norm_cfg=norm_cfg, act_cfg=act_cfg)

        width = expansion * in_channels
        path_width = width - in_channels if has_attention else width
        expand_width = width - in_channels if self.skip or has_attention else width
        if expansion == 1:
            expand_width = 0
        self.expand = ConvModule(in_channels, expand_width, 1, **norms) if expand_width else None
        self.depthwise = ConvModule(path_width, path_width, 3, stride, 1, groups=path_width, **norms)
        self.attention = self.attention_norm = None
        if has_attention:
            self.attention = KroneckerAttention2d(in_channels, **attention)
            self.attention_norm = build_norm_layer(norm_cfg, in_channels)[1]
        self.project = ConvModule(width, out_channels, 1, norm_cfg=norm_cfg, act_cfg=None)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) -> (B, out_channels, ceil(H / stride), ceil(W / stride))."""
        path = x if self.expand is None else self.expand(x)
        if self.skip and self.attention is None and self.expand is not None:
            path = torch.cat([path, x], 1)
        path = self.depthwise(path)
        if self.attention is not None:
            path = torch.cat([path, self._attend(x)], 1)
        path = self.project(path)
        return path + x if self.add_input else path

    def init_weights(self) -> None:
        """Nothing: it is the network's ``init_cfg`` that does, and ConvModule's own rule would undo it."""

    def _attend(self, x: Tensor) -> Tensor:
        out = self.attention_norm(self.attention(x))
        if self.stride > 1:
            return F.avg_pool2d(out, self.stride, ceil_mode=True, count_include_pad=False)
        return out + x if self.skip else out
