"""Leaky integrate-and-fire neurons with a recomputing backward pass, in blocks that fit a CPU's cache.

:mod:`mmkron.ops.neurons.neuron` has the equations and the plain loop. The state lives in the call: ``v0`` goes in, the
last potentials come out on request, nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmkron.ops.neurons.neuron import Neuron, check_currents, lif_loop, read_leak, resolve_neuron, state_dtype
from mmkron.ops.neurons.surrogate import SURROGATES
from mmkron.utils.checks import check_flags

# Neurons per block: their state fits a cache, and there are few calls (benchmarks/lif.md).
BLOCK = 2**18


def lif(
    x: Tensor,
    v0: Tensor | None = None,
    tau: float | Tensor = 2.0,
    v_threshold: float = 1.0,
    v_reset: float | None = 0.0,
    decay_input: bool = True,
    detach_reset: bool = True,
    surrogate: str = 'sigmoid',
    alpha: float | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply leaky integrate-and-fire neurons over T steps.

    Half precision is computed in float32, under autocast as well. Gradients are of first order.

    Args:
        x: Input currents (T, ...), finite, of any strides.
        v0: Potentials (...) before the first step. Default: ``v_reset``, or 0 without one.
        tau: Time constant in steps, at least 1. ``math.inf``, with ``decay_input=False`` only, is the
            integrate-and-fire neuron (IF); a tensor of one element is learnable (PLIF).
        v_threshold: Potential at and above which a neuron fires.
        v_reset: Potential after a spike. None subtracts the threshold instead (soft reset).
        decay_input: Whether the input is divided by tau, too.
        detach_reset: Whether the reset is a constant in the backward pass.
        surrogate: Function of ``u = h - v_threshold`` whose derivative replaces the derivative of a spike: ``sigmoid``
            (``sigmoid(alpha * u)``), ``atan`` (``atan(pi / 2 * alpha * u) / pi``), ``rectangle`` (derivative
            1 / alpha where ``abs(u) < alpha / 2``) or ``triangle`` (derivative ``max(0, 1 - abs(u) / alpha) / alpha``).
        alpha: Steepness or width of the surrogate. Default: 4 (``sigmoid``), 2 (``atan``) or 1 (the others).
        return_state: Whether to return the last potentials (...) as well, in the dtype of the computation.

    Returns:
        Spikes (T, ...), 0 or 1, in the dtype and memory order of x; a pair if ``return_state``.

    Raises:
        TypeError: If x, v0 or a tensor tau is not a floating-point tensor, or a setting is not of its type.
        ValueError: If x has no step or no neuron, v0 is not of the shape of a step or on another device, tau is below
            1, ``v_reset`` is not below ``v_threshold``, ``surrogate`` is unknown or ``alpha`` is not positive.

    Examples:
        >>> import torch
        >>> from mmkron.ops import lif
        >>> lif(torch.tensor([1.0, 1.2, 1.2, 0.0, 2.0])).tolist()
        [0.0, 0.0, 1.0, 0.0, 1.0]
        >>> spikes, v = lif(torch.full((4, 2, 3), 1.5), return_state=True)
        >>> spikes.sum(0)[0].tolist(), v[0].tolist()
        ([2.0, 2.0, 2.0], [0.0, 0.0, 0.0])
    """
    check_currents(x, v0)
    check_flags(return_state=return_state)
    neuron = resolve_neuron(tau, v_threshold, v_reset, decay_input, detach_reset, surrogate, alpha)
    with torch.autocast(x.device.type, enabled=False):
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            spikes, v = lif_loop(x, v0, neuron)  # compilers fuse it and exports hold it
            return (spikes, v) if return_state else spikes
        neuron, leak = read_leak(neuron)
        out = LIFFunction.apply(x, v0, leak, neuron, return_state)
        return out if return_state else out[0]


class LIFFunction(torch.autograd.Function):
    """``(x, v0, leak, neuron, return_state) -> (spikes, last potentials or None)``.

    Only the input is kept for the backward pass, which repeats the forward pass. ``leak`` is the tensor from which
    ``neuron.leak`` was read, if any.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, v0: Tensor | None, leak: Tensor | None, neuron: Neuron, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, v0, leak)
        ctx.neuron = neuron
        ctx.set_materialize_grads(False)
        return run_forward(x, v0, neuron, return_state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_last: Tensor | None) -> tuple[Tensor | None, ...]:
        x, v0, leak = ctx.saved_tensors
        grad_x, grad_v0, grad_leak = run_backward(x, v0, ctx.neuron, grad, grad_last)
        return grad_x, grad_v0, None if grad_leak is None else grad_leak.to(leak.dtype).view_as(leak), None, None


class Backend(NamedTuple):
    """:func:`forward_block` and :func:`backward_block`, or equivalents for another device."""

    forward_block: Callable[..., Tensor]
    backward_block: Callable[..., tuple[Tensor, Tensor | None]]


def select_backend(x: Tensor) -> Backend:
    """Return Triton's kernels on a GPU, if Triton is installed, except for float64."""
    if x.is_cuda and x.dtype != torch.float64 and find_spec('triton') is not None:
        from mmkron.ops.neurons import triton

        return Backend(triton.forward_block, triton.backward_block)
    return Backend(forward_block, backward_block)


def run_forward(x: Tensor, v0: Tensor | None, neuron: Neuron, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Run all steps block by block, so that the state stays in cache.

    Returns:
        Spikes (T, ...) and, if ``return_state``, the last potentials (...).
    """
    order = memory_order(x)
    x2d, start = flatten(x, order), flatten_step(v0, order)
    spikes = torch.empty(x2d.shape, dtype=x.dtype, device=x.device)
    last = torch.empty(x2d.shape[1] if return_state else 0, dtype=state_dtype(x), device=x.device)
    backend = select_backend(x)
    for block in blocks(x2d):
        first = None if start is None else start[block]
        v = backend.forward_block(x2d[:, block], first, neuron, spikes[:, block], return_state)
        if return_state:
            last[block] = v
    return unflatten(spikes, order, x.shape), unflatten_step(last, order, x.shape) if return_state else None


def run_backward(
    x: Tensor, v0: Tensor | None, neuron: Neuron, grad: Tensor | None, grad_last: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, v0 and the leak from the gradients of the spikes and the last potentials."""
    order = memory_order(x)
    x2d, start, end = flatten(x, order), flatten_step(v0, order), flatten_step(grad_last, order)
    grad2d = x.new_zeros(()).expand(x2d.shape) if grad is None else flatten(grad, order)
    grad_x = torch.empty(x2d.shape, dtype=x.dtype, device=x.device)
    grad_start = None if v0 is None else torch.empty_like(start)
    grad_leak = None
    backend = select_backend(x)
    for block in blocks(x2d):
        first, last = (None if state is None else state[block] for state in (start, end))
        operands = x2d[:, block], first, grad2d[:, block], last, neuron, grad_x[:, block]
        grad_v, block_grad_leak = backend.backward_block(*operands)
        if grad_start is not None:
            grad_start[block] = grad_v
        if neuron.learns_leak:
            grad_leak = block_grad_leak if grad_leak is None else grad_leak + block_grad_leak
    grad_v0 = None if v0 is None else unflatten_step(grad_start, order, x.shape)
    return unflatten(grad_x, order, x.shape), grad_v0, grad_leak


def forward_block(x: Tensor, start: Tensor | None, neuron: Neuron, spikes: Tensor, to_the_end: bool) -> Tensor:
    """Write the spikes of a block (T, n) and return its last potentials (n).

    The potentials are those before the last reset unless ``to_the_end``.
    """
    v = first_state(x, start, neuron)
    for step, (current, s) in enumerate(zip(x, spikes), 1):
        charge(v, current, neuron, out=v)
        torch.ge(v, neuron.threshold, out=s)
        if to_the_end or step < len(x):
            reset(v, neuron, out=v)
    return v


def backward_block(
    x: Tensor, start: Tensor | None, grad: Tensor, end: Tensor | None, neuron: Neuron, grad_x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Write the gradient of the inputs of a block (T, n) and return the gradients of its first potentials and leak.

    ``grad`` holds the gradients of the spikes, ``end`` those of the last potentials. From the last step to the first,
    with grad_v the gradient of the potentials after the step::

        grad_h = surrogate'(h - v_threshold) * (grad - grad_v * jump) + grad_v * kept
        grad_v = grad_h * (1 - leak)

    jump is what a spike takes away (``h - v_reset`` or ``v_threshold``; 0 with ``detach_reset``), kept is 1 - s or 1.
    In the code grad_h is divided by the surrogate's ``scale``, which is applied with the other constants.
    """
    surrogate = SURROGATES[neuron.surrogate]
    scale = surrogate.scale(neuron.alpha)
    gain = scale * neuron.leak if neuron.decay_input else scale
    v = first_state(x, start, neuron)
    before, charged = charge_all(x, v, neuron)
    # Before the first round grad_h is the gradient of v after the last step, which no leak has reduced.
    grad_h = None if end is None else end.to(v.dtype) / scale
    decay, grad_leak = 1.0, None
    for step in reversed(range(len(x))):
        h, grad_s = charged[step], grad[step].to(v.dtype)
        if grad_h is not None and not neuron.detach_reset:
            jump = neuron.threshold if neuron.reset is None else h - neuron.reset
            grad_s = grad_s - decay * scale * grad_h * jump
        if grad_h is None:
            grad_h = surrogate.scaled_backward(h, neuron.threshold, grad_s, neuron.alpha, torch.empty_like(v))
        else:
            if neuron.reset is not None:
                zero_where_fired(grad_h, h, neuron, out=grad_h)
            grad_u = surrogate.scaled_backward(h, neuron.threshold, grad_s, neuron.alpha, v)
            torch.add(grad_u, grad_h, alpha=decay, out=grad_h)
        torch.mul(grad_h, gain, out=grad_x[step])
        if neuron.learns_leak:
            pull = neuron.rest - before[step] + (x[step] if neuron.decay_input else 0)
            step_grad = scale * (grad_h * pull).sum()
            grad_leak = step_grad if grad_leak is None else grad_leak + step_grad
        decay = 1 - neuron.leak
    return grad_h.mul_(decay * scale), grad_leak


def charge_all(x: Tensor, v: Tensor, neuron: Neuron) -> tuple[list[Tensor], list[Tensor]]:
    """Repeat the forward pass of a block from potentials ``v``, which are overwritten.

    Returns:
        The potentials before each step, if the leak learns, and the charged potentials h of each step.
    """
    before, charged = [], [torch.empty_like(v) for _ in x]
    for current, h in zip(x, charged):
        if neuron.learns_leak:
            before.append(v.clone())
        charge(v, current, neuron, out=h)
        if h is not charged[-1]:
            reset(h, neuron, out=v)
    return before, charged


def charge(v: Tensor, x: Tensor, neuron: Neuron, out: Tensor) -> None:
    """Write the potentials h before the spike from potentials v and inputs x."""
    x, rest = x.to(v.dtype), neuron.rest
    if neuron.decay_input:
        # From the input's end: for tau >= 2 torch then computes v + (x - v) * leak to the last bit.
        torch.lerp(x + rest if rest else x, v, 1 - neuron.leak, out=out)
    else:
        torch.add(x, v, alpha=1 - neuron.leak, out=out)
        if rest:
            out.add_(rest * neuron.leak)


def reset(h: Tensor, neuron: Neuron, out: Tensor) -> None:
    """Write the potentials after the spike from potentials h before it."""
    if neuron.reset == 0:
        zero_where_fired(h, h, neuron, out=out)
    else:
        after = h - neuron.threshold if neuron.reset is None else neuron.reset
        out.copy_(torch.where(h >= neuron.threshold, after, h))


def zero_where_fired(value: Tensor, h: Tensor, neuron: Neuron, out: Tensor) -> None:
    """Write ``value`` where h is below the threshold, else 0; the gradient of hardtanh does it in a single pass."""
    torch.ops.aten.hardtanh_backward.grad_input(value, h, -math.inf, neuron.threshold, grad_input=out)


def first_state(x2d: Tensor, start: Tensor | None, neuron: Neuron) -> Tensor:
    """Return a copy of the potentials before the first step."""
    v = torch.empty(x2d.shape[1], dtype=state_dtype(x2d), device=x2d.device)
    return v.fill_(neuron.rest) if start is None else v.copy_(start)


def blocks(x2d: Tensor) -> list[slice]:
    """Return slices of the neurons (T, n): blocks that fit a CPU's cache, or all of them on another device."""
    count = x2d.shape[1]
    if x2d.device.type != 'cpu':
        return [slice(0, count)]
    return [slice(begin, min(begin + BLOCK, count)) for begin in range(0, count, BLOCK)]


def memory_order(x: Tensor) -> list[int]:
    """Return the dimensions of x: steps first, the others by decreasing stride."""
    return [0, *sorted(range(1, x.dim()), key=x.stride, reverse=True)]


def flatten(x: Tensor, order: list[int]) -> Tensor:
    """Reshape (T, ...) to (T, n), neurons in the given order: a view if it is x's own."""
    return x.permute(order).reshape(x.shape[0], -1)


def unflatten(x2d: Tensor, order: list[int], shape: torch.Size) -> Tensor:
    """Invert :func:`flatten`."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return x2d.reshape([x2d.shape[0], *(shape[axis] for axis in order[1:])]).permute(inverse)


def flatten_step(v: Tensor | None, order: list[int]) -> Tensor | None:
    """Apply :func:`flatten` to potentials (...)."""
    return None if v is None else flatten(v[None], order)[0]


def unflatten_step(v: Tensor, order: list[int], shape: torch.Size) -> Tensor:
    """Invert :func:`flatten_step`."""
    return unflatten(v[None], order, shape)[0]
