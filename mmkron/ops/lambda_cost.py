"""Estimated time of the forms of the position lambda, by which :func:`mmkron.ops.lambdas.choose_form` chooses.

The time of a form is a sum of amounts of work, each at its own rate: multiply-adds, elements that pass through memory,
and calls. ``benchmarks/lambda_forms.py`` fits the rates to the times of random problems, here of float32 on a CPU with
AVX-512, and says in lambda_forms.md what the choices are worth. Other machines have other rates; what counts is their
relation. No GPU was measured.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mmkron.ops.lambda_tiles import CHUNK_COEFFICIENTS, Geometry, choose_tile

# A dense table of more positions than this is not made, however fast it may be: its memory grows with their square.
DENSE_MAX_POSITIONS = 100
# Lambdas (B, v, k, H, W) of more elements than this are allocated from the system, page by page, each time.
MANY_LAMBDAS = 2**22
# Channels that a convolution computes at once.
CONV_CHANNELS = 16


class Problem(NamedTuple):
    """Sizes of a position lambda: batch, h, k, v, u, map of the values (H, W), scope (r, r'), stride of the queries."""

    batch: int
    heads: int
    depth: int
    width: int
    intra: int
    size: tuple[int, int]
    scope: tuple[int, int]
    stride: int = 1

    @property
    def queries(self) -> int:
        """Positions of the queries."""
        return -(-self.size[0] // self.stride) * -(-self.size[1] // self.stride)


def conv_work(p: Problem) -> tuple[float, ...]:
    """Multiply-adds, those on maps within the scope's radius; elements of few lambdas, of many; calls."""
    products = p.batch * p.width * p.queries * p.intra * max(p.depth, CONV_CHANNELS) * p.scope[0] * p.scope[1]
    # On maps that end within the radius torch takes a convolution that is several times slower.
    slow = any(size <= side // 2 for size, side in zip(p.size, p.scope))
    lambdas = p.batch * p.width * p.queries * p.depth
    many = lambdas > MANY_LAMBDAS
    passes = lambdas * (p.heads + 1)
    return products * (not slow), products * slow, passes * (not many), passes * many, 1


def dense_work(p: Problem) -> tuple[float, ...]:
    """Multiply-adds, elements of the table of all pairs and of the coefficients, calls."""
    pairs = p.queries * p.intra * p.size[0] * p.size[1]
    rows = p.batch * p.heads
    return pairs * rows * (p.depth + p.width), pairs * (p.depth + rows), 1


def tiled_work(p: Problem) -> tuple[float, ...]:
    """Multiply-adds, elements of tables and coefficients, elements of inputs and outputs, tiles."""
    scope = tuple(min(side, 2 * size - 1) for side, size in zip(p.scope, p.size))
    tile = choose_tile(p.size, p.stride)
    geometry = Geometry(p.size, scope, tile, p.stride)
    rows, columns = geometry.spans(0), geometry.spans(1)
    # Pairs of a query and a position of its tile's window.
    pairs = 1
    for spans in (rows, columns):
        pairs *= sum((span.stop - span.start) * (span.high - span.low) for span in spans)
    height = min(p.size[0], scope[0]) + (tile[0] - 1) * p.stride
    table = tile[0] * tile[1] * p.depth * height * sum(span.high - span.low for span in columns)
    each = tile[0] * tile[1] * p.heads * geometry.window()
    chunks = -(-p.batch // max(1, CHUNK_COEFFICIENTS // each))
    coefficients = pairs * p.batch * p.heads
    ends = p.batch * (p.heads * p.queries * (p.depth + p.width) + p.intra * p.width * p.size[0] * p.size[1])
    tiles = p.intra * len(columns) * (1 + len(rows) * chunks)
    return p.intra * coefficients * (p.depth + p.width), p.intra * (table + coefficients), ends, tiles


WORK = {'conv': conv_work, 'dense': dense_work, 'tiled': tiled_work}

# Microseconds for a million of each kind of work, for a call and a tile for one: without and with a backward pass.
RATES: dict[bool, dict[str, tuple[float, ...]]] = {
    False: {
        'conv': (8.65, 13.7, 382.0, 663.0, 264.0),
        'dense': (27.2, 288.0, 305.0),
        'tiled': (14.5, 442.0, 2080.0, 77.7),
    },
    True: {
        'conv': (95.3, 93.5, 1640.0, 2690.0, 853.0),
        'dense': (103.0, 2090.0, 961.0),
        'tiled': (48.6, 1800.0, 6010.0, 306.0),
    },
}


@lru_cache(maxsize=4096)
def estimate(form: str, problem: Problem, backward: bool) -> float:
    """Microseconds that ``form`` takes, with or without a backward pass."""
    *amounts, calls = WORK[form](problem)
    *rates, call = RATES[backward][form]
    return 1e-6 * sum(amount * rate for amount, rate in zip(amounts, rates)) + calls * call
