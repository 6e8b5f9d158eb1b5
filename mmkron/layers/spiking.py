"""Spiking layers on maps of several time steps, (T, B, C, H, W).

Source: Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552), and its released code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mmkron.layers.neuron import LIF, make_neuron, norm_then_lif
from mmkron.layers.norm import build_norm
from mmkron.ops.checks import check_steps_map
from mmkron.ops.spiking import channel_qk_attention, spiking_self_attention, token_qk_attention
from mmkron.utils.checks import check_choice, check_choices, check_flags, check_int, check_ints, check_number

EMBED_MODES = ('aba', 'pa')


class SpikingConv(nn.Module):
    """Conv-BN-LIF block with optional max pooling of stride 2, after the norm or before it.

    A static map (B, C, H, W) is the input of every step: convolution and norm run once, and the neurons see the result
    ``steps`` times. In training the running variance is then the variance of B instead of T B maps.

    Args:
        in_channels: Channels of the input.
        channels: Channels of the output.
        kernel_size: Kernel size of the convolution, odd.
        stride: Stride of the convolution.
        bias: Whether the convolution has a bias.
        pool: Whether to halve the map to ceil(H / 2) x ceil(W / 2) positions by 3 x 3 max pooling.
        pool_first: Whether to pool before the norm.
        neuron_cfg: Arguments of :class:`LIF`.
        norm_cfg: Config of the norm. Default: batch norm.
        fires: Whether a neuron follows.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If a number is below 1 or ``kernel_size`` is even.
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
        self.pool_before_norm = MaxPool2d(3, 2, 1) if pool and pool_first else nn.Identity()
        self.pool_after_norm = MaxPool2d(3, 2, 1) if pool and not pool_first else None
        self.neuron = make_neuron(neuron_cfg) if fires else None

    def forward(self, x: Tensor, steps: int | None = None) -> Tensor:
        """Map (T, B, in_channels, H, W), or static (B, in_channels, H, W) with ``steps``, to (T, B, channels, H', W').

        Raises:
            TypeError: If ``x`` is not a floating-point tensor or ``steps`` not an int.
            ValueError: If ``x`` is not of these shapes or ``steps`` is below 1.
        """
        check_steps_map('x', x, self.conv.in_channels, steps)
        if steps is not None:
            currents = self.normalize(self.pool_before_norm(self.conv(x)))
            return self.fire(repeat_static(currents, steps))
        steps = x.shape[0]
        x = self.pool_before_norm(self.conv(x.flatten(0, 1)))
        if self.neuron is not None and self.pool_after_norm is None:
            return norm_then_lif(self.norm, self.neuron, x, steps)
        currents = self.normalize(x)
        return self.fire(currents.reshape(steps, -1, *currents.shape[1:]))

    def normalize(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x if self.pool_after_norm is None else self.pool_after_norm(x)

    def fire(self, currents: Tensor) -> Tensor:
        return currents if self.neuron is None else self.neuron(currents)


def repeat_static(x: Tensor, steps: int) -> Tensor:
    """Show a static map (B, C, H, W) at every step: (T, B, C, H, W), without a copy."""
    return x.expand(steps, *x.shape)


class MaxPool2d(nn.MaxPool2d):
    """Max pooling that is fast on a CPU, where torch's kernel for contiguous maps takes several times as long."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != 'cpu':
            return super().forward(x)
        return super().forward(x.contiguous(memory_format=torch.channels_last)).contiguous()


class SpikingAttention(nn.Module):
    """Base of the three attention layers: one convolution for all operands, the operator, and a projection.

    Args:
        channels: Channels of input and output.
        heads: Number of heads, which divides the channels.
        v_threshold: Threshold of the attention's neuron.
        neuron_cfg: Arguments of :class:`LIF` for all neurons of the layer.
        norm_cfg: Config of the norms. Default: batch norm.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If ``heads`` does not divide ``channels``, or a number is not positive.
    """

    operands = 2  # q and k, or q, k and v

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
        """Map (T, B, channels, H, W) to spikes (T, B, channels, H, W)."""
        operands = self.operand_map(x).flatten(3).chunk(self.operands, 2)
        return self.project(self.attend(*operands).reshape(x.shape))

    def attend(self, *operands: Tensor) -> Tensor:
        """Map spikes (T, B, channels, N) to spikes (T, B, channels, N)."""
        raise NotImplementedError


class TokenQKAttention(SpikingAttention):
    """Token Q-K attention (QKTA): :func:`mmkron.ops.token_qk_attention` with its convolutions.

    Source: Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552). See :class:`SpikingAttention` for the
    arguments.

    Examples:
        >>> import torch
        >>> from mmkron.layers import TokenQKAttention
        >>> spikes = torch.ones(4, 2, 32, 7, 7)  # (T, B, C, H, W)
        >>> TokenQKAttention(32, heads=4)(spikes).shape
        torch.Size([4, 2, 32, 7, 7])
    """

    def attend(self, q: Tensor, k: Tensor) -> Tensor:
        return token_qk_attention(q, k, self.heads, **self.neuron.settings())


class ChannelQKAttention(SpikingAttention):
    """Channel Q-K attention (QKCA): :func:`mmkron.ops.channel_qk_attention` with its convolutions.

    Source: Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552). See :class:`SpikingAttention` for the
    arguments.

    Examples:
        >>> import torch
        >>> from mmkron.layers import ChannelQKAttention
        >>> spikes = torch.ones(4, 2, 32, 7, 7)  # (T, B, C, H, W)
        >>> ChannelQKAttention(32, heads=4)(spikes).shape
        torch.Size([4, 2, 32, 7, 7])
    """

    def attend(self, q: Tensor, k: Tensor) -> Tensor:
        return channel_qk_attention(q, k, self.heads, **self.neuron.settings())


class SpikingSelfAttention(SpikingAttention):
    """Spiking self-attention (SSA): :func:`mmkron.ops.spiking_self_attention` with its convolutions.

    Source: Zhou et al., Spikformer, ICLR 2023 (arXiv 2209.15425), as used in QKFormer (arXiv 2403.16552).

    Args:
        channels, heads, v_threshold, neuron_cfg, norm_cfg: See :class:`SpikingAttention`.
        scale: Factor of the products.
        legacy_order: Whether the projection's neurons run over the T B maps of the batch as if they were steps, as in
            QKFormer's released code: the samples of a batch then depend on each other. Only for weights trained so.

    Examples:
        >>> import torch
        >>> from mmkron.layers import SpikingSelfAttention
        >>> SpikingSelfAttention(32, heads=4)(torch.ones(4, 2, 32, 7, 7)).shape
        torch.Size([4, 2, 32, 7, 7])
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
    """Neuron that takes (T, B, ...) for T B steps; see :class:`SpikingSelfAttention`."""

    def __init__(self, neuron: LIF) -> None:
        super().__init__()
        self.neuron = neuron

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(x.flatten(0, 1)).view(x.shape)


class SpikingMLP(nn.Module):
    """MLP of two 1 x 1 convolutions, each with norm and neuron.

    Args:
        channels: Channels of input and output.
        hidden: Channels between the two convolutions.
        neuron_cfg: Arguments of :class:`LIF`.
        norm_cfg: Config of the norms. Default: batch norm.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If a number of channels is below 1.

    Examples:
        >>> import torch
        >>> from mmkron.layers import SpikingMLP
        >>> SpikingMLP(32, 128)(torch.ones(4, 2, 32, 7, 7)).shape
        torch.Size([4, 2, 32, 7, 7])
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
        """Map (T, B, channels, H, W) to spikes (T, B, channels, H, W)."""
        return self.project(self.expand(x))


class SpikingPatchEmbed(nn.Module):
    """Spiking patch embedding with deformed shortcut (SPEDS): 3 x 3 convolutions and, in parallel, a strided 1 x 1 one.

    Source: Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552).

    Args:
        in_channels: Channels of the input.
        widths: Channels after each convolution.
        pools: For each convolution, whether max pooling halves the map.
        shortcut_from: Number of convolutions before the shortcut begins.
        mode: ``aba``, activation before addition: ``F(x) + LIF(W x)``, of values 0 to 2; or ``pa``, pre-activation:
            ``LIF(G(x) + W x)``.
        pool_first: Whether to pool between convolution and norm instead of after the norm.
        neuron_cfg: Arguments of :class:`LIF`.
        norm_cfg: Config of the norms. Default: batch norm.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If ``mode`` is unknown, ``widths`` and ``pools`` differ in length, or ``shortcut_from`` is not
            smaller than their length.

    Examples:
        >>> import torch
        >>> from mmkron.layers import SpikingPatchEmbed
        >>> embed = SpikingPatchEmbed(3, widths=(16, 32), pools=(True, True))
        >>> embed(torch.randn(2, 3, 32, 32), steps=4).shape  # a static image
        torch.Size([4, 2, 32, 8, 8])
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
                f'widths and pools must have one entry per convolution, and more than shortcut_from; got {widths!r}, '
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
        """Map (T, B, in_channels, H, W), or static (B, in_channels, H, W) with ``steps``, to (T, B, C', H', W')."""
        source, source_steps = x, steps
        for index, conv in enumerate(self.convs):
            if index == self.shortcut_from:
                source, source_steps = x, steps
            x, steps = conv(x, steps), None
        x = x + self.shortcut(source, source_steps)
        return x if self.neuron is None else self.neuron(x)
