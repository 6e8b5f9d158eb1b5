"""Estimated time of the forms of the position lambda, by which :func:`mmkron.ops.lambdas.position.choose_form` chooses.

The time of a form is a sum of amounts of work, each at its own rate: multiply-adds, elements that pass through memory,
and calls. ``benchmarks/lambda_forms.py`` fits the rates to the times of random problems, here of float32 on a CPU with
AVX-512, and says in lambda_forms.md what the choices are worth. Other machines have other rates; what counts is their
relation. No GPU was measured.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mmkron.ops.lambdas.tiled import CHUNK_COEFFICIENTS, Geometry, choose_tile

# Limits of memory, however fast a form may be: positions of a dense table, which grows with their square, and elements
# of the lambdas of a convolution, (B, v, k, H, W).
DENSE_MAX_POSITIONS = 100
CONV_MAX_LAMBDAS = 2**22
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

    @property
    def lambdas(self) -> int:
        """Elements of the lambdas of all queries."""
        return self.batch * self.width * self.depth * self.queries


def conv_work(p: Problem) -> tuple[float, ...]:
    """Multiply-adds, those on maps within the scope's radius, elements in passes over the lambdas, calls."""
    products = p.batch * p.width * p.queries * p.intra * max(p.depth, CONV_CHANNELS) * p.scope[0] * p.scope[1]
    # On maps that end within the radius torch takes a convolution that is several times slower.
    slow = any(size <= side // 2 for size, side in zip(p.size, p.scope))
    return products * (not slow), products * slow, p.lambdas * (p.heads + 1), 1


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
        'conv': (9.16, 11.7, 371.0, 266.0),
        'dense': (30.6, 302.0, 287.0),
        'tiled': (14.3, 464.0, 2010.0, 77.0),
    },
    True: {
        'conv': (103.0, 96.8, 1590.0, 821.0),
        'dense': (101.0, 2110.0, 828.0),
        'tiled': (46.4, 1960.0, 5920.0, 294.0),
    },
}


def candidates(problem: Problem) -> list[str]:
    """The forms that keep within the limits of memory."""
    forms = ['tiled']
    if problem.size[0] * problem.size[1] <= DENSE_MAX_POSITIONS:
        forms.append('dense')
    if problem.lambdas <= CONV_MAX_LAMBDAS:
        forms.append('conv')
    return forms


@lru_cache(maxsize=4096)
def estimate(form: str, problem: Problem, backward: bool) -> float:
    """Microseconds that ``form`` takes, with or without a backward pass."""
    *amounts, calls = WORK[form](problem)
    *rates, call = RATES[backward][form]
    return 1e-6 * sum(amount * rate for amount, rate in zip(amounts, rates)) + calls * call
