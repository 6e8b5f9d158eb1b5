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
    """Keep the keys of the tokens whose queries spike, within each head: ``LIF(sum over channels of q) * k``.

    Args:
        q: Spikes (T, B, C, N), 0 or 1.
        k: Spikes (T, B, C, N).
        heads: Number of heads, a divisor of C.
        v_threshold: Threshold of the neuron that computes the mask.
        **neuron: Other settings of the neuron, as in :func:`mmkron.ops.lif`.

    Returns:
        Spikes (T, B, C, N).

    Raises:
        TypeError: If an input is not a floating-point tensor, or the dtypes differ.
        ValueError: If an input is not of shape (T, B, C, N), the shapes differ, or ``heads`` does not divide C.

    Examples:
        >>> q = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]).reshape(1, 1, 2, 3)
        >>> token_qk_attention(q, torch.ones(1, 1, 2, 3), heads=1)[0, 0]
        tensor([[0., 1., 1.],
                [0., 1., 1.]])
    """
    q, k = _split(heads, q=q, k=k)
    return (_mask(q, 3, v_threshold, neuron) * k).flatten(2, 3)


def channel_qk_attention(q: Tensor, k: Tensor, heads: int, v_threshold: float = 0.5, **neuron: Any) -> Tensor:
    """Keep the keys of the channels whose queries spike: ``LIF(sum over tokens of q) * k``.

    With a threshold of 0.5, a channel is kept if any of its tokens spikes, which on large maps nearly always happens.
    Arguments, result and errors are the same as in :func:`token_qk_attention`; the result does not depend on ``heads``.

    Examples:
        >>> q = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).reshape(1, 1, 2, 3)
        >>> channel_qk_attention(q, torch.ones(1, 1, 2, 3), heads=1)[0, 0]
        tensor([[0., 0., 0.],
                [1., 1., 1.]])
    """
    q, k = _split(heads, q=q, k=k)
    return (_mask(q, 4, v_threshold, neuron) * k).flatten(2, 3)


def spiking_self_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float = 0.125, v_threshold: float = 0.5, **neuron: Any
) -> Tensor:
    """Compute ``LIF(scale * Q K^T V)`` within each head, without softmax, in the order with fewer multiply-adds.

    Args:
        q, k, v: Spikes (T, B, C, N).
        heads: Number of heads, a divisor of C.
        scale: Factor of the product.
        v_threshold: Threshold of the neuron.
        **neuron: Other settings of the neuron, as in :func:`mmkron.ops.lif`.

    Returns:
        Spikes (T, B, C, N).

    Raises:
        TypeError: If an input is not a floating-point tensor, or the dtypes differ.
        ValueError: If an input is not of shape (T, B, C, N), the shapes differ, or ``heads`` does not divide C.

    Examples:
        >>> q, k, v = (torch.rand(3, 4, 2, 32, 49) < 0.3).float()
        >>> out = spiking_self_attention(q, k, v, heads=4)
        >>> out.shape, bool(((out == 0) | (out == 1)).all())
        (torch.Size([4, 2, 32, 49]), True)
    """
    check_number('scale', scale)
    operands = _split(heads, q=q, k=k, v=v)
    dtype = q.dtype
    q, k, v = operands
    width, tokens = q.shape[3:]
    # The products are counts, and half precision is not exact above 2048.
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        k = k.transpose(3, 4)
        values_first = multiplies_values_first(width, tokens)
        out = torch.matmul(torch.matmul(v, k), q) if values_first else torch.matmul(v, torch.matmul(k, q))
        out = lif(out.mul_(scale), v_threshold=v_threshold, **neuron)
    return out.flatten(2, 3).to(dtype)


def multiplies_values_first(width: int, tokens: int) -> bool:
    """Return whether :func:`spiking_self_attention` computes ``(V K^T) Q`` rather than ``V (K^T Q)``."""
    return width < tokens


def _mask(q: Tensor, axis: int, v_threshold: float, neuron: dict[str, Any]) -> Tensor:
    """Return 1 where the sum of the queries over ``axis`` makes a neuron fire, else 0."""
    resolve_neuron(v_threshold=v_threshold, **neuron)
    if not (torch.is_grad_enabled() and q.requires_grad) and is_stateless(v_threshold=v_threshold, **neuron):
        return q.amax(axis, keepdim=True)
    # The sums are counts, and half precision is not exact above 2048.
    counts = q.sum(axis, keepdim=True, dtype=torch.promote_types(q.dtype, torch.float32))
    return lif(counts, v_threshold=v_threshold, **neuron).to(q.dtype)


def is_stateless(
    tau: Any = 2.0, v_threshold: float = 1.0, v_reset: float | None = 0.0, decay_input: bool = True, **_: Any
) -> bool:
    """Return whether a neuron whose inputs are spike counts computes a logical OR.

    This is so if a single spike makes it fire and its potential otherwise stays 0.
    """
    if isinstance(tau, Tensor) or v_reset != 0:
        return False
    return 0 < v_threshold <= (1 / tau if decay_input else 1.0)


def _split(heads: int, **operands: Tensor) -> list[Tensor]:
    """Check operands (T, B, C, N) and reshape them to (T, B, heads, C / heads, N)."""
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
