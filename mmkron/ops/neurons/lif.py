"""Spiking neurons over several time steps: leaky integrate-and-fire (LIF) and its relatives, with surrogate gradients.

A neuron of membrane potential v charges, fires and resets at each step of the input x, with ``rest = v_reset or 0``::

    h = v + (x - (v - rest)) / tau        or, without decay_input,  v - (v - rest) / tau + x
    s = 1 where h >= v_threshold, else 0
    v = h where s is 0, else v_reset      or, with v_reset None (soft reset),  h - v_threshold * s

In the backward pass the derivative of s is that of a smooth function of ``h - v_threshold``. The state lives in the
call: ``v0`` goes in, the last v comes out on request, nothing is kept. Sources: Fang et al., Incorporating Learnable
Membrane Time Constant to Enhance Learning of Spiking Neural Networks, ICCV 2021 (arXiv 2007.05785; LIF and PLIF); Zhou
et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552; tau 2, sigmoid surrogate with alpha 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmkron.ops.checks import check_device, check_floating
from mmkron.utils.checks import check_choice, check_flags, check_number

SURROGATES = {'sigmoid': 4.0, 'atan': 2.0}  # with the slope of each by default

# Neurons whose states are walked through all steps at a time: what a cache holds, and few calls (benchmarks/lif.md).
BLOCK = 2**18


class Neuron(NamedTuple):
    """Settings as in :func:`lif`; ``leak`` is 1 / tau."""

    leak: float | Tensor
    threshold: float
    reset: float | None
    decay_input: bool
    detach_reset: bool
    surrogate: str
    slope: float
    learns: bool = False  # the leak has a gradient

    @property
    def rest(self) -> float:
        return self.reset or 0.0


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
    """Leaky integrate-and-fire neurons over T steps.

    Half precision is computed in float32, under autocast as well. Gradients are of first order.

    Args:
        x: input currents (T, ...), finite, any strides.
        v0: potentials (...) before the first step; ``v_reset``, or 0 without one, by default.
        tau: time constant in steps, at least 1. ``math.inf``, with ``decay_input=False`` only, is the
            integrate-and-fire neuron (IF); a tensor of one element is learnable (PLIF).
        v_threshold: a potential that reaches it fires.
        v_reset: potential after a spike; None subtracts the threshold (soft reset).
        decay_input: the input, too, is divided by tau.
        detach_reset: the reset is a constant to the backward pass.
        surrogate: whose derivative a spike has: ``sigmoid`` for ``sigmoid(alpha u)``, ``atan`` for
            ``arctan(pi / 2 alpha u) / pi``, of ``u = h - v_threshold``.
        alpha: steepness of the surrogate, 4 (``sigmoid``) or 2 (``atan``) by default.
        return_state: return the last potentials (...), in the dtype of the computation, as well.

    Returns:
        Spikes (T, ...), 0 or 1, in the dtype and memory order of x; with ``return_state`` a pair.

    Raises:
        TypeError: no floating-point tensor, or an argument of another type.
        ValueError: no step or no neuron, a shape that does not fit, or a value that is not allowed.
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


def read_leak(neuron: Neuron) -> tuple[Neuron, Tensor | None]:
    """The neuron with its leak as a number, and the tensor that it was read from, if it was one."""
    leak = neuron.leak
    if not isinstance(leak, Tensor):
        return neuron, None
    if not 0 <= leak.item() <= 1:
        raise ValueError(f'tau must be at least 1, got {1 / leak.item():g}')
    return neuron._replace(leak=leak.item(), learns=leak.requires_grad), leak


def lif_loop(x: Tensor, v0: Tensor | None, neuron: Neuron) -> tuple[Tensor, Tensor]:
    """The definition of :func:`lif`, step by step: (spikes, last potentials)."""
    dtype = state_dtype(x)
    rest, leak = neuron.rest, neuron.leak
    leak = leak.reshape(()).to(dtype) if isinstance(leak, Tensor) else leak
    v = torch.full_like(x[0], rest, dtype=dtype) if v0 is None else v0.to(dtype)
    spikes = []
    for current in x.to(dtype).unbind(0):
        h = v + (current - (v - rest)) * leak if neuron.decay_input else v - (v - rest) * leak + current
        u = h - neuron.threshold
        # A trace is for inference, and no runtime knows the function of the gradient.
        s = (u >= 0).to(dtype) if torch.jit.is_tracing() else Spike.apply(u, neuron.surrogate, neuron.slope)
        spikes.append(s)
        s = s.detach() if neuron.detach_reset else s
        v = h - neuron.threshold * s if neuron.reset is None else h * (1 - s) + neuron.reset * s
    return torch.stack(spikes).to(x.dtype), v


class Spike(torch.autograd.Function):
    """1 where the input is at least 0, with the derivative of a surrogate."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, surrogate: str, slope: float) -> Tensor:
        ctx.save_for_backward(u)
        ctx.of = surrogate, slope
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (u,) = ctx.saved_tensors
        surrogate, slope = ctx.of
        if surrogate == 'sigmoid':
            s = torch.sigmoid(slope * u)
            return grad * slope * s * (1 - s), None, None
        return grad * slope / 2 / (1 + (math.pi / 2 * slope * u) ** 2), None, None


class Form(NamedTuple):
    """:func:`fire` and :func:`differentiate`, or what does the same."""

    fire: Callable[..., Tensor]
    differentiate: Callable[..., tuple[Tensor, Tensor | None]]


def form_for(x: Tensor) -> Form:
    """Triton's kernels on a GPU, where they are to be had; but for float64."""
    if x.is_cuda and x.dtype != torch.float64 and find_spec('triton') is not None:
        from mmkron.ops.neurons import triton as lif_triton

        return Form(lif_triton.fire, lif_triton.differentiate)
    return Form(fire, differentiate)


class LIFFunction(torch.autograd.Function):
    """``(x, v0, leak, neuron, return_state) -> (spikes, last potentials or None)``.

    The input alone is kept for the backward pass, which walks forward once more. ``leak`` is the tensor that
    ``neuron.leak`` was read from, if it was one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, v0: Tensor | None, leak: Tensor | None, neuron: Neuron, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, v0, leak)
        ctx.neuron = neuron
        ctx.set_materialize_grads(False)
        return fire_all(x, v0, neuron, return_state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_last: Tensor | None) -> tuple[Tensor | None, ...]:
        x, v0, leak = ctx.saved_tensors
        grad_x, grad_v0, grad_leak = differentiate_all(x, v0, ctx.neuron, grad, grad_last)
        return grad_x, grad_v0, None if grad_leak is None else grad_leak.to(leak.dtype).view_as(leak), None, None


def fire_all(x: Tensor, v0: Tensor | None, neuron: Neuron, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Spikes and, where they are asked for, last potentials. A block of neurons walks through all steps while its state
    is in the cache."""
    order = memory_order(x)
    rows, start = flatten(x, order), flatten_one(v0, order)
    spikes = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    last = torch.empty(rows.shape[1] if return_state else 0, dtype=state_dtype(x), device=x.device)
    for block in blocks(rows):
        first = None if start is None else start[block]
        v = form_for(x).fire(rows[:, block], first, neuron, spikes[:, block], return_state)
        if return_state:
            last[block] = v
    return unflatten(spikes, order, x.shape), unflatten_one(last, order, x.shape) if return_state else None


def differentiate_all(
    x: Tensor, v0: Tensor | None, neuron: Neuron, grad: Tensor | None, grad_last: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, v0 and the leak, by those of the spikes and the last potentials."""
    order = memory_order(x)
    rows, start, end = flatten(x, order), flatten_one(v0, order), flatten_one(grad_last, order)
    grads = x.new_zeros(()).expand(rows.shape) if grad is None else flatten(grad, order)
    grad_rows = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    grad_start = None if v0 is None else torch.empty_like(start)
    grad_leak = None
    for block in blocks(rows):
        first, last = (None if of is None else of[block] for of in (start, end))
        operands = rows[:, block], first, grads[:, block], last, neuron, grad_rows[:, block]
        carry, change = form_for(x).differentiate(*operands)
        if grad_start is not None:
            grad_start[block] = carry
        if neuron.learns:
            grad_leak = change if grad_leak is None else grad_leak + change
    grad_v0 = None if v0 is None else unflatten_one(grad_start, order, x.shape)
    return unflatten(grad_rows, order, x.shape), grad_v0, grad_leak


def fire(rows: Tensor, start: Tensor | None, neuron: Neuron, spikes: Tensor, to_the_end: bool) -> Tensor:
    """Writes the spikes of some neurons, (T, n), and returns their last potentials (before the last reset unless
    ``to_the_end``)."""
    v = first_state(rows, start, neuron)
    for step, (current, s) in enumerate(zip(rows, spikes), 1):
        charge(v, current, neuron, out=v)
        torch.ge(v, neuron.threshold, out=s)
        if to_the_end or step < len(rows):
            reset(v, neuron, out=v)
    return v


def differentiate(
    rows: Tensor, start: Tensor | None, grads: Tensor, end: Tensor | None, neuron: Neuron, grad_rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Writes the gradient of the inputs of some neurons, (T, n); returns those of their first potentials and the leak.

    With g the gradients of the spikes and c that of the potentials after the step (``end`` for the last), backwards::

        dh = surrogate'(h - v_threshold) * (g - c * jump) + c * kept
        c = dh * (1 - leak)

    jump is what a spike takes away (``h - v_reset`` or ``v_threshold``; 0 with ``detach_reset``), kept is 1 - s or 1.
    ``scaled`` is dh without the surrogate's constant factor, which saves a pass over memory.
    """
    v = first_state(rows, start, neuron)
    before, charged = [], [torch.empty_like(v) for _ in rows]
    for current, h in zip(rows, charged):
        if neuron.learns:
            before.append(v.clone())
        charge(v, current, neuron, out=h)
        if h is not charged[-1]:
            reset(h, neuron, out=v)
    factor = neuron.slope if neuron.surrogate == 'sigmoid' else neuron.slope / 2
    scaled = None if end is None else end.to(v.dtype) / factor
    decay, gain, change = 1.0, neuron.leak if neuron.decay_input else 1.0, None
    for step in reversed(range(len(rows))):
        h, grad = charged[step], grads[step].to(v.dtype)
        if not neuron.detach_reset and scaled is not None:
            jump = neuron.threshold if neuron.reset is None else h - neuron.reset
            grad = grad - decay * factor * scaled * jump
        if scaled is None:
            scaled = surrogate_gradient(h, grad, neuron, out=torch.empty_like(v))
        else:
            if neuron.reset is not None:
                zero_where_fired(scaled, h, neuron, out=scaled)
            through = surrogate_gradient(h, grad, neuron, out=v)
            torch.add(through, scaled, alpha=decay, out=scaled)
        torch.mul(scaled, gain * factor, out=grad_rows[step])
        if neuron.learns:
            dot = scaled * (neuron.rest - before[step] + (rows[step] if neuron.decay_input else 0))
            change = factor * dot.sum() if change is None else change + factor * dot.sum()
        decay = 1 - neuron.leak
    return scaled.mul_(decay * factor), change


def charge(v: Tensor, x: Tensor, neuron: Neuron, out: Tensor) -> None:
    """Potentials v and inputs x -> potentials h before the spike."""
    x, rest = x.to(v.dtype), neuron.rest
    if neuron.decay_input:
        # From the input's end: for tau >= 2 torch then computes v + (x - v) * leak to the last bit.
        torch.lerp(x + rest if rest else x, v, 1 - neuron.leak, out=out)
    else:
        torch.add(x, v, alpha=1 - neuron.leak, out=out)
        if rest:
            out.add_(rest * neuron.leak)


def reset(h: Tensor, neuron: Neuron, out: Tensor) -> None:
    """Potentials h before -> potentials after the spike."""
    if neuron.reset == 0:
        zero_where_fired(h, h, neuron, out=out)
    else:
        after = h - neuron.threshold if neuron.reset is None else neuron.reset
        out.copy_(torch.where(h >= neuron.threshold, after, h))


def zero_where_fired(value: Tensor, h: Tensor, neuron: Neuron, out: Tensor) -> None:
    """``value`` where h stays below the threshold, else 0: what the derivative of hardtanh does in a single pass."""
    torch.ops.aten.hardtanh_backward.grad_input(value, h, -math.inf, neuron.threshold, grad_input=out)


def surrogate_gradient(h: Tensor, grad: Tensor, neuron: Neuron, out: Tensor) -> Tensor:
    """``grad`` times the surrogate's derivative at h, but for its factor; the memory of h is used up."""
    if neuron.surrogate == 'sigmoid':
        s = torch.add(h.new_tensor(-neuron.slope * neuron.threshold), h, alpha=neuron.slope, out=h).sigmoid_()
        return torch.ops.aten.sigmoid_backward.grad_input(grad, s, grad_input=out)
    u = h.sub_(neuron.threshold).mul_(math.pi / 2 * neuron.slope)
    return torch.div(grad, u.square_().add_(1), out=out)


def first_state(rows: Tensor, start: Tensor | None, neuron: Neuron) -> Tensor:
    """A copy of the potentials before the first step."""
    v = torch.empty(rows.shape[1], dtype=state_dtype(rows), device=rows.device)
    return v.fill_(neuron.rest) if start is None else v.copy_(start)


def state_dtype(x: Tensor) -> torch.dtype:
    """What potentials of inputs x are computed in."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def blocks(rows: Tensor) -> list[slice]:
    """Parts of the neurons (T, n): what a CPU's cache holds, all of them on another device."""
    count = rows.shape[1]
    if rows.device.type != 'cpu':
        return [slice(0, count)]
    return [slice(begin, min(begin + BLOCK, count)) for begin in range(0, count, BLOCK)]


def memory_order(x: Tensor) -> list[int]:
    """The dimensions of x, the steps first, the others as they lie in memory."""
    return [0, *sorted(range(1, x.dim()), key=x.stride, reverse=True)]


def flatten(x: Tensor, order: list[int]) -> Tensor:
    """(T, ...) -> (T, n), neurons in the given order: a view where that is x's own."""
    return x.permute(order).reshape(x.shape[0], -1)


def unflatten(rows: Tensor, order: list[int], shape: torch.Size) -> Tensor:
    """The inverse of :func:`flatten`."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return rows.reshape([rows.shape[0], *(shape[axis] for axis in order[1:])]).permute(inverse)


def flatten_one(v: Tensor | None, order: list[int]) -> Tensor | None:
    """As :func:`flatten`, for potentials (...)."""
    return None if v is None else flatten(v[None], order)[0]


def unflatten_one(row: Tensor, order: list[int], shape: torch.Size) -> Tensor:
    return unflatten(row[None], order, shape)[0]


def check_currents(x: Tensor, v0: Tensor | None) -> None:
    """Raises TypeError or ValueError unless x is (T, ...) and v0, if any, (...)."""
    check_floating('x', x)
    if x.dim() < 1 or (not torch.jit.is_tracing() and 0 in x.shape):
        raise ValueError(f'x must have shape (T, ...) with no empty dimension, got {tuple(x.shape)}')
    if v0 is not None and (not isinstance(v0, Tensor) or not v0.is_floating_point()):
        got = v0.dtype if isinstance(v0, Tensor) else repr(v0)
        raise TypeError(f'v0 must be a floating-point tensor or None, got {got}')
    if v0 is not None and v0.shape != x.shape[1:]:
        raise ValueError(f'v0 must have shape {tuple(x.shape[1:])}, that of a step of x, got {tuple(v0.shape)}')
    if v0 is not None:
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
    """The settings of :func:`lif`, checked; errors are those that it names."""
    check_flags(decay_input=decay_input, detach_reset=detach_reset)
    if isinstance(tau, Tensor):
        check_floating('tau', tau)
        if tau.numel() != 1:
            raise ValueError(f'tau must be a number or a tensor of one element, got shape {tuple(tau.shape)}')
    else:
        check_number('tau', tau, finite=decay_input)  # no input would count
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
    slope = SURROGATES[surrogate] if alpha is None else float(alpha)
    return Neuron(1 / tau, float(v_threshold), v_reset, decay_input, detach_reset, surrogate, slope)
