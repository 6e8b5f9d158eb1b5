"""Tiled position lambda: the fast formulation of :func:`mmkron.ops.position_lambda`.

Instead of the k x v lambda of a query n, which costs ``m k v`` for the m positions of its scope, the tiles compute the
coefficients of its h heads for each position, ``A[h, n, m] = q[h, n] . E[m - n]``, and sum the values with them, which
costs ``m h (k + v)``. The queries of a tile share a window of the map, so both steps are matrix products, and m is the
size of that window: somewhat more than the scope, less what the border cuts off. The coefficients exist for one tile at
a time, forward and backward; nothing of the size of a lambda per query, or of a table over all pairs, is stored.

Frames of coordinates: queries, map and table. Here the rows for a tile of 2 queries, stride 1 and radius 2::

    map rows (values)                      table rows (embeddings, reversed)     read by query 0   query 1
                                             0  zeros (pad)   <- table_start           |
    map_start     +------+  --.              1  offset +2                              |              |
                  |      |    |              2  offset +1                              |              |
    query_start   |######|    | window       3  offset  0                              |              |
                  |######|    | of the       4  offset -1                              |              |
    query_stop    |      |    | tile         5  offset -2                              |              |
                  |      |    |              6  zeros (pad)                                           |
    map_stop      +------+  --'

Values and embeddings are reversed: from the last map row to the first, query 0 reads the table from ``table_start`` and
each next query ``stride`` rows further. So the table of a tile, (query, k, window), is a strided (Toeplitz) view of the
embeddings. It depends on offsets alone: all tiles of a column share it, and a tile whose window the border cuts off
reads a slice of its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tuned on a CPU; no GPU was measured. Coefficients computed at a time, so that they stay in the caches.
CHUNK_COEFFICIENTS = 2**20
# Largest number of rows and of positions of a tile of queries; tiles that span all columns may have WHOLE_POSITIONS.
TILE_ROWS = 4
TILE_POSITIONS = 40
WHOLE_POSITIONS = 56


class Span(NamedTuple):
    """Queries of a tile along one axis, ``query_start:query_stop``, and the window of the map that they see."""

    query_start: int
    query_stop: int
    map_start: int
    map_stop: int

    @property
    def num_queries(self) -> int:
        return self.query_stop - self.query_start

    @property
    def window(self) -> int:
        return self.map_stop - self.map_start


class Geometry(NamedTuple):
    """Sizes of map, scope and tile of queries (height and width each), and the stride of the queries."""

    size: tuple[int, int]
    scope: tuple[int, int]
    tile: tuple[int, int]
    stride: int

    def spans(self, axis: int) -> list[Span]:
        """Return the tiles along an axis."""
        size, radius, tile = self.size[axis], self.scope[axis] // 2, self.tile[axis]
        num_queries = -(-size // self.stride)
        spans = []
        for start in range(0, num_queries, tile):
            stop = min(start + tile, num_queries)
            first, last = start * self.stride - radius, (stop - 1) * self.stride + radius
            spans.append(Span(start, stop, max(0, first), min(size, last + 1)))
        return spans

    def max_window(self) -> int:
        """Return the number of positions in the largest window of a tile."""
        rows, columns = (max(span.window for span in self.spans(axis)) for axis in (0, 1))
        return rows * columns

    def pad(self, axis: int) -> int:
        """Return the zeros on each side of the embeddings that keep the windows of all queries of a tile inside."""
        return (self.tile[axis] - 1) * self.stride

    def table_start(self, axis: int, span: Span) -> int:
        """Return where the reversed window of a tile's first query begins in the padded embeddings."""
        first_query = span.query_start * self.stride
        return self.pad(axis) + self.scope[axis] // 2 - (span.map_stop - 1 - first_query)


def choose_tile(size: tuple[int, int], stride: int = 1) -> tuple[int, int]:
    """Return height and width of the tiles for a map (H, W): a few rows, and equal shares of the columns."""
    rows, columns = (-(-side // stride) for side in size)
    height = min(rows, TILE_ROWS)
    count = 1 if height * columns <= WHOLE_POSITIONS else -(-height * columns // TILE_POSITIONS)
    return height, -(-columns // count)


class TileColumn:
    """Table and values that the tiles of one column share.

    Args:
        columns: Span of the tiles along the width.
        value: Values (B, v, H, W).
        table: Embeddings (k, r, r').
        geometry: Sizes of the problem.

    Attributes:
        table (Tensor): (tile height, tile width, k, table rows, window width), reversed.
        values (Tensor): (B, v, H, window width), reversed.
    """

    def __init__(self, columns: Span, value: Tensor, table: Tensor, geometry: Geometry) -> None:
        self.columns, self.geometry = columns, geometry
        rows = geometry.spans(0)
        table_starts = [geometry.table_start(0, span) for span in rows]
        self.table_row = min(table_starts)  # first row of the padded embeddings that any tile reads
        self.table_rows = max(start + span.window for start, span in zip(table_starts, rows)) - self.table_row
        self.table = self._toeplitz(table.flip(1, 2)).contiguous()
        self.values = value[..., columns.map_start : columns.map_stop].flip(2, 3)

    def _toeplitz(self, table: Tensor) -> Tensor:
        """Return the windows of all queries of a tile on the reversed embeddings, (tile, tile, k, rows, columns)."""
        pad_rows, pad_columns = self.geometry.pad(0), self.geometry.pad(1)
        windows = F.pad(table, (pad_columns, pad_columns, pad_rows, pad_rows))
        stride, columns = self.geometry.stride, self.columns
        # Start of the first query's window, length of a window, number of queries.
        axes = (
            (self.table_row, self.table_rows, self.geometry.tile[0]),
            (self.geometry.table_start(1, columns), columns.window, columns.num_queries),
        )
        for axis, (start, length, count) in enumerate(axes, 1):
            windows = windows.narrow(axis, start, length + stride * (count - 1)).unfold(axis, length, stride)
        return windows.permute(1, 2, 0, 3, 4)

    def window_rows(self, rows: Span) -> tuple[slice, slice]:
        """Return the rows of ``table`` and of ``values`` that a tile reads."""
        table_row = self.geometry.table_start(0, rows) - self.table_row
        height = self.values.shape[2]
        return slice(table_row, table_row + rows.window), slice(height - rows.map_stop, height - rows.map_start)

    def fold(self, grad: Tensor) -> Tensor:
        """Sum the gradient of ``table`` to the gradient of the embeddings, (k, r, r')."""
        tile_height, tile_width, depth, rows, window = grad.shape
        stride, (height, width) = self.geometry.stride, self.geometry.scope
        pad_rows, pad_columns = self.geometry.pad(0), self.geometry.pad(1)
        table_column = self.geometry.table_start(1, self.columns)
        by_row = grad.new_zeros(tile_height, depth, rows, width + 2 * pad_columns)
        for x in range(tile_width):
            start = table_column + stride * x
            by_row[..., start : start + window] += grad[:, x]
        total = grad.new_zeros(depth, height + 2 * pad_rows, by_row.shape[3])
        for y in range(tile_height):
            start = self.table_row + stride * y
            total[:, start : start + rows] += by_row[y]
        return total[:, pad_rows : pad_rows + height, pad_columns : pad_columns + width].flip(1, 2)


class QueryTile:
    """Operands of the matrix products of one tile: T queries of b samples and the M positions of its window.

    Args:
        query: Queries of the whole map, (B, H, W, h, k).
        column: Column of the tile.
        rows: Span of the tile along the height.
        samples: Samples to compute.

    Attributes:
        queries (Tensor): (T, h b, k).
        table (Tensor): (T, k, M).
        values (Tensor): (b, v, M).
    """

    def __init__(self, query: Tensor, column: TileColumn, rows: Span, samples: slice) -> None:
        columns, (table_rows, value_rows) = column.columns, column.window_rows(rows)
        self.query_rows = slice(rows.query_start, rows.query_stop)
        self.query_columns = slice(columns.query_start, columns.query_stop)
        self.query_index = (samples, self.query_rows, self.query_columns)
        self.table_index = (slice(0, rows.num_queries), slice(None), slice(None), table_rows)
        self.value_index = (samples, slice(None), value_rows)
        tile = query[self.query_index]
        self.num_samples, self.height, self.width, self.heads, depth = tile.shape
        self.queries = tile.permute(1, 2, 3, 0, 4).reshape(self.height * self.width, -1, depth)
        self.table = column.table[self.table_index].flatten(3).flatten(0, 1)
        self.values = column.values[self.value_index].flatten(2)

    def coefficients(self, buffer: Tensor) -> Tensor:
        """Return the coefficients (b, T h, M), computed in the memory of ``buffer``."""
        num_queries, rows, window = len(self.queries), self.heads * self.num_samples, self.table.shape[2]
        out = buffer[: num_queries * rows * window].view(num_queries, rows, window)
        torch.bmm(self.queries, self.table, out=out)  # (T, h b, k) x (T, k, M) -> (T, h b, M)
        return out.view(-1, self.num_samples, window).transpose(0, 1)


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
        query = positions_first(query)
        out = query.new_empty(batch, heads, value.shape[2], *size)
        chunks, buffer = split_batch(query, geometry)
        for u in range(table.shape[0]):
            for columns in geometry.spans(1):
                column = TileColumn(columns, value[:, u], table[u], geometry)
                _forward_column(column, query, out, chunks, buffer, content if u == 0 else None, accumulate=u > 0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Half precision is cast outside; a backward pass under autocast would cast again.
        with torch.autocast(grad.device.type, enabled=False):
            return *_backward(*ctx.saved_tensors, ctx.geometry, grad), None, None


def _forward_column(
    column: TileColumn,
    query: Tensor,
    out: Tensor,
    chunks: list[slice],
    buffer: Tensor,
    content: Tensor | None,
    accumulate: bool,
) -> None:
    """Write or add the outputs of a column of tiles."""
    heads, width = out.shape[1:3]
    for rows in column.geometry.spans(0):
        for samples in chunks:
            tile = QueryTile(query, column, rows, samples)
            # (b, T h, M) x (b, M, v) -> (b, T h, v)
            result = torch.bmm(tile.coefficients(buffer), tile.values.transpose(1, 2))
            if content is not None:  # + (b, T h, k) x (b, k, v)
                result.baddbmm_(query[tile.query_index].flatten(1, 3), content[samples])
            target = out[samples, :, :, tile.query_rows, tile.query_columns]
            result = result.view(-1, tile.height, tile.width, heads, width).permute(0, 3, 4, 1, 2)
            target.add_(result) if accumulate else target.copy_(result)


def _backward(
    query: Tensor, value: Tensor, table: Tensor, content: Tensor | None, geometry: Geometry, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, value, table and content."""
    shape = query.shape
    query = positions_first(query)
    grad_query, grad_value, grad_table = torch.zeros_like(query), torch.zeros_like(value), torch.zeros_like(table)
    grad_content = None
    if content is not None:
        grad_rows = grad.permute(0, 3, 4, 1, 2).flatten(1, 3)  # (B, H W h, v)
        # (B, k, H W h) x (B, H W h, v) -> (B, k, v)
        grad_content = torch.bmm(query.flatten(1, 3).transpose(1, 2), grad_rows)
        # (B, H W h, v) x (B, v, k) -> (B, H W h, k)
        grad_query.copy_(torch.bmm(grad_rows, content.transpose(1, 2)).view(query.shape))
    chunks, buffer = split_batch(query, geometry)
    for u in range(table.shape[0]):
        for columns in geometry.spans(1):
            column = TileColumn(columns, value[:, u], table[u], geometry)
            grads = _backward_column(column, query, grad, grad_query, chunks, buffer)
            grad_value[:, u, :, :, columns.map_start : columns.map_stop] += grads[0]
            grad_table[u] += grads[1]
    return grad_query.permute(0, 3, 4, 1, 2).reshape(shape), grad_value, grad_table, grad_content


def _backward_column(
    column: TileColumn, query: Tensor, grad: Tensor, grad_query: Tensor, chunks: list[slice], buffer: Tensor
) -> tuple[Tensor, Tensor]:
    """Add to the gradient of the queries; return the gradients of the column's values and of the embeddings."""
    grad_table, grad_values = torch.zeros_like(column.table), torch.zeros_like(column.values)
    for rows in column.geometry.spans(0):
        for samples in chunks:
            tile = QueryTile(query, column, rows, samples)
            heads, num_samples, num_queries = tile.heads, tile.num_samples, len(tile.queries)
            grad_tile = grad[samples, :, :, tile.query_rows, tile.query_columns]
            grad_tile = grad_tile.transpose(1, 2).flatten(3)  # (b, v, h, T)

            # Values: (b, v, T h) x (b, T h, M) -> (b, v, M)
            product = torch.bmm(grad_tile.transpose(2, 3).flatten(2), tile.coefficients(buffer))
            target = grad_values[tile.value_index]
            target.add_(product.view(target.shape))

            # Coefficients: (b, h T, v) x (b, v, M) -> (b, h T, M), in this order so that (b, h) have one stride in
            # the two products that follow.
            product = torch.bmm(grad_tile.flatten(2).transpose(1, 2), tile.values)
            grad_coefficients = product.view(num_samples * heads, num_queries, -1).transpose(0, 1)  # (T, b h, M)
            # Queries: (T, b h, M) x (T, M, k) -> (T, b h, k)
            product = torch.bmm(grad_coefficients, tile.table.transpose(1, 2))
            product = product.view(tile.height, tile.width, num_samples, heads, -1)
            grad_query[tile.query_index] += product.permute(2, 0, 1, 3, 4)
            # Table: (T, k, b h) x (T, b h, M) -> (T, k, M)
            by_sample = tile.queries.view(num_queries, heads, num_samples, -1).transpose(1, 2).flatten(1, 2)
            target = grad_table[tile.table_index]
            target.add_(torch.bmm(by_sample.transpose(1, 2), grad_coefficients).view(target.shape))
    return grad_values.flip(2, 3), column.fold(grad_table)


def positions_first(query: Tensor) -> Tensor:
    """Copy queries (B, h, k, H, W) to (B, H, W, h, k)."""
    batch, heads, depth, *size = query.shape
    out = query.new_empty(batch, *size, heads, depth)
    # torch copies a transposed matrix several times faster than a permuted tensor.
    for target, source in zip(out.flatten(3).flatten(1, 2), query.flatten(3).flatten(1, 2)):
        target.copy_(source.t())
    return out


def split_batch(query: Tensor, geometry: Geometry) -> tuple[list[slice], Tensor]:
    """Split the batch so that the coefficients of a tile stay in the caches; return the slices and their buffer."""
    batch, height, width, heads, _ = query.shape
    per_sample = min(geometry.tile[0], height) * min(geometry.tile[1], width) * heads * geometry.max_window()
    count = min(batch, max(1, CHUNK_COEFFICIENTS // per_sample))
    slices = [slice(start, min(batch, start + count)) for start in range(0, batch, count)]
    return slices, query.new_empty(count * per_sample)
