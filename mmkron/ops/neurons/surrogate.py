"""Surrogate gradients: the derivative that a spike, a step function, has in the backward pass.

This table is the one place that defines them. The autograd form of the plain loop, the blocked form for CPUs and the
Triton kernels read it, so that a new surrogate is a function of its derivative and an entry of :data:`SURROGATES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """Derivative of a spike with respect to ``u = h - v_threshold``, and its parameter.

    Attributes:
        alpha: Default parameter: steepness or width.
        gradient: ``(u, alpha) -> derivative at u``. Triton compiles this function for its kernels, so that it has
            numbers and methods that torch's and Triton's tensors share (``abs``, ``exp``, ``sigmoid``, ``to``), and no
            global names.
        scale: Constant factor that ``backward_block`` leaves out, a function of alpha. The caller multiplies it into
            a factor that it needs anyway, which saves a pass over memory.
        backward_block: ``(h, v_threshold, grad, alpha, out)``, the CPU's form in few passes over memory: write
            ``grad * gradient / scale`` to ``out`` and return it. The memory of h is scratch. By default it is derived
            from ``gradient``, and ``scale`` is 1.
    """

    alpha: float
    gradient: Callable[[Any, float], Any]
    scale: Callable[[float], float] = lambda alpha: 1.0
    backward_block: Callable[[Tensor, float, Tensor, float, Tensor], Tensor] | None = None

    def scaled_backward(self, h: Tensor, v_threshold: float, grad: Tensor, alpha: float, out: Tensor) -> Tensor:
        """Write ``grad * gradient(h - v_threshold, alpha) / scale(alpha)`` to ``out``; h is scratch."""
        if self.backward_block is not None:
            return self.backward_block(h, v_threshold, grad, alpha, out)
        return torch.mul(self.gradient(h.sub_(v_threshold), alpha), grad, out=out)


def _sigmoid(u, alpha):
    s = (u * alpha).sigmoid()
    return alpha * s * (1 - s)


def _sigmoid_block(h: Tensor, v_threshold: float, grad: Tensor, alpha: float, out: Tensor) -> Tensor:
    s = torch.add(h.new_tensor(-alpha * v_threshold), h, alpha=alpha, out=h).sigmoid_()
    return torch.ops.aten.sigmoid_backward.grad_input(grad, s, grad_input=out)


def _atan(u, alpha):
    w = 1.5707963267948966 * alpha * u
    return alpha / 2 / (1 + w * w)


def _atan_block(h: Tensor, v_threshold: float, grad: Tensor, alpha: float, out: Tensor) -> Tensor:
    u = h.sub_(v_threshold).mul_(math.pi / 2 * alpha)
    return torch.div(grad, u.square_().add_(1), out=out)


def _rectangle(u, alpha):
    return (u.abs() < alpha / 2).to(u.dtype) / alpha


def _triangle(u, alpha):
    w = 1 - u.abs() / alpha
    return (w > 0).to(u.dtype) * w / alpha


SURROGATES = {
    # sigmoid(alpha u), as in QKFormer's released code.
    'sigmoid': Surrogate(4.0, _sigmoid, lambda alpha: alpha, _sigmoid_block),
    # arctan(pi / 2 alpha u) / pi: Fang et al., ICCV 2021 (arXiv 2007.05785).
    'atan': Surrogate(2.0, _atan, lambda alpha: alpha / 2, _atan_block),
    # 1 / alpha where |u| < alpha / 2: h_1 of Wu et al., Spatio-temporal backpropagation, 2018 (arXiv 1706.02609).
    'rectangle': Surrogate(1.0, _rectangle),
    # max(0, 1 - |u| / alpha) / alpha: h_2 of the same paper with a_2 = 4 / alpha^2.
    'triangle': Surrogate(1.0, _triangle),
}
