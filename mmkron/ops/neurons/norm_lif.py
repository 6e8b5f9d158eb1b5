"""Batch norm and spiking neurons in one operation that saves only the norm's input for the backward pass."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmkron.ops.checks import check_device, check_floating, check_map
from mmkron.ops.neurons.lif import run_backward, run_forward
from mmkron.ops.neurons.neuron import Neuron, read_leak, resolve_neuron
from mmkron.utils.checks import check_int, check_number


def norm_lif(
    x: Tensor,
    steps: int,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float = 0.1,
    eps: float = 1e-5,
    **settings: Any,
) -> Tensor:
    """Apply batch norm over all maps and steps, as in training, then :func:`mmkron.ops.lif`.

    The result is the same as of the two operations in sequence. The normalized maps are recomputed in the backward
    pass instead of saved.

    Args:
        x: Maps (T B, C, H, W).
        steps: T, the number of time steps.
        weight, bias: Parameters of the norm, (C), in the dtype of ``x``, or in float32 if ``x`` is half precision.
        running_mean, running_var: Statistics (C), which are updated. The same dtypes as for ``weight`` are allowed.
        momentum: Weight of this batch in the running statistics, from 0 to 1.
        eps: Value added to the variance, at least 0.
        **settings: Settings of the neurons, as in :func:`mmkron.ops.lif`.

    Returns:
        Spikes (T, B, C, H, W).

    Raises:
        TypeError: If an operand is not a floating-point tensor or has another dtype, or a setting has another type.
        ValueError: If :func:`mmkron.ops.lif` does not accept a setting, an operand has another shape or device, ``x``
            is empty, ``steps`` does not divide the number of maps, or a channel has only one value and so no variance.

    Examples:
        >>> x = torch.randn(4 * 2, 3, 8, 8)
        >>> weight, bias, mean, var = torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3)
        >>> norm_lif(x, 4, weight, bias, mean, var).shape
        torch.Size([4, 2, 3, 8, 8])
    """
    check_map('x', x)
    check_int('steps', steps)
    if len(x) % steps:
        raise ValueError(f'steps must divide the number of maps, got {steps} and {len(x)}')
    check_norm(x, momentum, eps, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    neuron, leak = read_leak(resolve_neuron(**settings))
    return NormLIFFunction.apply(x, weight, bias, leak, running_mean, running_var, momentum, eps, steps, neuron)


def check_norm(x: Tensor, momentum: float, eps: float, **operands: Tensor) -> None:
    """Raise TypeError or ValueError unless batch norm of ``x`` accepts these operands, which torch's kernels assume."""
    if x.numel() == x.shape[1]:
        raise ValueError(f'x must have more than one value per channel in training, got shape {tuple(x.shape)}')
    for name, operand in operands.items():
        check_floating(name, operand)
        if operand.shape != x.shape[1:2]:
            raise ValueError(f'{name} must have shape ({x.shape[1]},), the channels of x, got {tuple(operand.shape)}')
        check_device(name, operand, x)
        if operand.dtype not in (x.dtype, statistics_dtype(x)):
            raise TypeError(f'{name} must be of type {statistics_dtype(x)} or {x.dtype}, got {operand.dtype}')
    check_number('momentum', momentum)
    if not 0 <= momentum <= 1:
        raise ValueError(f'momentum must be from 0 to 1, got {momentum!r}')
    check_number('eps', eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f'eps must be finite and at least 0, got {eps!r}')


class NormLIFFunction(torch.autograd.Function):
    """Autograd function of :func:`norm_lif`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        leak: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        steps: int,
        neuron: Neuron,
    ) -> Tensor:
        currents = torch.empty_like(x)
        mean, var = mean_and_variance(x, scratch=currents)
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        count = x.numel() // x.shape[1]
        running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        normalize(x, weight, bias, mean, var, eps, out=currents)
        ctx.save_for_backward(x, weight, bias, leak, mean, var)
        ctx.eps, ctx.steps, ctx.neuron = eps, steps, neuron
        return run_forward(currents.unflatten(0, (steps, -1)), None, neuron, False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, leak, mean, var = ctx.saved_tensors
        currents = torch.empty_like(x)
        normalize(x, weight, bias, mean, var, ctx.eps, out=currents)  # bit for bit, so that the same neurons fire
        grad, _, grad_leak = run_backward(currents.unflatten(0, (ctx.steps, -1)), None, ctx.neuron, grad, None)
        del currents
        grad, *grads = torch.ops.aten.native_batch_norm_backward(
            grad.flatten(0, 1),
            x,
            weight.to(mean.dtype).contiguous(),  # torch's kernel for channels_last maps ignores the strides
            None,
            None,
            mean,
            (var + ctx.eps).rsqrt(),
            True,
            ctx.eps,
            [True, True, True],
        )
        grads = [g.to(weight.dtype) for g in grads]
        grad_leak = None if grad_leak is None else grad_leak.to(leak.dtype).view_as(leak)
        return grad, *grads, grad_leak, None, None, None, None, None, None


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the statistics of ``x``, float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def mean_and_variance(x: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of each channel of maps (N, C, H, W), at least in float32.

    ``scratch``, a tensor like ``x``, may be overwritten: on a CPU, two passes of sums are much faster than torch's
    ``var_mean``.
    """
    dtype = statistics_dtype(x)
    if x.is_cuda or x.dtype != dtype:
        return torch.var_mean(x.to(dtype), (0, 2, 3), correction=0)[::-1]
    mean = x.mean((0, 2, 3))
    return mean, torch.sub(x, mean[:, None, None], out=scratch).square_().mean((0, 2, 3))


def normalize(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, out: Tensor) -> None:
    """Write the batch norm of ``x`` with the given statistics to ``out``."""
    weight, bias = weight.to(mean.dtype).contiguous(), bias.to(mean.dtype).contiguous()
    unused = mean.new_empty(0), mean.new_empty(0)  # outputs for statistics, which torch computes in training only
    torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps, out=(out, *unused))
