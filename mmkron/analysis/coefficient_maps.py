"""Weights of the rows, columns and positions of a context map in the output of an attention operator."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mmkron.ops.checks import check_floating
from mmkron.ops.kronecker import MODES
from mmkron.utils.checks import check_choice, check_sequence, resolve_size


class PositionWeights(NamedTuple):
    """Weights of a context map (H', W'), pooled in mode ``'pooled'``, in the output at one position.

    Attributes:
        rows: (B, Q, H'), from the top.
        columns: (B, Q, W'), from the left.
        positions: (B, H', W'), the sum over all Q queries.
    """

    rows: Tensor
    columns: Tensor
    positions: Tensor


def position_weights(
    coefficients: Tensor,
    mode: str,
    size: tuple[int, int],
    position: tuple[int, int],
    context_size: tuple[int, int] | None = None,
) -> PositionWeights:
    """Return the weights of the context's values in the output at one position.

    The output of an operator at position p is ``sum_k C[k, p] v_k`` over its keys k. In modes ``dense`` and ``pooled``
    a key is a (pooled) position and its coefficient is its weight; ``rows`` and ``columns`` are the sums of these
    weights along the other axis. In mode ``kv`` the keys are the W' column means, each over H' positions, and the H'
    row means, each over W' positions. With their coefficients ``columns`` and ``rows``, the output is

        sum_x columns[x] mean_y v[y, x] + sum_y rows[y] mean_x v[y, x] = sum_yx (columns[x] / H' + rows[y] / W') v[y, x]

    so position (y, x) has the weight in the parentheses. In mode ``qkv`` the output at (i, j) is such a sum for the
    query of row i plus one for the query of column j: Q is 2 there, in this order, and ``positions`` is the sum of
    both. Under a softmax norm ``positions`` thus sums to 1, and to 2 in mode ``qkv``. In every mode
    ``sum_yx positions[y, x] v[y, x]`` is the operator's output, for pooled v in mode ``pooled``.

    Args:
        coefficients: (B, m, n), as returned by :meth:`mmkron.layers.KroneckerAttention2d.coefficients`.
        mode: ``'dense'``, ``'pooled'``, ``'kv'`` or ``'qkv'``.
        size: (H, W) of the query map.
        position: (i, j), row and column in the query map.
        context_size: (H', W') of the context map before pooling. Defaults to ``size``.

    Raises:
        TypeError: If ``coefficients`` is not a floating-point tensor, or ``position`` or a size does not consist of
            ints.
        ValueError: If ``mode`` is unknown, ``position`` is outside the map, or ``coefficients`` has another shape.

    Examples:
        >>> import torch
        >>> weights = position_weights(torch.full((1, 4, 9), 0.25), 'dense', (3, 3), (1, 1), context_size=(2, 2))
        >>> weights.rows.tolist(), weights.positions.tolist()
        ([[[0.5, 0.5]]], [[[0.25, 0.25], [0.25, 0.25]]])
    """
    check_choice('mode', mode, MODES)
    check_floating('coefficients', coefficients)
    check_sequence('position', position, 2)
    (i, j), (h, w) = position, resolve_size('size', size)
    if not all(type(index) is int for index in position):
        raise TypeError(f'position must be two ints, got {position!r}')
    if not (0 <= i < h and 0 <= j < w):
        raise ValueError(f'position must be in [0, {h - 1}] x [0, {w - 1}], got {position!r}')
    context_size = (h, w) if context_size is None else resolve_size('context_size', context_size)
    query, context = MODES[mode]
    queries, keys = query.count((h, w)), context.count(context_size)
    if coefficients.dim() != 3 or coefficients.shape[1:] != (keys, queries):
        raise ValueError(f'coefficients must be (B, {keys}, {queries}), got shape {tuple(coefficients.shape)}')

    weights = coefficients[:, :, query.indices((i, j), w)].transpose(1, 2)
    height, width = context.grid(context_size)
    if not context.means:
        maps = weights.unflatten(2, (height, width))
        return PositionWeights(maps.sum(3), maps.sum(2), maps[:, 0])
    columns, rows = weights.split([width, height], 2)
    positions = columns.sum(1)[:, None, :] / height + rows.sum(1)[:, :, None] / width
    return PositionWeights(rows, columns, positions)
