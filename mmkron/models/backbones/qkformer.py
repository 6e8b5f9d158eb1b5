"""QKFormer: a hierarchical spiking transformer with Q-K attention.

Source: Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552), and its released code. There the last neuron of the
spiking self-attention runs over the whole batch as if it were time. Here every neuron runs over the steps of a sample;
``legacy_ssa_order=True`` exists only to reproduce weights that were trained the other way. The paper's accuracies were
measured that way and are not claimed for this network.
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
        dims=(128, 256),
        depths=(1, 1),
        heads=16,
        mlp_ratio=mlp_ratio,
        steps=16,
        attentions=('qkta', 'ssa'),
        stem=dict(widths=(16, 32, 64, 128), pools=(False, True, True, True), shortcut_from=2),
        pools=(False, True),
    )


# stem: of the first patch embedding; pools: of the two convolutions of each later one.
ARCHS: dict[str, dict[str, Any]] = {
    'hst-10-384': _imagenet(384, 6),
    'hst-10-512': _imagenet(512, 8),
    'hst-10-768': _imagenet(768, 12),
    'cifar': dict(
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

EVENT_ARCHS = ('cifar10-dvs', 'dvs-gesture')

OUT_MODES = ('mean', 'folded', 'steps')


@MODELS.register_module()
class QKFormer(Backbone):
    """Spiking transformer for images, repeated at each of T steps, and for frames of events.

    Args:
        arch: ``hst-10-384``, ``hst-10-512``, ``hst-10-768`` (ImageNet; strides 4, 8, 16), ``cifar`` (strides 1, 2, 4),
            ``cifar10-dvs``, ``dvs-gesture`` (events, two stages, strides 8, 16); or a dict with ``dims``, ``depths``
            (blocks a stage), ``heads``, ``mlp_ratio``, ``steps``, ``attentions``, ``stem`` and ``pools`` (arguments of
            :class:`mmkron.layers.SpikingPatchEmbed` for the first and, of two convolutions, for the later stages).
        in_channels: of the image or of a frame; 3, or 2 for the two archs for events, by default. The two archs for
            events, and a dict as ``arch`` with 2 channels, take frames alone and refuse images.
        steps: T, the number of frames of events, and of steps at which an image is shown; the arch's by default.
        attentions: ``qkta``, ``qkca`` or ``ssa``, one a stage; the arch's by default.
        mlp_ratio: hidden channels of the MLP to those of the stage; the arch's by default.
        embed_mode: ``aba`` or ``pa``, where a patch embedding adds its shortcut: see
            :class:`mmkron.layers.SpikingPatchEmbed`.
        pool_first: pooling before the norm instead of behind it.
        neuron_cfg: arguments of :class:`mmkron.layers.LIF` for all neurons, as ``dict(kind='plif')``.
        attention_threshold: of the neurons in the attentions.
        legacy_ssa_order: see :class:`mmkron.layers.SpikingSelfAttention`.
        out_mode: maps of firing rates, the means over T (``mean``: (B, C, H, W)), or of spike counts at each step:
            ``folded`` (T B, C, H, W) or ``steps`` (T, B, C, H, W).
        drop_path_rate: probability at which the last block's paths are dropped, for a sample at all its steps; it grows
            linearly from 0 at the first.
        out_indices: stages whose maps are returned, negatives count from the end.
        frozen_stages: -1 none, 0 the first patch embedding, k that and k stages.
        norm_eval: keep batch norm in evaluation mode while training.
        norm_cfg: normalisation; None (the default) is batch norm over steps and batch.
        with_cp: recompute blocks in the backward pass to save memory. Their batch norms then see each batch twice, as
            in the host libraries.
        init_cfg: initialisation; torch's own by default, as in the released code.

    Raises:
        TypeError, ValueError: an argument outside these choices.
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
        settings = resolve_arch(arch, ARCHS)
        chosen = dict(steps=steps, attentions=attentions, mlp_ratio=mlp_ratio)
        settings.update({name: value for name, value in chosen.items() if value is not None})
        check_settings(settings)
        check_choice('out_mode', out_mode, OUT_MODES)
        check_flags(legacy_ssa_order=legacy_ssa_order, pool_first=pool_first)
        if legacy_ssa_order and 'ssa' not in settings['attentions']:
            raise ValueError(f"legacy_ssa_order needs a stage with 'ssa', got attentions={settings['attentions']!r}")
        check_probability('drop_path_rate', drop_path_rate)
        check_number('attention_threshold', attention_threshold, above=0)
        check_choice('embed_mode', embed_mode, EMBED_MODES)
        if in_channels is None:
            in_channels = 2 if arch in EVENT_ARCHS else 3
        dims, depths = settings['dims'], settings['depths']
        super().__init__(in_channels, len(dims), out_indices, frozen_stages, norm_eval, with_cp, init_cfg)
        self.steps, self.out_mode = settings['steps'], out_mode
        # Polarities of events; an image of two channels is for a named arch.
        self.frames_only = arch in EVENT_ARCHS if isinstance(arch, str) else in_channels == 2
        cfg = dict(neuron_cfg=neuron_cfg, norm_cfg=norm_cfg)
        embed = dict(mode=embed_mode, pool_first=pool_first, **cfg)

        self.stem = SpikingPatchEmbed(in_channels, **settings['stem'], **embed)
        self.stages = nn.ModuleList()
        before, total = 0, sum(depths)
        for index in range(self.last_stage + 1):
            blocks: list[nn.Module] = []
            if index:
                blocks.append(SpikingPatchEmbed(dims[index - 1], (dims[index],) * 2, settings['pools'], **embed))
            for _ in range(depths[index]):
                kind = settings['attentions'][index]
                extra = dict(legacy_order=True) if kind == 'ssa' and legacy_ssa_order else {}
                attention = ATTENTIONS[kind](dims[index], settings['heads'], attention_threshold, **cfg, **extra)
                mlp = SpikingMLP(dims[index], max(1, int(dims[index] * settings['mlp_ratio'])), **cfg)
                blocks.append(SpikingBlock(attention, mlp, drop_path_rate * before / max(1, total - 1)))
                before += 1
            self.stages.append(nn.Sequential(*blocks))
        stride, strides = 2 ** sum(settings['stem']['pools']), []
        for index in range(len(dims)):
            strides.append(stride * 2 ** (index * sum(settings['pools'])))
        self.finish(dims, strides)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps of ``out_indices``, as ``out_mode`` says, of ceil(H / stride) x ceil(W / stride) positions.

        Args:
            x: Images (B, in_channels, H, W), or frames (B, T, in_channels, H, W) with T equal to ``steps``. Frames in
                the order (T, B, ...), as some libraries have them, are an error unless B and T are equal: then nothing
                tells them apart, and the output is wrong.

        Raises:
            TypeError: an input that is no floating-point tensor.
            ValueError: an input that is empty, has other channels or another number of frames; images where frames of
                events are expected.
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
    """``x + attention(x)``, then ``x + mlp(x)``: spikes are added, so that the values are counts.

    Args:
        attention, mlp: (T, B, C, H, W) -> (T, B, C, H, W).
        drop_path_rate: probability at which a sample's path is dropped, at all its steps.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, drop_path_rate: float = 0.0) -> None:
        super().__init__()
        self.attention, self.mlp, self.drop_path_rate = attention, mlp, drop_path_rate

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, B, C, H, W) -> map (T, B, C, H, W)."""
        x = x + self.drop_path(self.attention(x))
        return x + self.drop_path(self.mlp(x))

    def drop_path(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_path_rate:
            return x
        keep = 1 - self.drop_path_rate
        return x * x.new_empty(1, x.shape[1], 1, 1, 1).bernoulli_(keep).div_(keep)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError unless the settings of an arch fit each other."""
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
