"""Kronecker attention on feature maps, and the dense and pooled attention to which it is compared.

Source: Gao, Wang and Ji, Kronecker Attention Networks, KDD 2020 (arXiv 2007.08442), section 3.4.

The four operators share one core, :func:`mmkron.ops.attend`, and differ in its query, key and value:

========== ============================ =========================== =========================
operator   query                        key and value               coefficients
========== ============================ =========================== =========================
dense      every position, ``H W``      every position, ``H' W'``   ``H W x H' W'``
pooled     every position               2 x 2 max pooled positions  ``H W x H' W' / 4``
KV         every position               row and column means        ``H W x (H' + W')``
QKV        row and column means         row and column means        ``(H + W) x (H' + W')``
========== ============================ =========================== =========================

Section 2 of the paper defines the coefficients by the plain inner product, so ``scale`` defaults to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkron.ops.checks import check_floating, check_map
from mmkron.ops.coefficient_bn import CoefficientBN
from mmkron.ops.column_attention import attend, is_half
from mmkron.utils.checks import resolve_size


def dense_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """Apply attention of every position to every position (the non-local operator).

    Section 2.2 of `Kronecker Attention Networks <https://arxiv.org/abs/2007.08442>`_. From 768 keys on this is torch's
    tiled attention, which has no second derivative on the CPU.

    Args:
        query: Map (B, C, H, W).
        key: Map (B, C, H', W'). Defaults to ``query``.
        value: Map (B, Cv, H', W'). Defaults to ``query``.
        norm: Normalization of the coefficients: ``'softmax'`` over the keys, ``'bn_softmax'`` (batch normalization of
            the coefficients as one channel, then softmax) or ``'bn'`` (batch normalization alone).
        scale: Factor on the coefficients before their normalization.
        bn: Parameters and statistics of the batch normalization. Defaults to batch statistics without parameters.

    Returns:
        Map (B, Cv, H, W).

    Raises:
        TypeError: If an input is not a floating-point tensor, or if the dtypes of the inputs differ.
        ValueError: If an input is not a map or is empty, if the inputs do not fit each other, or if ``norm`` is
            unknown.

    Examples:
        >>> import torch
        >>> x = torch.randn(2, 8, 20, 28)
        >>> dense_attention(x).shape
        torch.Size([2, 8, 20, 28])
    """
    return _map_attention(MODES['dense'], query, key, value, norm, scale, bn)


def pooled_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """Apply :func:`dense_attention` with 2 x 2 max pooled key and value (the subsampled non-local operator).

    Odd maps are pooled with a partial last window, so that every position counts. Arguments, shapes and errors are as
    in :func:`dense_attention`.

    Examples:
        >>> import torch
        >>> x, context = torch.randn(2, 8, 20, 28), torch.randn(2, 8, 9, 9)
        >>> pooled_attention(x, context, context).shape
        torch.Size([2, 8, 20, 28])
    """
    return _map_attention(MODES['pooled'], query, key, value, norm, scale, bn)


def kronecker_attention_kv(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """Apply KAO_KV: every position attends to the row and column means, ``O = C softmax(C^T X)``.

    Section 3.4 of `Kronecker Attention Networks <https://arxiv.org/abs/2007.08442>`_. The cost is
    H W (H' + W') (C + Cv) multiply-adds. Arguments, shapes and errors are as in :func:`dense_attention`.

    Examples:
        >>> import torch
        >>> x, value = torch.randn(2, 8, 20, 28), torch.randn(2, 16, 20, 28)
        >>> kronecker_attention_kv(x, x, value).shape
        torch.Size([2, 16, 20, 28])
    """
    return _map_attention(MODES['kv'], query, key, value, norm, scale, bn)


def kronecker_attention_qkv(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """Apply KAO_QKV: the means attend to the means, ``[H~, L~] = C softmax(C^T C)``; the output is their outer sum.

    Section 3.4 of `Kronecker Attention Networks <https://arxiv.org/abs/2007.08442>`_. The cost is
    (H + W) (H' + W') (C + Cv) multiply-adds. Every channel of the output is a row term plus a column term. Arguments,
    shapes and errors are as in :func:`dense_attention`.

    Examples:
        >>> import torch
        >>> x = torch.full((1, 3, 4, 6), 0.5)
        >>> torch.allclose(kronecker_attention_qkv(x), 2 * x)
        True
    """
    return _map_attention(MODES['qkv'], query, key, value, norm, scale, bn)


def axis_means(x: Tensor) -> Tensor:
    """Return ``C = [H^T, L^T]``: the mean over the rows, then the mean over the columns.

    Args:
        x: Map (B, C, H, W).

    Returns:
        (B, C, W + H): W means over the height, then H means over the width.

    Raises:
        TypeError: If ``x`` is not a floating-point tensor.
        ValueError: If ``x`` is not a map or is empty.
    """
    check_map('x', x)
    return full_means(x).to(x.dtype)


def full_means(x: Tensor) -> Tensor:
    """Return :func:`axis_means` of ``x``, in float32 if ``x`` is in half precision.

    Softmax needs the differences of products, which can be smaller than the rounding error of half-precision means.
    """
    dtype = torch.float32 if is_half(x) else x.dtype
    # The gradient of a sum is a view, the gradient of a mean a map: dividing the sums saves two passes over maps.
    return torch.cat([x.sum(dim, dtype=dtype) / x.shape[dim] for dim in (2, 3)], 2)


def pool_context(x: Tensor) -> Tensor:
    """Return the 2 x 2 max pooled positions (B, C, ceil(H / 2) * ceil(W / 2)) of a map (B, C, H, W).

    The last window of an odd side is partial. With dynamic sizes, ``torch.export`` fixes the parity of both sides,
    because torch's pooling guards on it.

    Raises:
        TypeError: If ``x`` is not a floating-point tensor.
        ValueError: If ``x`` is not a map or is empty.
    """
    check_map('x', x)
    return F.max_pool2d(x, 2, ceil_mode=True).flatten(2)


def outer_sum(y: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the outer sum of the two parts of ``y``, which are ordered as in :func:`axis_means`.

    Args:
        y: (B, C, W + H).
        size: (H, W).

    Returns:
        Map (B, C, H, W) with ``out[..., i, j] = y[..., W + i] + y[..., j]``.

    Raises:
        TypeError: If ``y`` is not a floating-point tensor or ``size`` does not consist of ints.
        ValueError: If ``y`` and ``size`` do not fit each other.
    """
    if not torch.jit.is_tracing():
        check_floating('y', y)
        if y.dim() != 3 or 0 in y.shape[1:] or y.shape[2] != sum(resolve_size('size', size)):
            raise ValueError(f'y must have shape (B, C, W + H) for size={size!r}, got {tuple(y.shape)}')
    width = size[1]
    return y[:, :, None, :width] + y[:, :, width:, None]


class Reduction(NamedTuple):
    """How an operator turns a map into columns.

    Attributes:
        apply: Function from a map (B, C, H, W) to columns (B, C, n).
        means: Whether the columns are W column means and H row means instead of positions.
        stride: Side of the window that makes one position.
    """

    apply: Callable[[Tensor], Tensor]
    means: bool = False
    stride: int = 1

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the number of rows and columns that remain of a map of ``size`` (H, W)."""
        return -(-size[0] // self.stride), -(-size[1] // self.stride)

    def count(self, size: tuple[int, int]) -> int:
        """Return n, the number of columns for a map of ``size`` (H, W)."""
        rows, columns = self.grid(size)
        return rows + columns if self.means else rows * columns

    def indices(self, position: tuple[int, int], width: int) -> list[int]:
        """Return the columns that make the output at a position (i, j) of a map of this width, row mean first."""
        i, j = position
        return [width + i, j] if self.means else [i * width + j]

    def restore(self, columns: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the map (B, C, H, W) of attended columns (B, C, n), for a reduction that keeps the size."""
        return outer_sum(columns, size) if self.means else columns.reshape(*columns.shape[:2], *size)


class Mode(NamedTuple):
    """How an operator reduces its query, and how it reduces its key and value."""

    query: Reduction
    context: Reduction


def _positions(x: Tensor) -> Tensor:
    return x.flatten(2)


POSITIONS = Reduction(_positions)
MEANS = Reduction(full_means, means=True)
POOLED = Reduction(pool_context, stride=2)

MODES = {
    'kv': Mode(POSITIONS, MEANS),
    'qkv': Mode(MEANS, MEANS),
    'dense': Mode(POSITIONS, POSITIONS),
    'pooled': Mode(POSITIONS, POOLED),
}


def _map_attention(
    mode: Mode,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    norm: str,
    scale: float,
    bn: CoefficientBN | None,
) -> Tensor:
    key = query if key is None else key
    value = query if value is None else value
    _check_maps(query, key, value)
    keys = mode.context.apply(key)
    values = keys if value is key else mode.context.apply(value)
    queries = keys if query is key and mode.query is mode.context else mode.query.apply(query)
    out = attend(queries, keys, values.to(value.dtype), norm, scale, bn)
    return mode.query.restore(out, query.shape[2:])


def _check_maps(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise TypeError or ValueError unless the maps fit each other."""
    check_map('query', query)
    check_map('key', key, query.shape[1], like=query)
    check_map('value', value, like=query)
    if not torch.jit.is_tracing() and key.shape[2:] != value.shape[2:]:
        raise ValueError(f'key and value must have equal map sizes, got {tuple(key.shape)} and {tuple(value.shape)}')
