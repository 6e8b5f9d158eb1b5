"""Surrogate gradients of a spike: the one table that every form of the neurons reads.

A spike is a step function of ``u = h - v_threshold``. In the backward pass its derivative is that of a smooth function
of u. To add a surrogate, write its four functions and add one entry to :data:`SURROGATES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:  # torch for CUDA brings it; nothing on a CPU needs it
    import triton.language as tl
except ImportError:
    tl = None


class Surrogate(NamedTuple):
    """A surrogate derivative, written once as a definition and once per fast form.

    The derivative is ``scale(alpha)`` times a function of u. The blocked form applies the scale together with the
    other constants of the recurrence, which saves a pass over memory per step.
    """

    alpha: float
    """Default steepness or width."""

    derivative: Callable[[Tensor, float], Tensor]
    """The definition: (u, alpha) -> derivative."""

    scale: Callable[[float], float]
    """alpha -> constant factor of the derivative."""

    backward: Callable[[Tensor, Tensor, float, float, Tensor], Tensor]
    """(h, grad, v_threshold, alpha, out) -> out = grad * derivative / scale; overwrites the memory of h."""

    triton: Callable[[Any, Any], Any]
    """The derivative in the language of Triton: (u, alpha) -> derivative."""


def sigmoid_derivative(u: Tensor, alpha: float) -> Tensor:
    """Return the derivative of ``sigmoid(alpha * u)``."""
    s = torch.sigmoid(alpha * u)
    return alpha * s * (1 - s)


def sigmoid_backward(h: Tensor, grad: Tensor, threshold: float, alpha: float, out: Tensor) -> Tensor:
    s = torch.add(h.new_tensor(-alpha * threshold), h, alpha=alpha, out=h).sigmoid_()
    return torch.ops.aten.sigmoid_backward.grad_input(grad, s, grad_input=out)


def sigmoid_triton(u, alpha):
    s = 1 / (1 + tl.exp(-alpha * u))
    return alpha * s * (1 - s)


def atan_derivative(u: Tensor, alpha: float) -> Tensor:
    """Return the derivative of ``atan(pi / 2 * alpha * u) / pi``."""
    return alpha / 2 / (1 + (math.pi / 2 * alpha * u) ** 2)


def atan_backward(h: Tensor, grad: Tensor, threshold: float, alpha: float, out: Tensor) -> Tensor:
    w = h.sub_(threshold).mul_(math.pi / 2 * alpha)
    return torch.div(grad, w.square_().add_(1), out=out)


def atan_triton(u, alpha):
    w = 1.5707963267948966 * alpha * u
    return alpha / 2 / (1 + w * w)


def rectangle_derivative(u: Tensor, alpha: float) -> Tensor:
    """Return 1 / alpha where ``abs(u) < alpha / 2``, else 0."""
    return (u.abs() < alpha / 2).to(u.dtype) / alpha


def rectangle_backward(h: Tensor, grad: Tensor, threshold: float, alpha: float, out: Tensor) -> Tensor:
    u = h.sub_(threshold)
    # The gradient of hardtanh is the incoming one within the open interval and 0 outside of it.
    return torch.ops.aten.hardtanh_backward.grad_input(grad, u, -alpha / 2, alpha / 2, grad_input=out)


def rectangle_triton(u, alpha):
    return tl.where(tl.abs(u) < alpha / 2, 1 / alpha, 0.0)


def triangle_derivative(u: Tensor, alpha: float) -> Tensor:
    """Return ``max(0, 1 - abs(u) / alpha) / alpha``."""
    return (1 - u.abs() / alpha).clamp(min=0) / alpha


def triangle_backward(h: Tensor, grad: Tensor, threshold: float, alpha: float, out: Tensor) -> Tensor:
    u = h.sub_(threshold)
    return torch.mul(grad, u.abs_().div_(-alpha).add_(1).clamp_(min=0), out=out)


def triangle_triton(u, alpha):
    return tl.maximum(1 - tl.abs(u) / alpha, 0.0) / alpha


# sigmoid and atan as in SpikingJelly. rectangle: Wu et al., Spatio-Temporal Backpropagation for Training
# High-Performance Spiking Neural Networks, 2018 (arXiv 1706.02609), equation 24. triangle: Bellec et al., Long
# Short-Term Memory and Learning-to-Learn in Networks of Spiking Neurons, 2018 (arXiv 1803.09574), at alpha 1.
SURROGATES: dict[str, Surrogate] = {
    'sigmoid': Surrogate(4.0, sigmoid_derivative, lambda alpha: alpha, sigmoid_backward, sigmoid_triton),
    'atan': Surrogate(2.0, atan_derivative, lambda alpha: alpha / 2, atan_backward, atan_triton),
    'rectangle': Surrogate(1.0, rectangle_derivative, lambda alpha: 1 / alpha, rectangle_backward, rectangle_triton),
    'triangle': Surrogate(1.0, triangle_derivative, lambda alpha: 1 / alpha, triangle_backward, triangle_triton),
}
