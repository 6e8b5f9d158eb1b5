"""Spiking neurons over several time steps: the settings, and the plain loop that defines them.

A neuron of membrane potential v charges, fires and resets at each step of the input x, with ``rest = v_reset or 0``::

    h = v + (x - (v - rest)) / tau        or, without decay_input,  v - (v - rest) / tau + x
    s = 1 where h >= v_threshold, else 0
    v = h where s is 0, else v_reset      or, with v_reset None (soft reset),  h - v_threshold * s

In the backward pass the derivative of s is replaced by the derivative of a smooth function of ``h - v_threshold``
(:mod:`mmkron.ops.neurons.surrogate`). Sources: Fang et al., Incorporating Learnable Membrane Time Constant to Enhance
Learning of Spiking Neural Networks, ICCV 2021 (arXiv 2007.05785; LIF and PLIF); Zhou et al., QKFormer, NeurIPS 2024
(arXiv 2403.16552; tau 2, sigmoid surrogate with alpha 4).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmkron.ops.checks import check_device, check_floating
from mmkron.ops.neurons.surrogate import SURROGATES
from mmkron.utils.checks import check_choice, check_flags, check_number


class Neuron(NamedTuple):
    """Settings of a neuron, as in :func:`mmkron.ops.lif`; ``leak`` is 1 / tau."""

    leak: float | Tensor
    threshold: float
    reset: float | None
    decay_input: bool
    detach_reset: bool
    surrogate: str
    alpha: float
    learns_leak: bool = False

    @property
    def rest(self) -> float:
        return self.reset or 0.0


def lif_loop(x: Tensor, v0: Tensor | None, neuron: Neuron) -> tuple[Tensor, Tensor]:
    """Return (spikes, last potentials) step by step: the definition of :func:`mmkron.ops.lif`."""
    dtype = state_dtype(x)
    rest, leak = neuron.rest, neuron.leak
    leak = leak.reshape(()).to(dtype) if isinstance(leak, Tensor) else leak
    v = torch.full_like(x[0], rest, dtype=dtype) if v0 is None else v0.to(dtype)
    spikes = []
    for current in x.to(dtype).unbind(0):
        h = v + (current - (v - rest)) * leak if neuron.decay_input else v - (v - rest) * leak + current
        u = h - neuron.threshold
        # A trace is for inference, and no runtime knows the function of the gradient.
        s = (u >= 0).to(dtype) if torch.jit.is_tracing() else Spike.apply(u, neuron.surrogate, neuron.alpha)
        spikes.append(s)
        s = s.detach() if neuron.detach_reset else s
        v = h - neuron.threshold * s if neuron.reset is None else h * (1 - s) + neuron.reset * s
    return torch.stack(spikes).to(x.dtype), v


class Spike(torch.autograd.Function):
    """1 where the input is at least 0, with the derivative of a surrogate."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, surrogate: str, alpha: float) -> Tensor:
        ctx.save_for_backward(u)
        ctx.surrogate, ctx.alpha = surrogate, alpha
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (u,) = ctx.saved_tensors
        return grad * SURROGATES[ctx.surrogate].gradient(u, ctx.alpha), None, None


def state_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the potentials of inputs ``x`` are computed."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def read_leak(neuron: Neuron) -> tuple[Neuron, Tensor | None]:
    """Return the neuron with its leak as a number, and the tensor from which it was read, if any.

    Raises:
        ValueError: If the leak is not in [0, 1].
    """
    leak = neuron.leak
    if not isinstance(leak, Tensor):
        return neuron, None
    if not 0 <= leak.item() <= 1:
        raise ValueError(f'tau must be at least 1, got {1 / leak.item():g}')
    return neuron._replace(leak=leak.item(), learns_leak=leak.requires_grad), leak


def check_currents(x: Tensor, v0: Tensor | None) -> None:
    """Raise TypeError or ValueError unless x is (T, ...) and v0, if any, (...)."""
    check_floating('x', x)
    if x.dim() < 1 or (not torch.jit.is_tracing() and 0 in x.shape):
        raise ValueError(f'x must have shape (T, ...) with no empty dimension, got {tuple(x.shape)}')
    if v0 is None:
        return
    if not isinstance(v0, Tensor) or not v0.is_floating_point():
        got = v0.dtype if isinstance(v0, Tensor) else repr(v0)
        raise TypeError(f'v0 must be a floating-point tensor or None, got {got}')
    if v0.shape != x.shape[1:]:
        raise ValueError(f'v0 must have the shape of a step of x, {tuple(x.shape[1:])}, got {tuple(v0.shape)}')
    check_device('v0', v0, x)


def resolve_neuron(
    tau: float | Tensor = 2.0,
    v_threshold: float = 1.0,
    v_reset: float | None = 0.0,
    decay_input: bool = True,
    detach_reset: bool = True,
    surrogate: str = 'sigmoid',
    alpha: float | None = None,
) -> Neuron:
    """Check the settings of :func:`mmkron.ops.lif`, which documents them and their errors, and return them."""
    check_flags(decay_input=decay_input, detach_reset=detach_reset)
    if isinstance(tau, Tensor):
        check_floating('tau', tau)
        if tau.numel() != 1:
            raise ValueError(f'tau must be a number or a tensor of one element, got shape {tuple(tau.shape)}')
    else:
        check_number('tau', tau, finite=decay_input)  # an infinite tau would ignore a decayed input
        if not tau >= 1:
            raise ValueError(f'tau must be at least 1, got {tau!r}')
    check_number('v_threshold', v_threshold)
    if v_reset is not None:
        check_number('v_reset', v_reset)
        if not v_reset < v_threshold:
            raise ValueError(f'v_reset must be below v_threshold, got {v_reset!r} and {v_threshold!r}')
    check_choice('surrogate', surrogate, SURROGATES)
    if alpha is not None:
        check_number('alpha', alpha, above=0)
    alpha = SURROGATES[surrogate].alpha if alpha is None else float(alpha)
    return Neuron(1 / tau, float(v_threshold), v_reset, decay_input, detach_reset, surrogate, alpha)
