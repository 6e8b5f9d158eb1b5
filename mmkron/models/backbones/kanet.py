"""KANet and the networks to which it is compared: MobileNetV2 built from the paper's four modules.

Source: Gao, Wang and Ji, Kronecker Attention Networks, KDD 2020 (arXiv 2007.08442), sections 3.5 and 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn import ConvModule, build_norm_layer
from mmengine.model import BaseModule, ModuleList, Sequential
from torch import Tensor

from mmkron.layers.configs import check_act_cfg, check_norm_cfg
from mmkron.layers.kronecker_attention import KroneckerAttention2d
from mmkron.models.backbones.base import resolve_arch
from mmkron.models.backbones.mobilenet_v2 import (
    LAST_CHANNELS,
    STEM_CHANNELS,
    BlockSpec,
    MobileBackbone,
    resolve_stages,
    scale_channels,
)
from mmkron.ops.column_attention import NORMS
from mmkron.ops.kronecker import MODES
from mmkron.registry import MODELS
from mmkron.utils.checks import check_choice, check_int, check_number

# The paper's modules (figure 4): (skip, attention).
MODULES = {
    'Base': (False, False),
    'BaseSkip': (True, False),
    'Attn': (False, True),
    'AttnSkip': (True, True),
}

# Rows: module, expansion r, channels, repeats, stride of the first block. Every row of stride 2 begins a stage.
# The paper leaves details open; this reading fits the known counts of its tables, see configs/kanet/README.md.
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


def _replace(layout: Sequence[tuple], modules: Mapping[str, str]) -> tuple[tuple, ...]:
    return tuple((modules.get(module, module), *rest) for module, *rest in layout)


ALL_BASE = dict.fromkeys(MODULES, 'Base')
WITHOUT_SKIPS = {'BaseSkip': 'Base', 'AttnSkip': 'Attn'}
WITHOUT_ATTENTION = {'Attn': 'Base', 'AttnSkip': 'Base'}

ARCHS: dict[str, dict[str, Any]] = {
    'kanet-kv': dict(layout=KANET_LAYOUT, attention='kv'),
    'kanet-qkv': dict(layout=KANET_LAYOUT, attention='qkv'),
    'attnnet': dict(layout=KANET_LAYOUT, attention='dense'),
    'attnnet-pool': dict(layout=KANET_LAYOUT, attention='pooled'),
    'mobilenet-v2-kao': dict(layout=_replace(KANET_LAYOUT, WITHOUT_SKIPS), attention='kv'),
    'kanet-wo-kao': dict(layout=_replace(KANET_LAYOUT, WITHOUT_ATTENTION), attention='kv'),
    'mobilenet-v2': dict(layout=_replace(KANET_LAYOUT, ALL_BASE), attention='kv'),
}


@MODELS.register_module()
class KANet(MobileBackbone):
    """Kronecker attention network (KANet).

    From `Kronecker Attention Networks <https://arxiv.org/abs/2007.08442>`_ (KDD 2020), sections 3.5 and 4.1.

    The last stage is the 1 x 1 convolution before the pooling:

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

    Dense prediction uses ``out_indices=(1, 2, 3, 4)``.

    Args:
        arch: Name of an architecture, or a dict with ``layout`` (rows of module, expansion, channels, repeats, stride;
            modules ``Base``, ``BaseSkip``, ``Attn``, ``AttnSkip``) and ``attention`` (``kv``, ``qkv``, ``dense`` or
            ``pooled``). The names are:

            - ``kanet-kv``, ``kanet-qkv``: attention by KAO_KV or KAO_QKV.
            - ``attnnet``, ``attnnet-pool``: dense or pooled attention instead.
            - ``mobilenet-v2-kao``: attention modules in MobileNetV2.
            - ``kanet-wo-kao``: base modules instead of the attention modules.
            - ``mobilenet-v2``: MobileNetV2.
        widen_factor: Factor on all channels, which remain multiples of 8; the last convolution is never narrowed.
        in_channels: Channels of the image.
        stem_stride: Stride of the first convolution. 1 suits images of 32 x 32 and halves every stride above.
        coefficient_norm: Normalization of the attention coefficients: ``'bn_softmax'`` (the paper applies batch norm to
            them and does not say where), ``'softmax'`` or ``'bn'``.
        out_indices: Stages whose maps are returned; negative indices count from the end.
        frozen_stages: Number of stages to freeze together with the stem: -1 freezes nothing, 0 the stem alone.
        norm_eval: Whether to keep batch norm in evaluation mode during training.
        norm_cfg: Config of the norm after each convolution. Defaults to ``dict(type='BN')``. It does not apply to the
            norm of the attention coefficients, whose statistics are taken per process.
        act_cfg: Config of the activations. Defaults to ``dict(type='ReLU6')``.
        with_cp: Whether to recompute blocks in the backward pass to save memory. As usual in PyTorch, their running
            statistics are then updated twice per step.
        init_cfg: Initialization. Defaults to Xavier uniform, as in the paper.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``arch`` or ``coefficient_norm`` is unknown, a row of the layout is invalid, or a number is out
            of range.

    Examples:
        >>> import torch
        >>> model = KANet('kanet-kv', widen_factor=0.5, out_indices=(1, 2, 3, 4))
        >>> [tuple(x.shape) for x in model(torch.randn(1, 3, 64, 64))]
        [(1, 16, 16, 16), (1, 16, 8, 8), (1, 48, 4, 4), (1, 160, 2, 2)]
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
        check_choice('attention of arch', settings['attention'], MODES)
        check_choice('coefficient_norm', coefficient_norm, NORMS)
        check_norm_cfg(norm_cfg)
        check_act_cfg(act_cfg)
        stages = resolve_stages(settings['layout'], widen_factor)
        if init_cfg is None:
            init_cfg = dict(type='Xavier', layer=['Conv1d', 'Conv2d'], distribution='uniform')
        super().__init__(in_channels, len(stages) + 1, out_indices, frozen_stages, norm_eval, with_cp, init_cfg)
        self.attention_cfg = dict(mode=settings['attention'], norm=coefficient_norm)
        self.norm_act = dict(norm_cfg=norm_cfg or dict(type='BN'), act_cfg=act_cfg or dict(type='ReLU6'))

        stem_channels = scale_channels(STEM_CHANNELS, widen_factor)
        last_channels = scale_channels(LAST_CHANNELS, max(1.0, widen_factor))
        self.stem = nn.Sequential(ConvModule(in_channels, stem_channels, 3, stem_stride, 1, **self.norm_act))
        # MMEngine's containers, because it does not reach the init_weights of blocks through torch's.
        self.stages = ModuleList(self._make_stage(blocks) for blocks in stages[: self.last_stage + 1])
        if self.last_stage == len(stages):
            last_conv = ConvModule(stages[-1][-1].out_channels, last_channels, 1, **self.norm_act)
            self.stages.append(nn.Sequential(last_conv))
        self.finish_stages(stages, stem_stride, last_channels)

    def _make_stage(self, blocks: Sequence[BlockSpec]) -> Sequential:
        return Sequential(
            *(
                KANetModule(
                    block.module,
                    block.in_channels,
                    block.out_channels,
                    block.expansion,
                    block.stride,
                    self.attention_cfg,
                    **self.norm_act,
                )
                for block in blocks
            )
        )


class KANetModule(BaseModule):
    """One of the paper's four modules (figure 4), which are inverted residual blocks of expansion r.

    - ``Base``: expand to rC, 3 x 3 depth-wise convolution, project.
    - ``BaseSkip``: expand to (r - 1)C and concatenate the input, then as ``Base``.
    - ``Attn``: the convolutions have (r - 1)C channels; attention on the input gives the other C channels before the
      projection, followed by average pooling if the stride is 2.
    - ``AttnSkip``: ``Attn`` with an attention that adds its input if the stride is 1.

    All add the input to the output where the shapes allow. The attention maps only its value and is followed by a norm
    without an activation (the text does not specify the latter).

    Args:
        module: Name of the module.
        in_channels: C, channels of the input.
        out_channels: Channels of the output.
        expansion: r; at least 2 with attention.
        stride: 1 or 2.
        attention: Arguments of :class:`mmkron.layers.KroneckerAttention2d`.
        norm_cfg: Config of the norms.
        act_cfg: Config of the activations.

    Raises:
        TypeError: If ``expansion`` is not an int.
        ValueError: If ``module`` is unknown, or ``expansion`` or ``stride`` is out of range.
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
        norm_act = dict(norm_cfg=norm_cfg, act_cfg=act_cfg)

        hidden_channels = expansion * in_channels
        # Channels that the input itself or its attention gives.
        given_channels = in_channels if self.skip or has_attention else 0
        path_channels = hidden_channels - in_channels if has_attention else hidden_channels
        self.expand = None
        if expansion > 1:
            self.expand = ConvModule(in_channels, hidden_channels - given_channels, 1, **norm_act)
        self.depthwise = ConvModule(path_channels, path_channels, 3, stride, 1, groups=path_channels, **norm_act)
        self.attention = self.attention_norm = None
        if has_attention:
            self.attention = KroneckerAttention2d(in_channels, **attention)
            self.attention_norm = build_norm_layer(norm_cfg, in_channels)[1]
        self.project = ConvModule(hidden_channels, out_channels, 1, norm_cfg=norm_cfg, act_cfg=None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map (B, out_channels, ceil(H / stride), ceil(W / stride)) for a map (B, in_channels, H, W)."""
        path = x if self.expand is None else self.expand(x)
        if self.skip and self.attention is None and self.expand is not None:
            path = torch.cat([path, x], 1)
        path = self.depthwise(path)
        if self.attention is not None:
            path = torch.cat([path, self._attend(x)], 1)
        path = self.project(path)
        return path + x if self.add_input else path

    def init_weights(self) -> None:
        """Do nothing: the network's ``init_cfg`` initializes, and ConvModule's rule would overwrite it."""

    def _attend(self, x: Tensor) -> Tensor:
        out = self.attention_norm(self.attention(x))
        if self.stride > 1:
            return F.avg_pool2d(out, self.stride, ceil_mode=True, count_include_pad=False)
        return out + x if self.skip else out
