"""Batch normalization of attention coefficients: its parameters and statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmkron.ops.checks import check_floating
from mmkron.utils.checks import check_choice, check_number, check_probability


class CoefficientBN(NamedTuple):
    """Batch normalization of the coefficients as one channel.

    The fields are as in :func:`torch.nn.functional.batch_norm`.

    Args:
        weight: Gain of shape (1,), or None for 1.
        bias: Shift of shape (1,), or None for 0. Softmax cancels it, so only ``norm='bn'`` reads it.
        running_mean: Buffer of shape (1,) that training updates in place, or None.
        running_var: Buffer of shape (1,) that training updates in place and evaluation reads, or None.
        training: Whether to normalize with the statistics of this batch.
        momentum: Weight of this batch in the running statistics.
        eps: Number added to the variance.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    training: bool = True
    momentum: float = 0.1
    eps: float = 1e-5


def check_coefficient_bn(bn: Any) -> None:
    """Raise TypeError or ValueError unless ``bn`` is a :class:`CoefficientBN` whose fields are as documented."""
    # In a graph, the momentum of a plain average may be an unknown number.
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return
    if not isinstance(bn, CoefficientBN):
        raise TypeError(f'bn must be a CoefficientBN or None, got {bn!r}')
    for name in ('weight', 'bias', 'running_mean', 'running_var'):
        x = getattr(bn, name)
        if x is not None:
            check_floating(f'{name} of bn', x)
            if x.shape != (1,):
                raise ValueError(f'{name} of bn must have shape (1,), got {tuple(x.shape)}')
    if (bn.running_mean is None) != (bn.running_var is None):
        raise ValueError(f'running_mean and running_var of bn must be given together, got {bn!r}')
    check_choice('training of bn', bn.training, (True, False))
    check_probability('momentum of bn', bn.momentum, certain=True)
    check_number('eps of bn', bn.eps, above=0)
