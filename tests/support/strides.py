"""Tensors of other strides: what a transposition, a slice, an expansion or an offset leaves behind."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def restride(x: Tensor, seed: int) -> Tensor:
    """Return a tensor that equals ``x`` and lies otherwise in memory.

    The dimensions lie in a random order. Each has a random step and random gaps before and after it, and one along
    which ``x`` is constant may be expanded (stride 0). Everything between the elements is NaN or, in a tensor of ints,
    the least of them, so that a read beside them shows in the result.

    Args:
        x: Any tensor; it stays as it is.
        seed: Draws the strides.

    Returns:
        A leaf of the shape, dtype and values of ``x`` that does not require a gradient.
    """
    draw = random.Random(seed)
    x = x.detach()
    order = draw.sample(range(x.dim()), x.dim())
    constant = [x.shape[axis] > 1 and bool((x == x.narrow(axis, 0, 1)).all()) for axis in range(x.dim())]
    expanded = [each and draw.random() < 0.7 for each in constant]
    source = x[tuple(slice(0, 1) if each else slice(None) for each in expanded)]
    steps, befores, afters = ([draw.choice(choices) for _ in order] for choices in ((1, 1, 2, 3), (0, 0, 2), (0, 0, 1)))
    sides = [
        before + step * (length - 1) + 1 + after
        for before, step, length, after in zip(befores, steps, source.shape, afters)
    ]
    space = 'nan' if x.is_floating_point() else False if x.dtype == torch.bool else torch.iinfo(x.dtype).min
    memory = torch.full([sides[axis] for axis in order], float(space) if space == 'nan' else space, dtype=x.dtype)
    view = memory.permute([order.index(axis) for axis in range(x.dim())])
    for axis, (before, step, length) in enumerate(zip(befores, steps, source.shape)):
        view = view.narrow(axis, before, step * (length - 1) + 1)[(slice(None),) * axis + (slice(None, None, step),)]
    view.copy_(source)
    return view.expand(x.shape)
