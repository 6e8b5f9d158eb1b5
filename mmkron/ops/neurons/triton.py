"""Triton kernels of the equations in :mod:`mmkron.ops.neurons.neuron`, with the potentials of all steps in registers.

Potentials are float32, because Triton converts Python numbers to float32; float64 needs :mod:`mmkron.ops.neurons.lif`.
This module requires the package triton, which is installed with torch for CUDA.
"""

from __future__ import annotations

from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkron.ops.neurons.neuron import Neuron
from mmkron.ops.neurons.surrogate import SURROGATES

LANES = 1024  # neurons per program


@lru_cache
def compiled_gradient(surrogate: str) -> Any:
    """Compile the gradient of a surrogate to a function that kernels can call."""
    gradient = SURROGATES[surrogate].gradient
    # Triton's interpreter requires its language among the global names of a function.
    return triton.jit(FunctionType(gradient.__code__, {**gradient.__globals__, 'tl': tl}, gradient.__name__))


def forward_block(x: Tensor, start: Tensor | None, neuron: Neuron, spikes: Tensor, to_the_end: bool) -> Tensor:
    """Compute :func:`mmkron.ops.neurons.lif.forward_block`; the potentials are empty unless ``to_the_end``."""
    x, start = with_unit_stride(x), None if start is None else start.contiguous()
    steps, count = x.shape
    last = x.new_empty(count if to_the_end else 0, dtype=torch.float32)
    _forward[(triton.cdiv(count, LANES),)](
        x,
        start,
        spikes,
        last if to_the_end else None,
        count,
        x.stride(0),
        neuron.leak,
        neuron.threshold,
        neuron.rest,
        steps,
        neuron.reset is not None,
        neuron.decay_input,
        LANES,
    )
    return last


def backward_block(
    x: Tensor, start: Tensor | None, grad: Tensor, end: Tensor | None, neuron: Neuron, grad_x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`mmkron.ops.neurons.lif.backward_block`."""
    x, grad = with_unit_stride(x), with_unit_stride(grad)
    start, end = (None if state is None else state.contiguous() for state in (start, end))
    steps, count = x.shape
    programs = triton.cdiv(count, LANES)
    # Contains h between the forward and the backward loop, in the memory of the gradients if they are float32.
    charged = grad_x if grad_x.dtype == torch.float32 else torch.empty_like(grad_x, dtype=torch.float32)
    grad_v = x.new_empty(count, dtype=torch.float32)
    grad_leak = x.new_zeros(programs, dtype=torch.float32) if neuron.learns_leak else None
    _backward[(programs,)](
        x,
        start,
        grad[-1],  # the backward loop begins with the last step
        end,
        charged,
        grad_x[-1],
        grad_v,
        grad_leak,
        count,
        x.stride(0),
        grad.stride(0),
        neuron.leak,
        neuron.threshold,
        neuron.rest,
        neuron.alpha,
        steps,
        neuron.reset is not None,
        neuron.decay_input,
        neuron.detach_reset,
        compiled_gradient(neuron.surrogate),
        LANES,
    )
    return grad_v, None if grad_leak is None else grad_leak.sum()


def with_unit_stride(x: Tensor) -> Tensor:
    """Return x (T, n) with adjacent neurons; the steps may have any stride."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


@triton.jit
def _load(ptr, n, inside):
    return tl.load(ptr + n, inside, 0.0).to(tl.float32)


@triton.jit
def _load_state(ptr, n, inside, default, lanes: tl.constexpr):
    state = tl.full((lanes,), 0.0, tl.float32) + default
    if ptr is not None:
        state = _load(ptr, n, inside)
    return state


@triton.jit
def _charge(v, x, leak, rest, decay_input: tl.constexpr):
    return v + (x - (v - rest)) * leak if decay_input else v - (v - rest) * leak + x


@triton.jit
def _grad_of_leak(v, x, rest, decay_input: tl.constexpr):
    return rest - v + x if decay_input else rest - v


@triton.jit
def _reset(h, threshold, rest, hard: tl.constexpr):
    fired = h >= threshold
    return tl.where(fired, rest, h) if hard else tl.where(fired, h - threshold, h)


@triton.jit
def _grad_of_charged(
    h, grad, grad_v, threshold, rest, alpha, hard: tl.constexpr, detach_reset: tl.constexpr, derivative: tl.constexpr
):
    if not detach_reset:
        grad -= grad_v * ((h - rest) if hard else threshold)
    u = h - threshold
    grad_h = grad * derivative(u, alpha)
    grad_h += tl.where(u >= 0, 0.0, grad_v) if hard else grad_v
    return grad_h


@triton.jit
def _charge_all(
    x_ptr,
    charged_ptr,
    v,
    n,
    inside,
    count,
    stride,
    leak,
    threshold,
    rest,
    steps: tl.constexpr,
    hard: tl.constexpr,
    decay_input: tl.constexpr,
):
    """Store the charged potentials of all steps and return the pointers after the last step."""
    for _ in range(steps):
        h = _charge(v, _load(x_ptr, n, inside), leak, rest, decay_input)
        tl.store(charged_ptr + n, h, inside)
        v = _reset(h, threshold, rest, hard)
        # One step at a time, because stride and count have 32 bits, which their products with a step may exceed.
        x_ptr += stride
        charged_ptr += count
    return x_ptr, charged_ptr


@triton.jit
def _forward(
    x_ptr,
    start_ptr,
    out_ptr,
    last_ptr,
    count,
    stride,
    leak,
    threshold,
    rest,
    steps: tl.constexpr,
    hard: tl.constexpr,
    decay_input: tl.constexpr,
    lanes: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    inside = n < count
    v = _load_state(start_ptr, n, inside, rest, lanes)
    for _ in range(steps):
        h = _charge(v, _load(x_ptr, n, inside), leak, rest, decay_input)
        tl.store(out_ptr + n, tl.where(h >= threshold, 1.0, 0.0).to(out_ptr.dtype.element_ty), inside)
        v = _reset(h, threshold, rest, hard)
        x_ptr += stride
        out_ptr += count
    if last_ptr is not None:
        tl.store(last_ptr + n, v, inside)


@triton.jit
def _backward(
    x_ptr,
    start_ptr,
    grad_ptr,
    end_ptr,
    charged_ptr,
    grad_x_ptr,
    grad_v_ptr,
    grad_leak_ptr,
    count,
    stride,
    grad_stride,
    leak,
    threshold,
    rest,
    alpha,
    steps: tl.constexpr,
    hard: tl.constexpr,
    decay_input: tl.constexpr,
    detach_reset: tl.constexpr,
    derivative: tl.constexpr,
    lanes: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    inside = n < count
    first = _load_state(start_ptr, n, inside, rest, lanes)
    x_ptr, charged_ptr = _charge_all(
        x_ptr, charged_ptr, first, n, inside, count, stride, leak, threshold, rest, steps, hard, decay_input
    )
    grad_v = _load_state(end_ptr, n, inside, 0.0, lanes)
    total = tl.full((lanes,), 0.0, tl.float32)
    for back in range(steps):
        x_ptr -= stride
        charged_ptr -= count
        h = tl.load(charged_ptr + n, inside, 0.0)
        grad = _load(grad_ptr, n, inside)
        grad_h = _grad_of_charged(h, grad, grad_v, threshold, rest, alpha, hard, detach_reset, derivative)
        if grad_leak_ptr is not None:
            v = first
            if back + 1 < steps:
                v = _reset(tl.load(charged_ptr - count + n, inside, 0.0), threshold, rest, hard)
            total += tl.where(inside, grad_h * _grad_of_leak(v, _load(x_ptr, n, inside), rest, decay_input), 0.0)
        grad_x = grad_h * leak if decay_input else grad_h
        tl.store(grad_x_ptr + n, grad_x.to(grad_x_ptr.dtype.element_ty), inside)
        grad_v = grad_h * (1 - leak)
        grad_ptr -= grad_stride
        grad_x_ptr -= count
    tl.store(grad_v_ptr + n, grad_v, inside)
    if grad_leak_ptr is not None:
        tl.store(grad_leak_ptr + tl.program_id(0), tl.sum(total, 0))
