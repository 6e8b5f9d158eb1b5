"""QKFormer: a hierarchical spiking transformer with Q-K attention.

Source: Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552), and its released code. There the last neuron of the
spiking self-attention runs over the whole batch as if it were time. Here every neuron runs over the steps of a sample;
``legacy_ssa_order=True`` exists only to reproduce weights that were trained in the other order. The paper's accuracies
were measured with them and are not claimed for this network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mmkron.layers.spiking import (
    EMBED_MODES,
    ChannelQKAttention,
    SpikingMLP,
    SpikingPatchEmbed,
    SpikingSelfAttention,
    TokenQKAttention,
)
from mmkron.models.backbones.base import Backbone, resolve_arch
from mmkron.ops.checks import check_floating, check_map
from mmkron.registry import MODELS
from mmkron.utils.checks import (
    check_choice,
    check_choices,
    check_flags,
    check_int,
    check_ints,
    check_number,
    check_probability,
)

ATTENTIONS = {'qkta': TokenQKAttention, 'qkca': ChannelQKAttention, 'ssa': SpikingSelfAttention}


def _imagenet(width: int, heads: int) -> dict[str, Any]:
    return dict(
        in_channels=3,
        dims=(width // 4, width // 2, width),
        depths=(1, 2, 7),
        heads=heads,
        mlp_ratio=4,
        steps=4,
        attentions=('qkta', 'qkta', 'ssa'),
        stem=dict(widths=(width // 8, width // 4, width // 4), pools=(True, True, False), shortcut_from=1),
        pools=(True, False),
    )


def _events(mlp_ratio: float) -> dict[str, Any]:
    return dict(
        in_channels=2,
        dims=(128, 256),
        depths=(1, 1),
        heads=16,
        mlp_ratio=mlp_ratio,
        steps=16,
        attentions=('qkta', 'ssa'),
        stem=dict(widths=(16, 32, 64, 128), pools=(False, True, True, True), shortcut_from=2),
        pools=(False, True),
    )


# stem: arguments of the first patch embedding; pools: pooling of the two convolutions of each later one. Two channels
# are the polarities of events: such an arch takes frames and refuses images.
ARCHS: dict[str, dict[str, Any]] = {
    'hst-10-384': _imagenet(384, 6),
    'hst-10-512': _imagenet(512, 8),
    'hst-10-768': _imagenet(768, 12),
    'cifar': dict(
        in_channels=3,
        dims=(96, 192, 384),
        depths=(1, 1, 2),
        heads=8,
        mlp_ratio=4,
        steps=4,
        attentions=('qkta', 'qkta', 'ssa'),
        stem=dict(widths=(48, 96), pools=(False, False), shortcut_from=1),
        pools=(False, True),
    ),
    'cifar10-dvs': _events(1),
    'dvs-gesture': _events(4),
}

OUT_MODES = ('mean', 'folded', 'steps')


@MODELS.register_module()
class QKFormer(Backbone):
    """QKFormer: hierarchical spiking transformer with Q-K attention, for images and for frames of events.

    Source: Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552). An image is shown at each of T steps.

    Args:
        arch: ``hst-10-384``, ``hst-10-512``, ``hst-10-768`` (ImageNet; strides 4, 8, 16), ``cifar`` (strides 1, 2, 4),
            ``cifar10-dvs``, ``dvs-gesture`` (events, two stages, strides 8, 16); or a dict with ``dims``, ``depths``
            (blocks per stage), ``heads``, ``mlp_ratio``, ``steps``, ``attentions``, ``stem`` and ``pools`` (arguments
            of :class:`mmkron.layers.SpikingPatchEmbed` for the first and, of two convolutions, for the later stages),
            and optionally ``in_channels``.
        in_channels: Channels of the image or frame. Default: as in the arch, or 3 if a dict has none. An arch of 2
            channels takes frames only and refuses images.
        steps: T, the number of frames of events, or of steps at which an image is shown. Default: the arch's.
        attentions: ``qkta``, ``qkca`` or ``ssa``, one per stage. Default: the arch's.
        mlp_ratio: Hidden channels of the MLP per channel of the stage. Default: the arch's.
        embed_mode: ``aba`` or ``pa``, where a patch embedding adds its shortcut: see
            :class:`mmkron.layers.SpikingPatchEmbed`.
        pool_first: Whether to pool before the norm instead of after it.
        neuron_cfg: Arguments of :class:`mmkron.layers.LIF` for all neurons, such as ``dict(kind='plif')``.
        attention_threshold: Threshold of the neurons in the attentions.
        legacy_ssa_order: See :class:`mmkron.layers.SpikingSelfAttention`.
        out_mode: Maps of firing rates, the means over T (``mean``: (B, C, H, W)), or of spike counts at each step:
            ``folded`` (T B, C, H, W) or ``steps`` (T, B, C, H, W).
        drop_path_rate: Probability of dropping the last block's paths, for a sample at all its steps; it grows linearly
            from 0 at the first block.
        out_indices: Stages whose maps are returned; negative indices count from the end.
        frozen_stages: -1 freezes nothing, 0 the first patch embedding, k that and k stages.
        norm_eval: Whether to keep batch norm in evaluation mode while training.
        norm_cfg: Config of the norms. Default: batch norm over steps and batch.
        with_cp: Whether to recompute blocks in the backward pass to save memory. Their batch norms then see each batch
            twice, as in the host libraries.
        init_cfg: Initialization. Default: torch's own, as in the released code.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an arch or mode is unknown, ``heads`` does not divide ``dims``, the sequences of a dict do not
            have one entry per stage, or a number is out of its range.

    Examples:
        >>> import torch
        >>> from mmkron.models import QKFormer
        >>> model = QKFormer('cifar', steps=2, out_indices=(0, 2)).eval()
        >>> [tuple(out.shape) for out in model(torch.rand(1, 3, 32, 32))]
        [(1, 96, 32, 32), (1, 384, 8, 8)]
    """

    def __init__(
        self,
        arch: str | Mapping[str, Any] = 'hst-10-384',
        in_channels: int | None = None,
        steps: int | None = None,
        attentions: Sequence[str] | None = None,
        mlp_ratio: float | None = None,
        embed_mode: str = 'aba',
        pool_first: bool = False,
        neuron_cfg: Mapping[str, Any] | None = None,
        attention_threshold: float = 0.5,
        legacy_ssa_order: bool = False,
        out_mode: str = 'mean',
        drop_path_rate: float = 0.0,
        out_indices: int | Sequence[int] = -1,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        norm_cfg: dict | None = None,
        with_cp: bool = False,
        init_cfg: dict | list | None = None,
    ) -> None:
        settings = resolve_arch(arch, ARCHS, optional=dict(in_channels=3 if in_channels is None else in_channels))
        chosen = dict(steps=steps, attentions=attentions, mlp_ratio=mlp_ratio)
        settings.update({name: value for name, value in chosen.items() if value is not None})
        check_settings(settings)
        check_choice('out_mode', out_mode, OUT_MODES)
        check_choice('embed_mode', embed_mode, EMBED_MODES)
        check_flags(legacy_ssa_order=legacy_ssa_order, pool_first=pool_first)
        check_probability('drop_path_rate', drop_path_rate)
        check_number('attention_threshold', attention_threshold, above=0)
        if legacy_ssa_order and 'ssa' not in settings['attentions']:
            raise ValueError(f"legacy_ssa_order needs a stage with 'ssa', got attentions={settings['attentions']!r}")
        in_channels = settings['in_channels'] if in_channels is None else in_channels
        dims, depths = settings['dims'], settings['depths']
        super().__init__(in_channels, len(dims), out_indices, frozen_stages, norm_eval, with_cp, init_cfg)
        self.steps, self.out_mode = settings['steps'], out_mode
        self.frames_only = settings['in_channels'] == 2
        self.attention_threshold, self.legacy_ssa_order = attention_threshold, legacy_ssa_order
        cfg = dict(neuron_cfg=neuron_cfg, norm_cfg=norm_cfg)
        embed_cfg = dict(mode=embed_mode, pool_first=pool_first, **cfg)

        self.stem = SpikingPatchEmbed(in_channels, **settings['stem'], **embed_cfg)
        total = sum(depths)
        drop_path_rates = iter(drop_path_rate * block / max(1, total - 1) for block in range(total))
        self.stages = nn.ModuleList()
        for index in range(self.last_stage + 1):
            rates = [next(drop_path_rates) for _ in range(depths[index])]
            self.stages.append(self._make_stage(index, settings, rates, embed_cfg, cfg))
        stem_stride, stage_stride = 2 ** sum(settings['stem']['pools']), 2 ** sum(settings['pools'])
        self.finish(dims, [stem_stride * stage_stride**index for index in range(len(dims))])

    def _make_stage(
        self,
        index: int,
        settings: Mapping[str, Any],
        drop_path_rates: Sequence[float],
        embed_cfg: Mapping[str, Any],
        cfg: Mapping[str, Any],
    ) -> nn.Sequential:
        """Build a stage: a patch embedding, except in the first one, and one block per rate."""
        dim, kind = settings['dims'][index], settings['attentions'][index]
        layers: list[nn.Module] = []
        if index:
            layers.append(SpikingPatchEmbed(settings['dims'][index - 1], (dim, dim), settings['pools'], **embed_cfg))
        legacy = dict(legacy_order=True) if kind == 'ssa' and self.legacy_ssa_order else {}
        for rate in drop_path_rates:
            attention = ATTENTIONS[kind](dim, settings['heads'], self.attention_threshold, **cfg, **legacy)
            mlp = SpikingMLP(dim, max(1, int(dim * settings['mlp_ratio'])), **cfg)
            layers.append(SpikingBlock(attention, mlp, rate))
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps of ``out_indices`` in the layout of ``out_mode``.

        A map has ceil(H / stride) x ceil(W / stride) positions.

        Args:
            x: Images (B, in_channels, H, W), or frames (B, T, in_channels, H, W) with T equal to ``steps``. Frames in
                the order (T, B, ...), as some libraries have them, are an error unless B and T are equal: then nothing
                tells them apart, and the output is wrong.

        Raises:
            TypeError: If the input is not a floating-point tensor.
            ValueError: If the input is empty, has other channels or another number of frames, or is an image where
                frames of events are expected.
        """
        frames = isinstance(x, Tensor) and x.dim() == 5
        self.check_input(x, frames)
        outs = self.run_stages(self.stem(x.transpose(0, 1)) if frames else self.stem(x, self.steps))
        if self.out_mode == 'mean':
            return tuple(out.mean(0) for out in outs)
        return tuple(out.flatten(0, 1) if self.out_mode == 'folded' else out for out in outs)

    def check_input(self, x: Tensor, frames: bool) -> None:
        """Raise TypeError or ValueError unless ``x`` is what :meth:`forward` takes."""
        if torch.jit.is_tracing():
            return
        if not frames:
            check_map('x', x, self.in_channels)
            if self.frames_only:
                raise ValueError(
                    f'x must be frames of events (B, T, C, H, W), got shape {tuple(x.shape)}; one sample (T, C, H, W) '
                    f'is the batch x[None], a still image (B, C, H, W) is x[:, None].repeat(1, T, 1, 1, 1)'
                )
            return
        check_floating('x', x)
        if tuple(x.shape[1:3]) != (self.steps, self.in_channels) or 0 in x.shape:
            raise ValueError(
                f'x must be frames (B, T, C, H, W) with T = {self.steps} (the argument steps), C = {self.in_channels} '
                f'and no empty dimension, got shape {tuple(x.shape)}'
            )


class SpikingBlock(nn.Module):
    """Residual block, ``x + attention(x)``, then ``x + mlp(x)``: spikes are added, so that the values are counts.

    Args:
        attention: Module that maps (T, B, C, H, W) to spikes (T, B, C, H, W).
        mlp: Likewise.
        drop_path_rate: Probability of dropping a sample's path, at all its steps.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, drop_path_rate: float = 0.0) -> None:
        super().__init__()
        self.attention, self.mlp, self.drop_path_rate = attention, mlp, drop_path_rate

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, B, C, H, W) to (T, B, C, H, W)."""
        x = x + self.drop_path(self.attention(x))
        return x + self.drop_path(self.mlp(x))

    def drop_path(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_path_rate:
            return x
        keep = 1 - self.drop_path_rate
        return x * x.new_empty(1, x.shape[1], 1, 1, 1).bernoulli_(keep).div_(keep)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless the settings of an arch fit each other."""
    check_int('steps', settings['steps'])
    check_int('heads', settings['heads'])
    check_number('mlp_ratio', settings['mlp_ratio'], above=0)
    check_ints('dims', settings['dims'])
    check_ints('depths', settings['depths'], len(settings['dims']))
    check_choices('attentions', settings['attentions'], ATTENTIONS, len(settings['dims']))
    for dim in settings['dims']:
        if dim % settings['heads']:
            raise ValueError(f'heads must divide dims, got {settings["heads"]} and {settings["dims"]}')
    stem = settings['stem']
    if not isinstance(stem, Mapping) or not {'widths', 'pools'} <= set(stem) <= {'widths', 'pools', 'shortcut_from'}:
        raise ValueError(f'stem must be a dict of widths, pools and, if not 0, shortcut_from, got {stem!r}')
    check_ints('widths of stem', stem['widths'])
    for name, pools in {'pools of stem': stem['pools'], 'pools': settings['pools']}.items():
        check_choices(name, pools, (True, False))
    if stem['widths'][-1] != settings['dims'][0]:
        raise ValueError(f'widths of stem must end in dims[0], got {stem} and {settings["dims"]}')
