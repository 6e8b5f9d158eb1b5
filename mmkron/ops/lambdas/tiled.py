"""The reordered position lambda, tile by tile: the fast form of :func:`mmkron.ops.position_lambda`.

Instead of the k x v lambda of a query n, which costs ``m k v`` for the m positions of its scope, it makes the h
coefficients of the query to each position, ``A[h, n, m] = q[h, n] . E[m - n]``, and sums the values with them, which
costs ``m h (k + v)``. The queries of a tile share a window of the map, so both steps are matrix products, and m is that
window: somewhat more than the scope, less what the border cuts off. The coefficients exist for one tile at a time,
forward and backward; nothing of the size of a lambda for each query, or of a table over all pairs, is stored.

The embeddings that a tile needs depend on offsets alone. One Toeplitz table serves all tiles of a column of tiles; what
a border cuts off is a slice of its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Fastest on a CPU; no GPU was measured. Coefficients that are held at a time: what the caches hold.
CHUNK_COEFFICIENTS = 2**20
# At most these rows and positions has a tile of queries, more of the latter where one tile then has all columns.
TILE_ROWS = 4
TILE_POSITIONS = 40
WHOLE_POSITIONS = 56


class Span(NamedTuple):
    """Queries ``start:stop`` of an axis and the positions ``low:high`` of the map that they see."""

    start: int
    stop: int
    low: int
    high: int


class Geometry(NamedTuple):
    """Sizes of the problem: map, scope, tile of queries (height, width each), and the queries' stride."""

    size: tuple[int, int]
    scope: tuple[int, int]
    tile: tuple[int, int]
    stride: int

    def spans(self, axis: int) -> list[Span]:
        """The tiles along an axis."""
        size, radius, tile = self.size[axis], self.scope[axis] // 2, self.tile[axis]
        queries = -(-size // self.stride)
        spans = []
        for start in range(0, queries, tile):
            stop = min(start + tile, queries)
            low, high = start * self.stride - radius, (stop - 1) * self.stride + radius + 1
            spans.append(Span(start, stop, max(0, low), min(size, high)))
        return spans

    def window(self) -> int:
        """Positions that a tile sees at most."""
        rows, columns = (max(span.high - span.low for span in self.spans(axis)) for axis in (0, 1))
        return rows * columns

    def first(self, axis: int, span: Span) -> int:
        """Where the reversed window of a tile's first query begins in the embeddings, padded as in :meth:`pad`."""
        return self.scope[axis] // 2 - (span.high - 1 - span.start * self.stride) + self.pad(axis)

    def pad(self, axis: int) -> int:
        """Zeros on both sides of the embeddings, so that the windows of all queries of a tile lie in them."""
        return (self.tile[axis] - 1) * self.stride


def choose_tile(size: tuple[int, int], stride: int = 1) -> tuple[int, int]:
    """Height and width of the tiles of queries for a map of values (H, W): a few rows, and columns of equal shares."""
    rows, columns = (-(-side // stride) for side in size)
    height = min(rows, TILE_ROWS)
    count = 1 if height * columns <= WHOLE_POSITIONS else -(-height * columns // TILE_POSITIONS)
    return height, -(-columns // count)


class Band:
    """A column of tiles: the embeddings and the values that its tiles share.

    The windows are reversed along both axes. So all steps into the embeddings are positive, and the Toeplitz table is
    made of windows that move over them.

    Args:
        columns: its span along the width.
        value: (B, v, H, W).
        table: the embeddings (k, rh, rw).
        geometry: the sizes.
    """

    def __init__(self, columns: Span, value: Tensor, table: Tensor, geometry: Geometry) -> None:
        self.columns, self.geometry = columns, geometry
        rows = geometry.spans(0)
        firsts = [geometry.first(0, span) for span in rows]
        self.first_row = min(firsts)
        self.height = max(first + span.high - span.low for first, span in zip(firsts, rows)) - self.first_row
        padded = self._pad(table.flip(1, 2))
        self.table = self._toeplitz(padded).contiguous()  # (gh, gw, k, height, width of the window)
        self.values = value[..., columns.low : columns.high].flip(2, 3)  # (B, v, H, width of the window)

    def _pad(self, table: Tensor) -> Tensor:
        rows, columns = (self.geometry.pad(axis) for axis in (0, 1))
        return F.pad(table, (columns, columns, rows, rows))

    def _toeplitz(self, padded: Tensor) -> Tensor:
        columns, step = self.columns, self.geometry.stride
        # Along each axis: where the first query's window begins, how long a window is, how many queries there are.
        axes = (
            (self.first_row, self.height, self.geometry.tile[0]),
            (self.geometry.first(1, columns), columns.high - columns.low, columns.stop - columns.start),
        )
        for axis, (first, length, count) in enumerate(axes, 1):
            padded = padded.narrow(axis, first, length + step * (count - 1)).unfold(axis, length, step)
        return padded.permute(1, 2, 0, 3, 4)

    def window(self, rows: Span) -> tuple[slice, slice]:
        """Rows of the table and of the values that a tile reads."""
        height = rows.high - rows.low
        first = self.geometry.first(0, rows) - self.first_row
        return slice(first, first + height), slice(self.values.shape[2] - rows.high, self.values.shape[2] - rows.low)

    def fold(self, grad: Tensor) -> Tensor:
        """The gradient of the table summed to that of the embeddings."""
        step, (height, width) = self.geometry.stride, self.geometry.scope
        pad_rows, pad_columns = self.geometry.pad(0), self.geometry.pad(1)
        begin = self.geometry.first(1, self.columns)
        across = grad.new_zeros(grad.shape[0], *grad.shape[2:4], width + 2 * pad_columns)
        for x in range(grad.shape[1]):
            across[..., begin + step * x : begin + step * x + grad.shape[4]] += grad[:, x]
        total = grad.new_zeros(grad.shape[2], height + 2 * pad_rows, across.shape[3])
        for y in range(grad.shape[0]):
            begin = self.first_row + step * y
            total[:, begin : begin + grad.shape[3]] += across[y]
        return total[:, pad_rows : pad_rows + height, pad_columns : pad_columns + width].flip(1, 2)


class Part:
    """One tile of queries for some samples: the operands of its matrix products.

    Attributes:
        queries: (T, h b, k).
        table: (T, k, M).
        values: (b, v, M).
    """

    def __init__(self, query: Tensor, band: Band, rows: Span, samples: slice) -> None:
        columns = band.columns
        self.index = (samples, slice(rows.start, rows.stop), slice(columns.start, columns.stop))
        tile = query[self.index]
        self.samples, self.height, self.width, self.heads = tile.shape[:4]
        self.table_index = (slice(0, self.height), slice(None), slice(None), band.window(rows)[0])
        self.value_index = (samples, slice(None), band.window(rows)[1])
        self.queries = tile.permute(1, 2, 3, 0, 4).reshape(self.height * self.width, -1, tile.shape[4])
        self.table = band.table[self.table_index].flatten(3).flatten(0, 1)
        self.values = band.values[self.value_index].flatten(2)

    def coefficients(self, buffer: Tensor) -> Tensor:
        """(b, T h, M), in memory of ``buffer``."""
        shape = (len(self.queries), self.heads * self.samples, self.table.shape[2])
        out = buffer[: shape[0] * shape[1] * shape[2]].view(shape)
        torch.bmm(self.queries, self.table, out=out)
        return out.view(-1, self.samples, shape[2]).transpose(0, 1)


class PositionLambdaTiles(torch.autograd.Function):
    """``(query, value, table, content, stride, tile) -> output``, as in :func:`mmkron.ops.position_lambda`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        value: Tensor,
        table: Tensor,
        content: Tensor | None,
        stride: int,
        tile: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(query, value, table, content)
        geometry = ctx.geometry = Geometry(tuple(value.shape[3:]), tuple(table.shape[2:]), tile, stride)
        batch, heads, _, *size = query.shape
        width = value.shape[2]
        query = positions_first(query)
        out = query.new_empty(batch, heads, width, *size)
        samples, buffer = _chunks(query, geometry)
        for depth in range(table.shape[0]):
            for columns in geometry.spans(1):
                band = (columns, value[:, depth], table[depth], geometry)
                _add_band(Band(*band), query, out, samples, buffer, content if depth == 0 else None, depth > 0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Half precision is cast outside; within autocast a backward pass would do so again.
        with torch.autocast(grad.device.type, enabled=False):
            return *_differentiate(*ctx.saved_tensors, ctx.geometry, grad), None, None


def _differentiate(
    query: Tensor, value: Tensor, table: Tensor, content: Tensor | None, geometry: Geometry, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, value, table and content."""
    shape = query.shape
    query = positions_first(query)
    grad_query, grad_value, grad_table = torch.zeros_like(query), torch.zeros_like(value), torch.zeros_like(table)
    grad_content = None
    if content is not None:
        rows = grad.permute(0, 3, 4, 1, 2).flatten(1, 3)  # (B, H W h, v)
        grad_content = torch.bmm(query.flatten(1, 3).transpose(1, 2), rows)
        grad_query.copy_(torch.bmm(rows, content.transpose(1, 2)).view(query.shape))
    samples, buffer = _chunks(query, geometry)
    for depth in range(table.shape[0]):
        for columns in geometry.spans(1):
            band = (columns, value[:, depth], table[depth], geometry)
            grads = _differentiate_band(Band(*band), query, grad, grad_query, samples, buffer)
            grad_value[:, depth, :, :, columns.low : columns.high] += grads[0]
            grad_table[depth] += grads[1]
    return grad_query.permute(0, 3, 4, 1, 2).reshape(shape), grad_value, grad_table, grad_content


def _add_band(
    band: Band,
    query: Tensor,
    out: Tensor,
    samples: list[slice],
    buffer: Tensor,
    content: Tensor | None,
    accumulate: bool,
) -> None:
    """Writes or adds the outputs of a band."""
    heads, width = out.shape[1:3]
    for rows in band.geometry.spans(0):
        for chunk in samples:
            part = Part(query, band, rows, chunk)
            result = torch.bmm(part.coefficients(buffer), part.values.transpose(1, 2))
            if content is not None:
                result.baddbmm_(query[part.index].flatten(1, 3), content[chunk])
            target = out[chunk, :, :, part.index[1], part.index[2]]
            result = result.view(-1, part.height, part.width, heads, width).permute(0, 3, 4, 1, 2)
            target.add_(result) if accumulate else target.copy_(result)


def _differentiate_band(
    band: Band, query: Tensor, grad: Tensor, grad_query: Tensor, samples: list[slice], buffer: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds what a band contributes to the queries' gradient; returns those of its values and of the embeddings."""
    table_sum, value_sum = torch.zeros_like(band.table), torch.zeros_like(band.values)
    for rows in band.geometry.spans(0):
        for chunk in samples:
            part = Part(query, band, rows, chunk)
            heads, count, queries = part.heads, part.samples, len(part.queries)
            tile = grad[chunk, :, :, part.index[1], part.index[2]]
            tile = tile.transpose(1, 2).flatten(3)  # (b, v, h, T)

            # The values' gradient sums over the tile's queries and heads.
            product = torch.bmm(tile.transpose(2, 3).flatten(2), part.coefficients(buffer))
            target = value_sum[part.value_index]
            target.add_(product.view(target.shape))

            # That of the coefficients, rows (h, T) of each sample, so that (b, h) come at one stride for the products
            # that give those of the queries and of the table.
            product = torch.bmm(tile.flatten(2).transpose(1, 2), part.values)
            coefficients = product.view(count * heads, queries, -1).transpose(0, 1)
            product = torch.bmm(coefficients, part.table.transpose(1, 2))
            product = product.view(part.height, part.width, count, heads, -1)
            grad_query[part.index] += product.permute(2, 0, 1, 3, 4)
            by_sample = part.queries.view(queries, heads, count, -1).transpose(1, 2).flatten(1, 2)
            target = table_sum[part.table_index]
            target.add_(torch.bmm(by_sample.transpose(1, 2), coefficients).view(target.shape))
    return value_sum.flip(2, 3), band.fold(table_sum)


def positions_first(query: Tensor) -> Tensor:
    """(B, h, k, H, W) -> (B, H, W, h, k)."""
    batch, heads, depth, *size = query.shape
    out = query.new_empty(batch, *size, heads, depth)
    # Sample by sample, torch's copy knows a transposition and is several times faster.
    for target, source in zip(out.flatten(3).flatten(1, 2), query.flatten(3).flatten(1, 2)):
        target.copy_(source.t())
    return out


def _chunks(query: Tensor, geometry: Geometry) -> tuple[list[slice], Tensor]:
    """The samples that are taken at a time, and a buffer for their coefficients."""
    batch, height, width, heads, _ = query.shape
    each = min(geometry.tile[0], height) * min(geometry.tile[1], width) * heads * geometry.window()
    count = min(batch, max(1, CHUNK_COEFFICIENTS // each))
    return [slice(start, min(batch, start + count)) for start in range(0, batch, count)], query.new_empty(count * each)
