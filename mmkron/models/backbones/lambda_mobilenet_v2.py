"""MobileNetV2 with lambda layers in some of its blocks.

Source: Bello, LambdaNetworks, ICLR 2021 (arXiv 2102.08602), appendix on resource-constrained networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn as nn
from mmcv.cnn import ConvModule
from mmengine.model import BaseModule, ModuleList, Sequential
from torch import Tensor

from mmkron.layers.configs import check_act_cfg, check_norm_cfg
from mmkron.layers.lambda_block import LambdaConvBlock, check_block_numbers, resolve_lambda_cfg
from mmkron.models.backbones.mobilenet_v2 import (
    LAST_CHANNELS,
    STEM_CHANNELS,
    BlockSpec,
    MobileBackbone,
    resolve_stages,
    scale_channels,
)
from mmkron.registry import MODELS
from mmkron.utils.checks import check_choice, check_number

# Rows: module, expansion, channels, repeats, stride of the first block. A row of stride 2 begins a stage.
LAYOUT = (
    ('Base', 1, 16, 1, 1),
    ('Base', 6, 24, 2, 2),
    ('Base', 6, 32, 3, 2),
    ('Base', 6, 64, 4, 2),
    ('Base', 6, 96, 3, 1),
    ('Base', 6, 160, 3, 2),
    ('Base', 6, 320, 1, 1),
)
NUM_BLOCKS = sum(row[3] for row in LAYOUT)


@MODELS.register_module()
class LambdaMobileNetV2(MobileBackbone):
    """MobileNetV2 with lambda layers in its 10th and 16th inverted bottlenecks.

    From the appendix on resource-constrained networks of `LambdaNetworks: Modeling Long-Range Interactions without
    Attention <https://arxiv.org/abs/2102.08602>`_. A lambda block does not expand: its first 1 x 1 convolution keeps
    the width. The stages have strides 2, 4, 8, 16 and 32 and 16, 24, 32, 96 and 320 channels; the last stage is the
    1 x 1 convolution to 1280 channels. Dense prediction uses ``out_indices=(1, 2, 3, 4)``.

    Args:
        lambda_blocks: Inverted bottlenecks with a lambda layer, counted from 1 to 17.
        lambda_cfg: Arguments of :class:`mmkron.layers.LambdaLayer` (a local one) that differ from a scope of 5 x 5,
            query depth 32 and 4 heads. The layers keep the initialization of its ``init_cfg``, whatever ``init_cfg``
            is here.
        widen_factor: Factor on all channels, which remain multiples of 8; the last convolution is never narrowed.
        in_channels: Channels of the image.
        stem_stride: Stride of the first convolution. 1 suits images of 32 x 32 and halves every stride above.
        out_indices: Stages whose maps are returned; negative indices count from the end.
        frozen_stages: Number of stages to freeze together with the stem: -1 freezes nothing, 0 the stem alone.
        norm_eval: Whether to keep batch norm in evaluation mode during training.
        norm_cfg: Config of the norms, including the norms of the lambda layers. Defaults to ``dict(type='BN')``.
        act_cfg: Config of the activations. Defaults to ``dict(type='ReLU6')``.
        with_cp: Whether to recompute blocks in the backward pass to save memory.
        init_cfg: Initialization of the convolutions. Defaults to Kaiming normal.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a block number is not in [1, 17], ``scope`` of ``lambda_cfg`` is None, ``heads`` does not divide
            the width of a lambda block, or another argument is out of range.

    Examples:
        >>> import torch
        >>> model = LambdaMobileNetV2(out_indices=(1, 2, 3, 4))
        >>> [tuple(x.shape) for x in model(torch.randn(1, 3, 64, 64))]
        [(1, 24, 16, 16), (1, 32, 8, 8), (1, 96, 4, 4), (1, 320, 2, 2)]
    """

    def __init__(
        self,
        lambda_blocks: Sequence[int] = (10, 16),
        lambda_cfg: Mapping[str, Any] | None = None,
        widen_factor: float = 1.0,
        in_channels: int = 3,
        stem_stride: int = 2,
        out_indices: int | Sequence[int] = -1,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        norm_cfg: dict | None = None,
        act_cfg: dict | None = None,
        with_cp: bool = False,
        init_cfg: dict | list | None = None,
    ) -> None:
        check_choice('stem_stride', stem_stride, (1, 2))
        check_number('widen_factor', widen_factor, above=0)
        check_block_numbers('lambda_blocks', lambda_blocks, NUM_BLOCKS)
        check_norm_cfg(norm_cfg)
        check_act_cfg(act_cfg)
        norm_act = dict(norm_cfg=norm_cfg or dict(type='BN'), act_cfg=act_cfg or dict(type='ReLU6'))
        lambda_cfg = dict(dict(scope=5, dim_key=32, heads=4), **resolve_lambda_cfg(lambda_cfg, norm_act['norm_cfg']))
        if lambda_cfg['scope'] is None:
            raise ValueError('scope of lambda_cfg must be an int, got None')
        stages = resolve_stages(LAYOUT, widen_factor)
        init_cfg = dict(type='Kaiming', layer='Conv2d') if init_cfg is None else init_cfg
        super().__init__(in_channels, len(stages) + 1, out_indices, frozen_stages, norm_eval, with_cp, init_cfg)

        self.lambda_blocks, self.lambda_cfg, self.norm_act = tuple(lambda_blocks), lambda_cfg, norm_act

        stem_channels = scale_channels(STEM_CHANNELS, widen_factor)
        last_channels = scale_channels(LAST_CHANNELS, max(1.0, widen_factor))
        self.stem = nn.Sequential(ConvModule(in_channels, stem_channels, 3, stem_stride, 1, **norm_act))
        # MMEngine's containers, because it does not reach the init_weights of blocks through torch's.
        self.stages = ModuleList(self._make_stage(blocks) for blocks in stages[: self.last_stage + 1])
        if self.last_stage == len(stages):
            last_conv = ConvModule(stages[-1][-1].out_channels, last_channels, 1, **norm_act)
            self.stages.append(nn.Sequential(last_conv))
        self.finish_stages(stages, stem_stride, last_channels)

    def _make_stage(self, blocks: Sequence[BlockSpec]) -> Sequential:
        return Sequential(*(self._make_block(block) for block in blocks))

    def _make_block(self, block: BlockSpec) -> BaseModule:
        channels, stride = (block.in_channels, block.out_channels), block.stride
        if block.number in self.lambda_blocks:
            return LambdaInvertedResidual(*channels, stride, self.lambda_cfg, **self.norm_act)
        return InvertedResidual(*channels, block.expansion, stride, **self.norm_act)


class InvertedResidual(BaseModule):
    """Block of MobileNetV2: 1 x 1 expansion, 3 x 3 depth-wise convolution, linear 1 x 1 projection.

    It adds its input to the output where the shapes allow.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        expansion: Factor of the expansion; no convolution expands at 1.
        stride: 1 or 2.
        norm_cfg: Config of the norms.
        act_cfg: Config of the activations.
    """

    def __init__(
        self, in_channels: int, out_channels: int, expansion: int, stride: int, norm_cfg: dict, act_cfg: dict
    ) -> None:
        super().__init__()
        norm_act = dict(norm_cfg=norm_cfg, act_cfg=act_cfg)
        hidden_channels = expansion * in_channels
        self.add_input = stride == 1 and in_channels == out_channels
        self.expand = ConvModule(in_channels, hidden_channels, 1, **norm_act) if expansion > 1 else None
        self.depthwise = ConvModule(hidden_channels, hidden_channels, 3, stride, 1, groups=hidden_channels, **norm_act)
        self.project = ConvModule(hidden_channels, out_channels, 1, norm_cfg=norm_cfg, act_cfg=None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map (B, out_channels, ceil(H / stride), ceil(W / stride)) for a map (B, in_channels, H, W)."""
        path = x if self.expand is None else self.expand(x)
        path = self.project(self.depthwise(path))
        return path + x if self.add_input else path

    def init_weights(self) -> None:
        """Do nothing: the network's ``init_cfg`` initializes, and ConvModule's rule would overwrite it."""


class LambdaInvertedResidual(BaseModule):
    """Lambda block of MobileNetV2: 1 x 1 convolution of the same width, lambda layer, linear 1 x 1 projection.

    It adds its input to the output where the shapes allow.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: 1 or 2, by average pooling after the lambda layer.
        lambda_cfg: Arguments of the lambda layer.
        norm_cfg: Config of the norms.
        act_cfg: Config of the activations.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        lambda_cfg: Mapping[str, Any],
        norm_cfg: dict,
        act_cfg: dict,
    ) -> None:
        super().__init__()
        norm_act = dict(norm_cfg=norm_cfg, act_cfg=act_cfg)
        self.add_input = stride == 1 and in_channels == out_channels
        self.keep = ConvModule(in_channels, in_channels, 1, **norm_act)
        self.spatial = LambdaConvBlock(in_channels, lambda_cfg, stride, **norm_act)
        self.project = ConvModule(in_channels, out_channels, 1, norm_cfg=norm_cfg, act_cfg=None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map (B, out_channels, ceil(H / stride), ceil(W / stride)) for a map (B, in_channels, H, W)."""
        path = self.project(self.spatial(self.keep(x)))
        return path + x if self.add_input else path

    def init_weights(self) -> None:
        """Initialize the lambda layer only: ConvModule's rule would overwrite the network's ``init_cfg``."""
        self.spatial.init_weights()
