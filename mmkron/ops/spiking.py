"""Attention between spikes: token and channel Q-K attention, and spiking self-attention.

Sources: Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552) for Q-K attention; Zhou et al., Spikformer, ICLR 2023
(arXiv 2209.15425) for spiking self-attention. The sums run over the channels or tokens of each head, as in QKFormer's
released code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmkron.ops.checks import check_device, check_floating
from mmkron.ops.neurons.lif import lif
from mmkron.ops.neurons.neuron import resolve_neuron
from mmkron.utils.checks import check_int, check_number


def token_qk_attention(q: Tensor, k: Tensor, heads: int, v_threshold: float = 0.5, **neuron: Any) -> Tensor:
    """Keeps the keys of the tokens whose query spikes, within each head: ``LIF(sum over channels of q) * k``.

    Args:
        q: spikes (T, B, C, N), 0 or 1.
        k: spikes (T, B, C, N).
        heads: h, divides C.
        v_threshold: threshold of the neuron that makes the mask.
        **neuron: its other settings, those of :func:`mmkron.ops.lif`.

    Returns:
        Spikes (T, B, C, N).

    Raises:
        TypeError, ValueError: inputs of other shapes or dtypes, or heads that do not divide C.
    """
    q, k = _split(heads, q=q, k=k)
    return (_mask(q, 3, v_threshold, neuron) * k).flatten(2, 3)


def channel_qk_attention(q: Tensor, k: Tensor, heads: int, v_threshold: float = 0.5, **neuron: Any) -> Tensor:
    """Keeps the keys of the channels whose query spikes: ``LIF(sum over tokens of q) * k``.

    With a threshold of 0.5 a channel is kept where any of its tokens spikes, which on large maps is nearly everywhere.
    Arguments, result and errors are those of :func:`token_qk_attention`; the heads make no difference.
    """
    q, k = _split(heads, q=q, k=k)
    return (_mask(q, 4, v_threshold, neuron) * k).flatten(2, 3)


def spiking_self_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float = 0.125, v_threshold: float = 0.5, **neuron: Any
) -> Tensor:
    """``LIF(scale * Q K^T V)`` within each head, without softmax, in the order of fewer multiply-adds.

    Args:
        q, k, v: spikes (T, B, C, N).
        heads: h, divides C.
        scale: factor of the products.
        v_threshold: threshold of the neuron.
        **neuron: its other settings, those of :func:`mmkron.ops.lif`.

    Returns:
        Spikes (T, B, C, N).

    Raises:
        TypeError, ValueError: inputs of other shapes or dtypes, or heads that do not divide C.
    """
    check_number('scale', scale)
    operands = _split(heads, q=q, k=k, v=v)
    dtype = q.dtype
    q, k, v = operands
    width, tokens = q.shape[3:]
    # The products are counts, which half precision does not hold exactly above 2048.
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        k = k.transpose(3, 4)
        out = torch.matmul(torch.matmul(v, k), q) if width < tokens else torch.matmul(v, torch.matmul(k, q))
        out = lif(out.mul_(scale), v_threshold=v_threshold, **neuron)
    return out.flatten(2, 3).to(dtype)


def _mask(q: Tensor, axis: int, v_threshold: float, neuron: dict[str, Any]) -> Tensor:
    """Where the sum of queries over an axis makes a neuron fire."""
    resolve_neuron(v_threshold=v_threshold, **neuron)
    if not (torch.is_grad_enabled() and q.requires_grad) and is_stateless(v_threshold=v_threshold, **neuron):
        return q.amax(axis, keepdim=True)
    # Counts, which half precision does not hold.
    counts = q.sum(axis, keepdim=True, dtype=torch.promote_types(q.dtype, torch.float32))
    return lif(counts, v_threshold=v_threshold, **neuron).to(q.dtype)


def is_stateless(
    tau: Any = 2.0, v_threshold: float = 1.0, v_reset: float | None = 0.0, decay_input: bool = True, **_: Any
) -> bool:
    """Whether a neuron on counts of spikes is a logical OR: a single spike makes it fire, and without one its potential
    stays 0."""
    if isinstance(tau, Tensor) or v_reset != 0:
        return False
    return 0 < v_threshold <= (1 / tau if decay_input else 1.0)


def _split(heads: int, **operands: Tensor) -> list[Tensor]:
    """Operands (T, B, C, N) -> (T, B, h, C / h, N), checked."""
    check_int('heads', heads)
    first_name, first = next(iter(operands.items()))
    for name, x in operands.items():
        check_floating(name, x)
        if x.dim() != 4 or (not torch.jit.is_tracing() and 0 in (x.shape[0], *x.shape[2:])):
            raise ValueError(f'{name} must have shape (T, B, C, N) with no empty dimension, got {tuple(x.shape)}')
        if x.dtype != first.dtype:
            raise TypeError(f'{name} must be of type {first.dtype}, as {first_name}, got {x.dtype}')
        if not torch.jit.is_tracing() and x.shape != first.shape:
            raise ValueError(f'{name} must have shape {tuple(first.shape)}, as {first_name}, got {tuple(x.shape)}')
        check_device(name, x, first)
    if first.shape[2] % heads:
        raise ValueError(f'heads must divide the channels, got heads={heads} and {int(first.shape[2])} channels')
    steps, batch, channels, tokens = first.shape
    return [x.reshape(steps, batch, heads, channels // heads, tokens) for x in operands.values()]
