"""Tensors with strides such as transposing, slicing and expanding give."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def restride(x: Tensor, seed: int) -> Tensor:
    """Return a tensor with the values of ``x`` and random strides.

    The dimensions have a random order in memory, random steps, and random gaps before and after them. A dimension along
    which ``x`` is constant may be expanded (stride 0). The memory between the elements is NaN, or the least integer, so
    that a wrong read shows in the result.

    Args:
        x: Any tensor; it stays as it is.
        seed: Seed of the strides.

    Returns:
        A leaf tensor that does not require a gradient.
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
