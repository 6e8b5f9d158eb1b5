"""Batch norm and neurons in one operation that keeps the norm's input alone for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmkron.ops.checks import check_int
from mmkron.ops.lif import Neuron, differentiate_all, fire_all, read_leak, resolve_neuron


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
    """Batch norm over all maps and steps in training, then :func:`mmkron.ops.lif`.

    The same as one after the other, but the normalised maps, which only the neurons' backward pass needs, are made a
    second time there instead of being kept.

    Args:
        x: maps (T B, C, H, W).
        steps: T.
        weight, bias: of the norm, (C).
        running_mean, running_var: statistics (C), which are updated.
        momentum, eps: of the norm.
        **settings: of the neurons.

    Returns:
        Spikes (T, B, C, H, W).

    Raises:
        TypeError, ValueError: settings outside the choices of :func:`mmkron.ops.lif`, a number of maps that ``steps``
            does not divide, or a single value a channel, which has no variance.
    """
    check_int('steps', steps)
    if len(x) % steps:
        raise ValueError(f'steps must divide the number of maps, got {steps} and {len(x)}')
    if x.numel() == x.shape[1]:
        raise ValueError(f'x must have more than one value a channel in training, got shape {tuple(x.shape)}')
    neuron, leak = read_leak(resolve_neuron(**settings))
    return NormLIFFunction.apply(x, weight, bias, leak, running_mean, running_var, momentum, eps, steps, neuron)


class NormLIFFunction(torch.autograd.Function):
    """See :func:`norm_lif`."""

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
        normalise(x, weight, bias, mean, var, eps, out=currents)
        ctx.save_for_backward(x, weight, bias, leak, mean, var)
        ctx.eps, ctx.steps, ctx.neuron = eps, steps, neuron
        return fire_all(currents.unflatten(0, (steps, -1)), None, neuron, False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, leak, mean, var = ctx.saved_tensors
        currents = torch.empty_like(x)
        normalise(x, weight, bias, mean, var, ctx.eps, out=currents)  # to the last bit: the neurons fire as they did
        grad, _, grad_leak = differentiate_all(currents.unflatten(0, (ctx.steps, -1)), None, ctx.neuron, grad, None)
        del currents
        grads = torch.ops.aten.native_batch_norm_backward(
            grad.flatten(0, 1), x, weight, None, None, mean, (var + ctx.eps).rsqrt(), True, ctx.eps, [True, True, True]
        )
        grad_leak = None if grad_leak is None else grad_leak.to(leak.dtype).view_as(leak)
        return *grads, grad_leak, None, None, None, None, None, None


def mean_and_variance(x: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel of maps (N, C, H, W), at least in float32; the variance is the biased one.

    ``scratch``, like x, is written to: on a CPU two passes of sums take a small part of the time of torch's statistics.
    """
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64):
        return torch.var_mean(x.float(), (0, 2, 3), correction=0)[::-1]
    mean = x.mean((0, 2, 3))
    return mean, torch.sub(x, mean[:, None, None], out=scratch).square_().mean((0, 2, 3))


def normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, out: Tensor) -> None:
    """Writes ``out``; statistics that are given come back empty."""
    unused = mean.new_empty(0), mean.new_empty(0)
    torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps, out=(out, *unused))
