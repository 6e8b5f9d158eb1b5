"""Spiking layers on maps of several time steps, (T, B, C, H, W).

Source: Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552), and its released code. No layer keeps a state: each call
starts its neurons anew, so that samples, batches and calls do not depend on each other.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mmkron.layers.norm import build_norm
from mmkron.ops.checks import check_steps_map
from mmkron.ops.neurons.lif import lif
from mmkron.ops.neurons.neuron import resolve_neuron
from mmkron.ops.neurons.norm_lif import norm_lif
from mmkron.ops.spiking import channel_qk_attention, spiking_self_attention, token_qk_attention
from mmkron.utils.checks import (
    check_choice,
    check_choices,
    check_flags,
    check_int,
    check_ints,
    check_keys,
    check_number,
)

KINDS = ('lif', 'plif', 'if')
EMBED_MODES = ('aba', 'pa')


class LIF(nn.Module):
    """A spiking neuron: :func:`mmkron.ops.lif` with its settings.

    Args:
        kind: ``lif``; ``plif``, whose time constant is learnt, one for the layer, beginning with ``tau``; ``if``,
            without leak, for which ``tau`` and ``decay_input`` mean nothing.
        tau, v_threshold, v_reset, decay_input, detach_reset, surrogate, alpha: see :func:`mmkron.ops.lif`.

    Raises:
        TypeError, ValueError: a value outside these choices.
    """

    def __init__(
        self,
        kind: str = 'lif',
        tau: float = 2.0,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        decay_input: bool = True,
        detach_reset: bool = True,
        surrogate: str = 'sigmoid',
        alpha: float | None = None,
    ) -> None:
        super().__init__()
        check_choice('kind', kind, KINDS)
        check_flags(decay_input=decay_input)
        self.kind, self.v_threshold = kind, v_threshold
        self.tau = tau
        self.others = dict(
            v_reset=v_reset,
            decay_input=decay_input and kind != 'if',
            detach_reset=detach_reset,
            surrogate=surrogate,
            alpha=alpha,
        )
        resolve_neuron(tau, v_threshold, **self.others)
        if kind == 'plif':
            if not 1 < tau < math.inf:
                raise ValueError(f'tau of a plif neuron must be above 1 and finite, got {tau!r}')
            self.weight = nn.Parameter(torch.tensor([-math.log(tau - 1)]))  # FSDP takes none without dimensions
            self._register_load_state_dict_pre_hook(self._add_dimension)

    def settings(self) -> dict[str, Any]:
        """Arguments of :func:`mmkron.ops.lif`."""
        tau = {'lif': self.tau, 'if': math.inf}.get(self.kind)
        tau = 1 / self.weight.sigmoid() if tau is None else tau
        return dict(tau=tau, v_threshold=self.v_threshold, **self.others)

    def forward(
        self, x: Tensor, v0: Tensor | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Currents (T, ...) -> spikes (T, ...); with ``return_state`` the last potentials (...), too."""
        return lif(x, v0, return_state=return_state, **self.settings())

    def _add_dimension(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Fit a time constant that was saved without dimensions."""
        weight = state_dict.get(f'{prefix}weight')
        if weight is not None and weight.dim() == 0:
            state_dict[f'{prefix}weight'] = weight.reshape(1)

    def extra_repr(self) -> str:
        return f'{self.kind}, tau={self.tau}, v_threshold={self.v_threshold}'


def make_neuron(neuron_cfg: Mapping[str, Any] | None, **others: Any) -> LIF:
    """Return the neuron of ``neuron_cfg``, with ``others`` in the place of its entries.

    Raises:
        TypeError, ValueError: ``neuron_cfg`` is neither None nor a dict of arguments of :class:`LIF`.
    """
    check_keys('neuron_cfg', neuron_cfg, inspect.signature(LIF).parameters)
    return LIF(**{**(neuron_cfg or {}), **others})


class SpikingConv(nn.Module):
    """Convolution, batch norm and neuron, with max pooling behind the norm or the convolution if it halves the map.

    A map without steps, (B, C, H, W), stands for the same input at every step: convolution and norm run once and the
    neurons see the result ``steps`` times. In training the running variance then is that of B and not of T B maps.

    Args:
        in_channels, channels: of input and output.
        kernel_size: of the convolution, odd.
        stride: of the convolution.
        bias: whether the convolution has one.
        pool: max pooling 3 x 3 of stride 2, so that the output has ceil(H / 2) x ceil(W / 2) positions.
        pool_first: pooling before the norm.
        neuron_cfg: arguments of :class:`LIF`.
        norm_cfg: normalisation; None (the default) is batch norm.
        fires: False leaves the neuron out.

    Raises:
        TypeError, ValueError: a value outside these choices.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        kernel_size: int = 1,
        stride: int = 1,
        bias: bool = False,
        pool: bool = False,
        pool_first: bool = False,
        neuron_cfg: Mapping[str, Any] | None = None,
        norm_cfg: dict | None = None,
        fires: bool = True,
    ) -> None:
        super().__init__()
        numbers = dict(in_channels=in_channels, channels=channels, kernel_size=kernel_size, stride=stride)
        for name, number in numbers.items():
            check_int(name, number)
        if kernel_size % 2 == 0:
            raise ValueError(f'kernel_size must be odd, got {kernel_size}')
        check_flags(bias=bias, pool=pool, pool_first=pool_first, fires=fires)
        self.conv = nn.Conv2d(in_channels, channels, kernel_size, stride, kernel_size // 2, bias=bias)
        self.norm = build_norm(norm_cfg, channels)
        self.pool = nn.MaxPool2d(3, 2, 1) if pool else None
        self.pool_first = pool_first
        self.neuron = make_neuron(neuron_cfg) if fires else None

    def forward(self, x: Tensor, steps: int | None = None) -> Tensor:
        """(T, B, in_channels, H, W), or (B, in_channels, H, W) with ``steps`` -> (T, B, channels, H', W').

        Raises:
            TypeError, ValueError: ``x`` is not such a map, or ``steps`` not a positive int.
        """
        check_steps_map('x', x, self.conv.in_channels, steps)
        count = x.shape[0] if steps is None else steps
        x = self.conv(x.flatten(0, 1) if steps is None else x)
        if self.pool is not None and self.pool_first:
            x = max_pool(x, self.pool)
        if steps is None and self.joins_norm():
            return self.fire(x, count)
        x = self.norm(x)
        if self.pool is not None and not self.pool_first:
            x = max_pool(x, self.pool)
        x = x.reshape(count, -1, *x.shape[1:]) if steps is None else x.expand(count, *x.shape)
        return x if self.neuron is None else self.neuron(x)

    def joins_norm(self) -> bool:
        """Whether norm and neurons can be one operation, which saves memory in training."""
        return (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and type(self.norm) is nn.BatchNorm2d
            and self.norm.training
            and self.norm.affine
            and self.norm.weight.dtype in (torch.float32, torch.float64)  # as the statistics, which are never narrower
            and self.norm.track_running_stats
            and self.norm.momentum is not None
            and type(self.neuron) is LIF
            and (self.pool is None or self.pool_first)
            and not any(has_hooks(part) for part in (self.norm, self.neuron))
        )

    def fire(self, x: Tensor, steps: int) -> Tensor:
        """Maps (T B, C, H, W) -> spikes (T, B, C, H, W), by norm and neurons as one operation."""
        norm = self.norm
        norm.num_batches_tracked.add_(1)
        statistics = norm.weight, norm.bias, norm.running_mean, norm.running_var
        return norm_lif(x, steps, *statistics, norm.momentum, norm.eps, **self.neuron.settings())


def max_pool(x: Tensor, pool: nn.MaxPool2d) -> Tensor:
    """By way of channels last on a CPU, where torch's kernel for the usual order takes several times as long."""
    if x.device.type != 'cpu':
        return pool(x)
    return pool(x.contiguous(memory_format=torch.channels_last)).contiguous()


def has_hooks(part: nn.Module) -> bool:
    """Whether someone watches the calls of a module."""
    kinds = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')
    return any(getattr(part, kind) for kind in kinds)


class SpikingAttention(nn.Module):
    """What the three kinds of attention share: one map for all operands, the operator, and a projection.

    Args:
        channels: of input and output.
        heads: h, divides the channels.
        v_threshold: threshold of the attention's neuron.
        neuron_cfg: arguments of :class:`LIF` for all neurons of the layer.
        norm_cfg: normalisation; None (the default) is batch norm.

    Raises:
        TypeError, ValueError: a value outside these choices.
    """

    operands = 2

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        v_threshold: float = 0.5,
        neuron_cfg: Mapping[str, Any] | None = None,
        norm_cfg: dict | None = None,
    ) -> None:
        super().__init__()
        check_int('channels', channels)
        check_int('heads', heads)
        if channels % heads:
            raise ValueError(f'heads must divide channels, got heads={heads} and channels={channels}')
        self.channels, self.heads = channels, heads
        cfg = dict(neuron_cfg=neuron_cfg, norm_cfg=norm_cfg)
        # One convolution, norm and neuron: each channel has its own.
        self.operand_map = SpikingConv(channels, self.operands * channels, **cfg)
        self.neuron = make_neuron(neuron_cfg, v_threshold=v_threshold)
        self.project = SpikingConv(channels, channels, bias=True, **cfg)

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, B, channels, H, W) -> spikes (T, B, channels, H, W)."""
        operands = self.operand_map(x).flatten(3).chunk(self.operands, 2)
        return self.project(self.attend(*operands).reshape(x.shape))

    def attend(self, *operands: Tensor) -> Tensor:
        """Spikes (T, B, channels, N) -> spikes (T, B, channels, N)."""
        raise NotImplementedError


class TokenQKAttention(SpikingAttention):
    """:func:`mmkron.ops.token_qk_attention` with its maps; the arguments are those of :class:`SpikingAttention`."""

    def attend(self, q: Tensor, k: Tensor) -> Tensor:
        return token_qk_attention(q, k, self.heads, **self.neuron.settings())


class ChannelQKAttention(SpikingAttention):
    """:func:`mmkron.ops.channel_qk_attention` with its maps; the arguments are those of :class:`SpikingAttention`."""

    def attend(self, q: Tensor, k: Tensor) -> Tensor:
        return channel_qk_attention(q, k, self.heads, **self.neuron.settings())


class SpikingSelfAttention(SpikingAttention):
    """:func:`mmkron.ops.spiking_self_attention` with its maps.

    Args:
        channels, heads, v_threshold, neuron_cfg, norm_cfg: see :class:`SpikingAttention`.
        scale: factor of the products.
        legacy_order: the projection's neurons run over the T B maps of the batch as if they were steps, as in
            QKFormer's released code: the samples of a batch then depend on each other. Only for weights trained so.
    """

    operands = 3

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        v_threshold: float = 0.5,
        neuron_cfg: Mapping[str, Any] | None = None,
        norm_cfg: dict | None = None,
        scale: float = 0.125,
        legacy_order: bool = False,
    ) -> None:
        super().__init__(channels, heads, v_threshold, neuron_cfg, norm_cfg)
        check_number('scale', scale, above=0)
        check_flags(legacy_order=legacy_order)
        self.scale, self.legacy_order = scale, legacy_order
        if legacy_order:
            self.project.neuron = LegacyOrder(self.project.neuron)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return spiking_self_attention(q, k, v, self.heads, self.scale, **self.neuron.settings())


class LegacyOrder(nn.Module):
    """Runs a neuron over (T, B, ...) as over T B steps; see :class:`SpikingSelfAttention`."""

    def __init__(self, neuron: LIF) -> None:
        super().__init__()
        self.neuron = neuron

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(x.flatten(0, 1)).view(x.shape)


class SpikingMLP(nn.Module):
    """Two 1 x 1 convolutions with norm and neuron.

    Args:
        channels: of input and output.
        hidden: between the two.
        neuron_cfg: arguments of :class:`LIF`.
        norm_cfg: normalisation; None (the default) is batch norm.

    Raises:
        TypeError, ValueError: a value outside these choices.
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        neuron_cfg: Mapping[str, Any] | None = None,
        norm_cfg: dict | None = None,
    ) -> None:
        super().__init__()
        check_int('channels', channels)
        check_int('hidden', hidden)
        cfg = dict(bias=True, neuron_cfg=neuron_cfg, norm_cfg=norm_cfg)
        self.expand = SpikingConv(channels, hidden, **cfg)
        self.project = SpikingConv(hidden, channels, **cfg)

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, B, channels, H, W) -> spikes (T, B, channels, H, W)."""
        return self.project(self.expand(x))


class SpikingPatchEmbed(nn.Module):
    """Spiking patch embedding with deformed shortcut (SPEDS): 3 x 3 convolutions, and a strided 1 x 1 one beside them.

    Args:
        in_channels: of the input.
        widths: channels after each convolution.
        pools: for each convolution, whether max pooling halves the map behind it.
        shortcut_from: number of convolutions before the shortcut begins.
        mode: ``aba``, activation before addition: ``F(x) + LIF(W x)``, of values 0 to 2; or ``pa``, pre-activation:
            ``LIF(G(x) + W x)``.
        pool_first: pooling between convolution and norm instead of behind the norm.
        neuron_cfg: arguments of :class:`LIF`.
        norm_cfg: normalisation; None (the default) is batch norm.

    Raises:
        TypeError, ValueError: a value outside these choices.
    """

    def __init__(
        self,
        in_channels: int,
        widths: Sequence[int],
        pools: Sequence[bool],
        shortcut_from: int = 0,
        mode: str = 'aba',
        pool_first: bool = False,
        neuron_cfg: Mapping[str, Any] | None = None,
        norm_cfg: dict | None = None,
    ) -> None:
        super().__init__()
        check_choice('mode', mode, EMBED_MODES)
        check_int('shortcut_from', shortcut_from, 0)
        check_ints('widths', widths)
        check_choices('pools', pools, (True, False))
        if len(widths) != len(pools) or not shortcut_from < len(widths):
            raise ValueError(
                f'widths and pools must have one entry a convolution, and more than shortcut_from; got {widths!r}, '
                f'{pools!r} and {shortcut_from!r}'
            )
        channels = [in_channels, *widths]
        cfg = dict(neuron_cfg=neuron_cfg, norm_cfg=norm_cfg)
        self.shortcut_from = shortcut_from
        self.convs = nn.ModuleList()
        for i, pool in enumerate(pools):
            fires = mode == 'aba' or i + 1 < len(pools)
            conv = SpikingConv(channels[i], channels[i + 1], 3, pool=pool, pool_first=pool_first, fires=fires, **cfg)
            self.convs.append(conv)
        stride = 2 ** sum(map(bool, pools[shortcut_from:]))
        self.shortcut = SpikingConv(channels[shortcut_from], channels[-1], 1, stride, fires=mode == 'aba', **cfg)
        self.neuron = make_neuron(neuron_cfg) if mode == 'pa' else None

    def forward(self, x: Tensor, steps: int | None = None) -> Tensor:
        """(T, B, in_channels, H, W), or (B, in_channels, H, W) with ``steps`` -> (T, B, widths[-1], H', W')."""
        source, source_steps = x, steps
        for index, conv in enumerate(self.convs):
            if index == self.shortcut_from:
                source, source_steps = x, steps
            x, steps = conv(x, steps), None
        x = x + self.shortcut(source, source_steps)
        return x if self.neuron is None else self.neuron(x)
