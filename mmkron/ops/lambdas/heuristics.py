"""Estimated times of the forms of the position lambda, for :func:`mmkron.ops.lambdas.position.choose_form`.

The time of a form is a sum of amounts of work, each at its own rate. ``benchmarks/lambda_forms.py`` fits the rates to
the times of random problems, here of float32 on a CPU with AVX-512, and reports in lambda_forms.md how much time the
choices lose; three thresholds instead of the rates lose about a sixth more. Other machines have other rates; only their
relation counts. No GPU was measured.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mmkron.ops.lambdas.tiled import CHUNK_COEFFICIENTS, Geometry, choose_tile

# Limits of memory, however fast a form may be: positions of a dense table, whose size is their square, and elements of
# the lambdas of a convolution, (B, v, k, H, W).
DENSE_MAX_POSITIONS = 100
CONV_MAX_LAMBDAS = 2**22
# Output channels that a convolution computes at once.
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
        """Return the number of positions of the queries."""
        return -(-self.size[0] // self.stride) * -(-self.size[1] // self.stride)

    @property
    def lambdas(self) -> int:
        """Return the number of elements of the lambdas of all queries."""
        return self.batch * self.width * self.depth * self.queries


class Work(NamedTuple):
    """Amounts of work of a form.

    Attributes:
        macs: Multiply-adds.
        slow_macs: Multiply-adds of a convolution on a map that ends within the scope's radius.
        elements: Elements of intermediate results that pass through memory.
        io_elements: Elements of inputs and outputs that are rearranged.
        calls: Calls, or tiles.
    """

    macs: int
    slow_macs: int = 0
    elements: int = 0
    io_elements: int = 0
    calls: int = 1


class Rates(NamedTuple):
    """Microseconds per million of each kind of :class:`Work`, and per call."""

    macs: float
    slow_macs: float = 0.0
    elements: float = 0.0
    io_elements: float = 0.0
    calls: float = 0.0

    def time(self, work: Work) -> float:
        """Return the microseconds that ``work`` takes."""
        amounts = self.macs * work.macs + self.slow_macs * work.slow_macs
        amounts += self.elements * work.elements + self.io_elements * work.io_elements
        return 1e-6 * amounts + self.calls * work.calls


def conv_work(p: Problem) -> Work:
    """Return the work of one convolution and of the passes over its lambdas."""
    macs = p.batch * p.width * p.queries * p.intra * max(p.depth, CONV_CHANNELS) * p.scope[0] * p.scope[1]
    # On maps that end within the radius torch selects a convolution that is several times slower.
    is_slow = any(size <= side // 2 for size, side in zip(p.size, p.scope))
    elements = p.lambdas * (p.heads + 1)
    return Work(macs=0 if is_slow else macs, slow_macs=macs if is_slow else 0, elements=elements)


def dense_work(p: Problem) -> Work:
    """Return the work with the table of all pairs and the coefficients of all pairs in memory."""
    pairs = p.queries * p.intra * p.size[0] * p.size[1]
    rows = p.batch * p.heads
    return Work(macs=pairs * rows * (p.depth + p.width), elements=pairs * (p.depth + rows))


def tiled_work(p: Problem) -> Work:
    """Return the work of all tiles: their tables and coefficients, and the rearranged inputs and outputs."""
    scope = tuple(min(side, 2 * size - 1) for side, size in zip(p.scope, p.size))
    tile = choose_tile(p.size, p.stride)
    geometry = Geometry(p.size, scope, tile, p.stride)
    rows, columns = geometry.spans(0), geometry.spans(1)
    # Pairs of a query and a position of its tile's window.
    pairs = 1
    for spans in (rows, columns):
        pairs *= sum(span.num_queries * span.window for span in spans)
    coefficients = pairs * p.batch * p.heads
    table_rows = min(p.size[0], scope[0]) + (tile[0] - 1) * p.stride
    table = tile[0] * tile[1] * p.depth * table_rows * sum(span.window for span in columns)
    per_sample = tile[0] * tile[1] * p.heads * geometry.max_window()
    chunks = -(-p.batch // max(1, CHUNK_COEFFICIENTS // per_sample))
    query_elements = p.heads * p.queries * (p.depth + p.width)
    return Work(
        macs=p.intra * coefficients * (p.depth + p.width),
        elements=p.intra * (table + coefficients),
        io_elements=p.batch * (query_elements + p.intra * p.width * p.size[0] * p.size[1]),
        calls=p.intra * len(columns) * (1 + len(rows) * chunks),
    )


WORK = {'conv': conv_work, 'dense': dense_work, 'tiled': tiled_work}

FORWARD_RATES = {
    'conv': Rates(macs=9.16, slow_macs=11.7, elements=371.0, calls=266.0),
    'dense': Rates(macs=30.6, elements=302.0, calls=287.0),
    'tiled': Rates(macs=14.3, elements=464.0, io_elements=2010.0, calls=77.0),
}
# Forward and backward pass together.
TRAINING_RATES = {
    'conv': Rates(macs=103.0, slow_macs=96.8, elements=1590.0, calls=821.0),
    'dense': Rates(macs=101.0, elements=2110.0, calls=828.0),
    'tiled': Rates(macs=46.4, elements=1960.0, io_elements=5920.0, calls=294.0),
}


def candidates(problem: Problem) -> list[str]:
    """Return the forms that stay within the limits of memory."""
    forms = ['tiled']
    if problem.size[0] * problem.size[1] <= DENSE_MAX_POSITIONS:
        forms.append('dense')
    if problem.lambdas <= CONV_MAX_LAMBDAS:
        forms.append('conv')
    return forms


@lru_cache(maxsize=4096)
def estimate(form: str, problem: Problem, backward: bool) -> float:
    """Return the microseconds that ``form`` is expected to take, with or without a backward pass."""
    rates = TRAINING_RATES if backward else FORWARD_RATES
    return rates[form].time(WORK[form](problem))


def fastest_form(problem: Problem, backward: bool) -> str:
    """Return the form with the least estimated time among those that stay within the limits of memory."""
    return min(candidates(problem), key=lambda form: estimate(form, problem, backward))
