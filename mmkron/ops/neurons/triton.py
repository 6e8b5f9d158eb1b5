"""Triton kernels of the neurons: the equations of :mod:`mmkron.ops.neurons.neuron`, a neuron's steps in registers.

Potentials are float32, because Triton takes Python numbers as float32; float64 is left to the other form. Needs the
package triton, which torch for CUDA brings.
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
    """Return the gradient of a surrogate as a function that kernels call."""
    gradient = SURROGATES[surrogate].gradient
    # Triton's interpreter requires its language among the global names of a function.
    return triton.jit(FunctionType(gradient.__code__, {**gradient.__globals__, 'tl': tl}, gradient.__name__))


def forward_block(x: Tensor, start: Tensor | None, neuron: Neuron, spikes: Tensor, to_the_end: bool) -> Tensor:
    """Do as :func:`mmkron.ops.neurons.lif.forward_block`; the potentials are empty unless ``to_the_end``."""
    x, start = with_unit_stride(x), None if start is None else start.contiguous()
    steps, count = x.shape
    last = x.new_empty(count if to_the_end else 0, dtype=torch.float32)
    _forward[(triton.cdiv(count, LANES),)](
        x,
        x if start is None else start,
        spikes,
        last,
        count,
        x.stride(0),
        neuron.leak,
        neuron.threshold,
        neuron.rest,
        steps,
        start is not None,
        to_the_end,
        neuron.reset is not None,
        neuron.decay_input,
        LANES,
    )
    return last


def backward_block(
    x: Tensor, start: Tensor | None, grad: Tensor, end: Tensor | None, neuron: Neuron, grad_x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Do as :func:`mmkron.ops.neurons.lif.backward_block`."""
    x, grad = with_unit_stride(x), with_unit_stride(grad)
    start, end = (None if state is None else state.contiguous() for state in (start, end))
    steps, count = x.shape
    programs = triton.cdiv(count, LANES)
    # Holds h between the walk forward and the walk back, in the memory of the gradients if that is exact enough.
    charged = grad_x if grad_x.dtype == torch.float32 else torch.empty_like(grad_x, dtype=torch.float32)
    grad_v = x.new_empty(count, dtype=torch.float32)
    grad_leak = x.new_zeros(programs if neuron.learns_leak else 1, dtype=torch.float32)
    _backward[(programs,)](
        x,
        x if start is None else start,
        grad,
        grad if end is None else end,
        charged,
        grad_x,
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
        start is not None,
        end is not None,
        neuron.reset is not None,
        neuron.decay_input,
        neuron.detach_reset,
        compiled_gradient(neuron.surrogate),
        neuron.learns_leak,
        LANES,
    )
    return grad_v, grad_leak.sum() if neuron.learns_leak else None


def with_unit_stride(x: Tensor) -> Tensor:
    """Return x (T, n) with adjacent neurons; the steps may have any stride."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


@triton.jit
def _charge(v, x, leak, rest, decay_input: tl.constexpr):
    return v + (x - (v - rest)) * leak if decay_input else v - (v - rest) * leak + x


@triton.jit
def _reset(h, threshold, rest, hard: tl.constexpr):
    fired = h >= threshold
    return tl.where(fired, rest, h) if hard else tl.where(fired, h - threshold, h)


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
    has_start: tl.constexpr,
    has_last: tl.constexpr,
    hard: tl.constexpr,
    decay_input: tl.constexpr,
    lanes: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    inside = n < count
    v = tl.full((lanes,), 0.0, tl.float32) + rest
    if has_start:
        v = tl.load(start_ptr + n, inside, 0.0).to(tl.float32)
    for _ in range(steps):
        x = tl.load(x_ptr + n, inside, 0.0).to(tl.float32)
        h = _charge(v, x, leak, rest, decay_input)
        tl.store(out_ptr + n, tl.where(h >= threshold, 1.0, 0.0).to(out_ptr.dtype.element_ty), inside)
        v = _reset(h, threshold, rest, hard)
        x_ptr += stride
        out_ptr += count
    if has_last:
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
    has_start: tl.constexpr,
    has_end: tl.constexpr,
    hard: tl.constexpr,
    decay_input: tl.constexpr,
    detach_reset: tl.constexpr,
    derivative: tl.constexpr,
    learns_leak: tl.constexpr,
    lanes: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    inside = n < count
    first = tl.full((lanes,), 0.0, tl.float32) + rest
    if has_start:
        first = tl.load(start_ptr + n, inside, 0.0).to(tl.float32)
    v = first
    for _ in range(steps):
        x = tl.load(x_ptr + n, inside, 0.0).to(tl.float32)
        h = _charge(v, x, leak, rest, decay_input)
        tl.store(charged_ptr + n, h, inside)
        v = _reset(h, threshold, rest, hard)
        # One step at a time: the product of all steps may exceed 32 bits, which stride and count have.
        x_ptr += stride
        charged_ptr += count
        grad_ptr += grad_stride
        grad_x_ptr += count
    grad_v = tl.full((lanes,), 0.0, tl.float32)
    if has_end:
        grad_v = tl.load(end_ptr + n, inside, 0.0).to(tl.float32)
    total = tl.full((lanes,), 0.0, tl.float32)
    for back in range(steps):
        x_ptr -= stride
        charged_ptr -= count
        grad_ptr -= grad_stride
        grad_x_ptr -= count
        h = tl.load(charged_ptr + n, inside, 0.0)
        grad = tl.load(grad_ptr + n, inside, 0.0).to(tl.float32)
        if not detach_reset:
            grad -= grad_v * ((h - rest) if hard else threshold)
        u = h - threshold
        grad_h = grad * derivative(u, alpha)
        grad_h += tl.where(u >= 0, 0.0, grad_v) if hard else grad_v
        if learns_leak:
            before = first
            if back + 1 < steps:
                before = _reset(tl.load(charged_ptr - count + n, inside, 0.0), threshold, rest, hard)
            pull = rest - before
            if decay_input:
                pull += tl.load(x_ptr + n, inside, 0.0).to(tl.float32)
            total += tl.where(inside, grad_h * pull, 0.0)
        grad_x = grad_h * leak if decay_input else grad_h
        tl.store(grad_x_ptr + n, grad_x.to(grad_x_ptr.dtype.element_ty), inside)
        grad_v = grad_h * (1 - leak)
    tl.store(grad_v_ptr + n, grad_v, inside)
    if learns_leak:
        tl.store(grad_leak_ptr + tl.program_id(0), tl.sum(total, 0))
