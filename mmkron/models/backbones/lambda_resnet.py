"""LambdaResNet: bottleneck residual networks with lambda layers instead of 3 x 3 convolutions.

Source: Bello, LambdaNetworks, ICLR 2021 (arXiv 2102.08602). The skeleton is ResNet-RS (Bello et al., arXiv 2103.07579)
or the usual ResNet (v1.5: stride on the 3 x 3 convolution).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from mmcv.cnn import ConvModule, build_activation_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule, ModuleList, Sequential
from torch import Tensor

from mmkron.layers.configs import check_act_cfg, check_norm_cfg
from mmkron.layers.lambda_block import LambdaConvBlock, check_block_numbers, check_heads, resolve_lambda_cfg
from mmkron.layers.lambda_layer import LambdaLayer
from mmkron.models.backbones.base import Backbone, resolve_arch
from mmkron.registry import MODELS
from mmkron.utils.checks import check_choice, check_flags, check_int, check_ints, check_probability, resolve_size

# depth -> blocks of the stages c2 to c5, and the lambda blocks of c4, counted from 1. A public implementation of the
# paper's table confirms the positions for 50, 101 and 152; for the deeper networks only their number.
DEPTHS: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    50: ((3, 4, 6, 3), (3,)),
    101: ((3, 4, 23, 3), (6, 12, 18)),
    152: ((3, 8, 36, 3), (5, 10, 15, 20, 25, 30)),
    200: ((3, 24, 36, 3), (5, 10, 15, 20, 25, 30)),
    270: ((4, 29, 53, 4), (8, 16, 24, 32, 40, 48)),
    350: ((4, 36, 72, 4), (10, 20, 30, 40, 50, 60)),
    420: ((4, 44, 87, 4), (10, 20, 30, 40, 50, 60, 70, 80)),
}

SKELETONS: dict[str, dict[str, Any]] = {
    'rs': dict(stem_channels=(32, 32, 64), max_pool=False, avg_down=True, lambda_pool=3),
    'v1.5': dict(stem_channels=(64,), max_pool=True, avg_down=False, lambda_pool=3),
    'timm': dict(stem_channels=(24, 32, 64), max_pool=True, avg_down=False, lambda_pool=2),
}

STAGES = ('c2', 'c3', 'c4', 'c5')


class StageSpec(NamedTuple):
    """One resolved stage.

    Attributes:
        index: 0 for c2 to 3 for c5.
        lambda_blocks: For each block, whether it has a lambda layer.
        width: Channels of the bottlenecks; the stage has four times as many.
        stride: Stride of the stage's maps in the image.
        feat_sizes: For each block, the map (H, W) that its global lambda layer sees; None for local layers.
        drop_path_rates: For each block, the probability at which its path is dropped.
    """

    index: int
    lambda_blocks: Sequence[bool]
    width: int
    stride: int
    feat_sizes: Sequence[tuple[int, int] | None]
    drop_path_rates: Sequence[float]


@MODELS.register_module()
class LambdaResNet(Backbone):
    """Residual network with lambda layers.

    From `LambdaNetworks: Modeling Long-Range Interactions without Attention <https://arxiv.org/abs/2102.08602>`_. The
    four stages c2 to c5 have strides 4, 8, 16 and 32 and 256, 512, 1024 and 2048 channels.

    Args:
        depth: 50, 101, 152, 200, 270, 350 or 420. Sets the number of blocks per stage and which blocks of c4 have a
            lambda layer; all blocks of c5 have one, blocks of c2 and c3 have none.
        stage_layers: Four letters instead, one per stage: ``C`` for convolutions, ``L`` for lambda layers in all its
            blocks. Excludes ``lambda_blocks``.
        stage_blocks: Numbers of blocks of the four stages instead of those set by ``depth``; needs ``stage_layers`` or
            ``lambda_blocks``.
        lambda_blocks: Lambda blocks of each stage instead, counted from 1, as in ``((), (), (3,), (1, 2, 3))``.
        skeleton: ``rs`` (ResNet-RS: a stem of 3 x 3 convolutions, the last one of stride 2 instead of max pooling, and
            average pooling in the shortcuts), ``v1.5`` (7 x 7 convolution and max pooling, strided shortcuts), ``timm``
            (timm's lambda networks); or a dict with ``stem_channels`` (one entry per convolution, the first of
            stride 2; a single one is 7 x 7), ``max_pool``, ``avg_down`` and ``lambda_pool`` (side of the average
            pooling after a lambda layer of stride 2: 3 with padding, or 2).
        in_channels: Channels of the image.
        base_channels: Width of the bottlenecks of c2. It scales all channels, including ``stem_channels``, by
            ``base_channels / 64``.
        lambda_cfg: Arguments of :class:`mmkron.layers.LambdaLayer`, with its defaults. The layers keep the
            initialization of its ``init_cfg``, whatever ``init_cfg`` is here.
        share_embeddings: Whether the lambda layers of a stage share one position table if their shapes agree.
        img_size: Side or (H, W) of the image that global lambda layers (``scope=None``) are built for; else None.
        se: Whether to add squeeze-and-excitation, ratio 1/4, after the last convolution of the blocks without lambda
            layer, as in ResNet-RS.
        drop_path_rate: Probability at which the path of the last block is dropped. The rate increases linearly from 0
            in the first block.
        out_indices: Stages whose maps are returned; negative indices count from the end.
        frozen_stages: Number of stages to freeze together with the stem: -1 freezes nothing, 0 the stem alone.
        norm_eval: Whether to keep batch norm in evaluation mode during training.
        norm_cfg: Config of the norms, including the norms of the lambda layers. Defaults to ``dict(type='BN')``.
        act_cfg: Config of the activations. Defaults to ReLU.
        with_cp: Whether to recompute blocks in the backward pass to save memory.
        zero_init_residual: Whether to set the weight of each block's last norm to 0 at first, so that the block starts
            as its shortcut.
        init_cfg: Initialization of the convolutions. Defaults to Kaiming normal.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``depth`` or ``skeleton`` is unknown, arguments exclude each other, ``heads`` of ``lambda_cfg``
            does not divide a width, ``img_size`` is missing for global layers or given for local ones, or
            ``zero_init_residual`` is given with a norm without a weight.

    Examples:
        >>> model = LambdaResNet(50, out_indices=(0, 1, 2, 3))
        >>> [tuple(x.shape) for x in model(torch.randn(1, 3, 64, 64))]
        [(1, 256, 16, 16), (1, 512, 8, 8), (1, 1024, 4, 4), (1, 2048, 2, 2)]
        >>> model = LambdaResNet(stage_layers='CCLL', skeleton='v1.5', lambda_cfg=dict(scope=7))
    """

    def __init__(
        self,
        depth: int = 50,
        stage_layers: str | None = None,
        stage_blocks: Sequence[int] | None = None,
        lambda_blocks: Sequence[Sequence[int]] | None = None,
        skeleton: str | Mapping[str, Any] = 'rs',
        in_channels: int = 3,
        base_channels: int = 64,
        lambda_cfg: Mapping[str, Any] | None = None,
        share_embeddings: bool = False,
        img_size: int | tuple[int, int] | None = None,
        se: bool = False,
        drop_path_rate: float = 0.0,
        out_indices: int | Sequence[int] = -1,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        norm_cfg: dict | None = None,
        act_cfg: dict | None = None,
        with_cp: bool = False,
        zero_init_residual: bool = True,
        init_cfg: dict | list | None = None,
    ) -> None:
        placement = place_lambdas(depth, stage_layers, stage_blocks, lambda_blocks)
        skeleton = resolve_skeleton(skeleton)
        check_int('base_channels', base_channels)
        check_flags(share_embeddings=share_embeddings, se=se, zero_init_residual=zero_init_residual)
        check_probability('drop_path_rate', drop_path_rate)
        check_norm_cfg(norm_cfg)
        check_act_cfg(act_cfg)
        norm_act = dict(norm_cfg=norm_cfg or dict(type='BN'), act_cfg=act_cfg or dict(type='ReLU', inplace=True))
        lambda_cfg = resolve_lambda_cfg(lambda_cfg, norm_act['norm_cfg'])
        img_size = resolve_img_size(img_size, lambda_cfg)
        init_cfg = dict(type='Kaiming', layer='Conv2d') if init_cfg is None else init_cfg
        super().__init__(in_channels, len(STAGES), out_indices, frozen_stages, norm_eval, with_cp, init_cfg)

        specs = resolve_stages(placement, base_channels, img_size, drop_path_rate)
        block_cfg = dict(
            lambda_pool=skeleton['lambda_pool'],
            avg_down=skeleton['avg_down'],
            se=se,
            zero_init_residual=zero_init_residual,
            **norm_act,
        )
        stem_channels = [max(1, c * base_channels // 64) for c in skeleton['stem_channels']]
        self.stem = make_stem(in_channels, stem_channels, skeleton['max_pool'], norm_act)
        # MMEngine's containers call init_weights of the blocks.
        self.stages = ModuleList()
        channels = stem_channels[-1]
        for spec in specs[: self.last_stage + 1]:
            if any(spec.lambda_blocks):
                check_heads(lambda_cfg, spec.width, STAGES[spec.index], base_channels)
            stage = self._make_stage(spec, channels, lambda_cfg, block_cfg)
            if share_embeddings:
                tie_position_tables(stage)
            self.stages.append(stage)
            channels = 4 * spec.width
        self.finish([4 * spec.width for spec in specs], [spec.stride for spec in specs])

    @staticmethod
    def _make_stage(
        spec: StageSpec, in_channels: int, lambda_cfg: Mapping[str, Any], block_cfg: Mapping[str, Any]
    ) -> Sequential:
        """Build the blocks of a stage; the first one of c3, c4 and c5 has stride 2."""
        blocks = []
        for block_index, is_lambda in enumerate(spec.lambda_blocks):
            downsample = spec.index > 0 and block_index == 0
            layer_cfg = dict(lambda_cfg) if is_lambda else None
            if is_lambda and spec.feat_sizes[block_index] is not None:
                layer_cfg['feat_size'] = spec.feat_sizes[block_index]
            block = LambdaBottleneck(
                in_channels,
                spec.width,
                stride=2 if downsample else 1,
                lambda_cfg=layer_cfg,
                drop_path_rate=spec.drop_path_rates[block_index],
                **block_cfg,
            )
            blocks.append(block)
            in_channels = 4 * spec.width
        return Sequential(*blocks)


class LambdaBottleneck(BaseModule):
    """Bottleneck block: 1 x 1 convolution, 3 x 3 convolution or lambda layer, 1 x 1 convolution; plus shortcut.

    Args:
        in_channels: Channels of the input.
        width: Channels of the bottleneck; the output has four times as many.
        stride: 1 or 2.
        lambda_cfg: Arguments of the lambda layer; None for a convolution.
        lambda_pool: Side of the pooling in :class:`mmkron.layers.lambda_block.LambdaConvBlock`.
        avg_down: Whether the shortcut downsamples by average pooling instead of a strided convolution.
        se: Whether to apply squeeze-and-excitation to the path of a block without lambda layer.
        drop_path_rate: Probability at which the path of a sample is dropped.
        zero_init_residual: Whether the weight of the last norm is 0 at first.
        norm_cfg: Config of the norms.
        act_cfg: Config of the activations.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        stride: int,
        lambda_cfg: Mapping[str, Any] | None,
        lambda_pool: int,
        avg_down: bool,
        se: bool,
        drop_path_rate: float,
        zero_init_residual: bool,
        norm_cfg: dict,
        act_cfg: dict,
    ) -> None:
        super().__init__()
        norm_act = dict(norm_cfg=norm_cfg, act_cfg=act_cfg)
        linear = dict(norm_cfg=norm_cfg, act_cfg=None)
        channels = 4 * width
        self.reduce = ConvModule(in_channels, width, 1, **norm_act)
        if lambda_cfg is None:
            self.spatial = ConvModule(width, width, 3, stride, 1, **norm_act)
        else:
            self.spatial = LambdaConvBlock(width, lambda_cfg, stride, lambda_pool, **norm_act)
        self.project = ConvModule(width, channels, 1, **linear)
        self.zero_init_residual = zero_init_residual
        if zero_init_residual and getattr(self.project.norm, 'weight', None) is None:
            raise ValueError(f'zero_init_residual needs a normalization with a weight, got norm_cfg={norm_cfg!r}')
        self.se = make_se(channels) if se and lambda_cfg is None else None
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate else nn.Identity()
        self.shortcut = nn.Identity()
        if stride > 1 or in_channels != channels:
            pooled = stride > 1 and avg_down
            pool = nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False) if pooled else nn.Identity()
            conv = ConvModule(in_channels, channels, 1, 1 if pooled else stride, **linear)
            self.shortcut = nn.Sequential(pool, conv)
        self.act = build_activation_layer(act_cfg)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map (B, 4 * width, ceil(H / stride), ceil(W / stride)) for a map (B, in_channels, H, W)."""
        path = self.project(self.spatial(self.reduce(x)))
        if self.se is not None:
            path = path * self.se(path)
        return self.act(self.drop_path(path) + self.shortcut(x))

    def init_weights(self) -> None:
        """Initialize the lambda layer and the last norm only: ConvModule's rule would overwrite ``init_cfg``."""
        if isinstance(self.spatial, LambdaConvBlock):
            self.spatial.init_weights()
        if self.zero_init_residual:
            nn.init.zeros_(self.project.norm.weight)


def make_stem(in_channels: int, widths: Sequence[int], max_pool: bool, norm_act: Mapping[str, Any]) -> nn.Sequential:
    """Build convolutions, the first of stride 2, then max pooling or one more convolution of stride 2."""
    layers: list[nn.Module] = []
    for index, width in enumerate(widths):
        kernel = 7 if len(widths) == 1 else 3
        layers.append(ConvModule(in_channels, width, kernel, 1 if index else 2, kernel // 2, **norm_act))
        in_channels = width
    layers.append(nn.MaxPool2d(3, 2, 1) if max_pool else ConvModule(in_channels, in_channels, 3, 2, 1, **norm_act))
    return nn.Sequential(*layers)


def make_se(channels: int) -> nn.Sequential:
    """Build the layers that give the factors (B, channels, 1, 1) of squeeze-and-excitation."""
    reduced = max(1, channels // 4)
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        ConvModule(channels, reduced, 1, act_cfg=dict(type='ReLU')),
        ConvModule(reduced, channels, 1, act_cfg=dict(type='Sigmoid')),
    )


def tie_position_tables(blocks: Sequence[nn.Module]) -> None:
    """Make lambda layers whose position tables have the same shape share one table."""
    tables: dict[tuple[int, ...], nn.Parameter] = {}
    for block in blocks:
        for layer in block.modules():
            if isinstance(layer, LambdaLayer):
                layer.position_table = tables.setdefault(tuple(layer.position_table.shape), layer.position_table)


def place_lambdas(
    depth: int,
    stage_layers: str | None = None,
    stage_blocks: Sequence[int] | None = None,
    lambda_blocks: Sequence[Sequence[int]] | None = None,
) -> list[list[bool]]:
    """Return for each stage which blocks have a lambda layer; for the arguments see :class:`LambdaResNet`.

    Raises:
        TypeError: If a number of blocks is not an int, or an argument is not a sequence.
        ValueError: If the depth is unknown, arguments exclude each other, or one has no entry per stage.
    """
    if stage_layers is not None and lambda_blocks is not None:
        raise ValueError(f'stage_layers excludes lambda_blocks, got {stage_layers!r} and {lambda_blocks!r}')
    check_choice('depth', depth, DEPTHS)
    if stage_blocks is None:
        stage_blocks, c4 = DEPTHS[depth]
        if stage_layers is None and lambda_blocks is None:
            lambda_blocks = ((), (), c4, range(1, stage_blocks[-1] + 1))
    elif stage_layers is None and lambda_blocks is None:
        raise ValueError(f'stage_blocks needs stage_layers or lambda_blocks, got stage_blocks={stage_blocks!r} alone')
    stage_blocks = check_stages('stage_blocks', stage_blocks)
    for blocks in stage_blocks:
        check_int('stage_blocks', blocks)

    if stage_layers is not None:
        if not isinstance(stage_layers, str) or len(stage_layers) != len(STAGES) or set(stage_layers) - {'C', 'L'}:
            raise ValueError(f'stage_layers must be {len(STAGES)} letters C or L, got {stage_layers!r}')
        return [[letter == 'L'] * blocks for letter, blocks in zip(stage_layers, stage_blocks)]
    placement = []
    for name, blocks, indices in zip(STAGES, stage_blocks, check_stages('lambda_blocks', lambda_blocks)):
        check_block_numbers(f'lambda_blocks of {name}', indices, blocks)
        placement.append([number in indices for number in range(1, blocks + 1)])
    return placement


def check_stages(name: str, value: Any) -> Sequence:
    """Return ``value`` if it is a sequence of one entry per stage; raise TypeError or ValueError otherwise."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f'{name} must be a sequence of {len(STAGES)}, one entry per stage, got {value!r}')
    if len(value) != len(STAGES):
        raise ValueError(f'{name} must have {len(STAGES)} entries, one per stage, got {value!r}')
    return value


def resolve_skeleton(skeleton: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked settings of a skeleton.

    Raises:
        TypeError: If it is neither a name nor a dict, or an entry has a wrong type.
        ValueError: If the name is unknown, or the dict has other keys or values.
    """
    settings = resolve_arch(skeleton, SKELETONS, 'skeleton')
    check_ints('stem_channels of skeleton', settings['stem_channels'])
    for key in ('max_pool', 'avg_down'):
        check_choice(f'{key} of skeleton', settings[key], (True, False))
    check_choice('lambda_pool of skeleton', settings['lambda_pool'], (2, 3))
    return settings


def resolve_img_size(img_size: int | Sequence[int] | None, lambda_cfg: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size (H, W) of the image for global lambda layers, None for local ones.

    Raises:
        TypeError: If a side is not an int.
        ValueError: If the layers are global and ``img_size`` is None, or local and it is not.
    """
    is_global = 'scope' in lambda_cfg and lambda_cfg['scope'] is None
    if is_global == (img_size is None):
        raise ValueError(
            'img_size must be a side or (H, W) where lambda_cfg has scope=None (global), and None elsewhere; got '
            f'img_size={img_size!r} and lambda_cfg={dict(lambda_cfg)!r}'
        )
    return resolve_size('img_size', img_size) if is_global else None


def resolve_stages(
    placement: Sequence[Sequence[bool]], base_channels: int, img_size: tuple[int, int] | None, drop_path_rate: float
) -> list[StageSpec]:
    """Return the specs of all stages for the blocks of :func:`place_lambdas`."""
    num_blocks = sum(map(len, placement))
    rates = torch.linspace(0, drop_path_rate, num_blocks, dtype=torch.float64, device='cpu').tolist()
    specs = []
    for index, blocks in enumerate(placement):
        stride = 4 * 2**index
        # The lambda layer of a block of stride 2 still sees the map of the stage before.
        strides = [stride // 2 if index > 0 and block_index == 0 else stride for block_index in range(len(blocks))]
        feat_sizes = [img_size and tuple(-(-side // s) for side in img_size) for s in strides]
        stage_rates, rates = rates[: len(blocks)], rates[len(blocks) :]
        specs.append(StageSpec(index, blocks, base_channels * 2**index, stride, feat_sizes, stage_rates))
    return specs
