"""The neurons of :mod:`mmkron.ops.neurons.lif` as Triton kernels: the same equations, a neuron's steps in registers.

Potentials are float32, as which Triton takes numbers: float64 is left to the other form. Needs the package triton,
which torch for CUDA brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from mmkron.ops.neurons.lif import Neuron

LANES = 1024  # neurons a program


def fire(rows: Tensor, start: Tensor | None, neuron: Neuron, spikes: Tensor, to_the_end: bool) -> Tensor:
    """As :func:`mmkron.ops.neurons.lif.fire`; the potentials are empty unless ``to_the_end``."""
    rows, start = with_unit_stride(rows), None if start is None else start.contiguous()
    steps, count = rows.shape
    last = rows.new_empty(count if to_the_end else 0, dtype=torch.float32)
    _fire[(triton.cdiv(count, LANES),)](
        rows,
        rows if start is None else start,
        spikes,
        last,
        count,
        rows.stride(0),
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


def differentiate(
    rows: Tensor, start: Tensor | None, grads: Tensor, end: Tensor | None, neuron: Neuron, grad_rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """As :func:`mmkron.ops.neurons.lif.differentiate`."""
    rows, grads = with_unit_stride(rows), with_unit_stride(grads)
    start, end = (None if of is None else of.contiguous() for of in (start, end))
    steps, count = rows.shape
    programs = triton.cdiv(count, LANES)
    # Holds h between the walk forward and the walk back, in the memory of the gradients if that is exact enough.
    charged = grad_rows if grad_rows.dtype == torch.float32 else torch.empty_like(grad_rows, dtype=torch.float32)
    carry = rows.new_empty(count, dtype=torch.float32)
    change = rows.new_zeros(programs if neuron.learns else 1, dtype=torch.float32)
    _differentiate[(programs,)](
        rows,
        rows if start is None else start,
        grads,
        grads if end is None else end,
        charged,
        grad_rows,
        carry,
        change,
        count,
        rows.stride(0),
        grads.stride(0),
        neuron.leak,
        neuron.threshold,
        neuron.rest,
        neuron.slope,
        steps,
        start is not None,
        end is not None,
        neuron.reset is not None,
        neuron.decay_input,
        neuron.detach_reset,
        neuron.surrogate == 'sigmoid',
        neuron.learns,
        LANES,
    )
    return carry, change.sum() if neuron.learns else None


def with_unit_stride(rows: Tensor) -> Tensor:
    """(T, n) whose neurons lie side by side; the steps may lie anywhere."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@triton.jit
def _charge(v, x, leak, rest, decay_input: tl.constexpr):
    return v + (x - (v - rest)) * leak if decay_input else v - (v - rest) * leak + x


@triton.jit
def _reset(h, threshold, rest, hard: tl.constexpr):
    fired = h >= threshold
    return tl.where(fired, rest, h) if hard else tl.where(fired, h - threshold, h)


@triton.jit
def _fire(
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
def _differentiate(
    x_ptr,
    start_ptr,
    grad_ptr,
    end_ptr,
    charged_ptr,
    grad_x_ptr,
    carry_ptr,
    change_ptr,
    count,
    stride,
    grad_stride,
    leak,
    threshold,
    rest,
    slope,
    steps: tl.constexpr,
    has_start: tl.constexpr,
    has_end: tl.constexpr,
    hard: tl.constexpr,
    decay_input: tl.constexpr,
    detach_reset: tl.constexpr,
    is_sigmoid: tl.constexpr,
    learns: tl.constexpr,
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
    carry = tl.full((lanes,), 0.0, tl.float32)
    if has_end:
        carry = tl.load(end_ptr + n, inside, 0.0).to(tl.float32)
    total = tl.full((lanes,), 0.0, tl.float32)
    for back in range(steps):
        x_ptr -= stride
        charged_ptr -= count
        grad_ptr -= grad_stride
        grad_x_ptr -= count
        h = tl.load(charged_ptr + n, inside, 0.0)
        grad = tl.load(grad_ptr + n, inside, 0.0).to(tl.float32)
        if not detach_reset:
            grad -= carry * ((h - rest) if hard else threshold)
        u = h - threshold
        if is_sigmoid:
            s = 1 / (1 + tl.exp(-slope * u))
            through = grad * slope * s * (1 - s)
        else:
            w = 1.5707963267948966 * slope * u
            through = grad * slope / 2 / (1 + w * w)
        through += tl.where(u >= 0, 0.0, carry) if hard else carry
        if learns:
            before = first
            if back + 1 < steps:
                before = _reset(tl.load(charged_ptr - count + n, inside, 0.0), threshold, rest, hard)
            factor = rest - before
            if decay_input:
                factor += tl.load(x_ptr + n, inside, 0.0).to(tl.float32)
            total += tl.where(inside, through * factor, 0.0)
        grad_x = through * leak if decay_input else through
        tl.store(grad_x_ptr + n, grad_x.to(grad_x_ptr.dtype.element_ty), inside)
        carry = through * (1 - leak)
    tl.store(carry_ptr + n, carry, inside)
    if learns:
        tl.store(change_ptr + tl.program_id(0), tl.sum(total, 0))
