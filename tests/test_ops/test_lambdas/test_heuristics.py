"""The estimated time of the forms of the position lambda, and the choice by it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmkron.ops.lambdas import heuristics as lambda_cost
from mmkron.ops.lambdas import position as lambdas
from mmkron.ops.lambdas import tiled as lambda_tiles
from mmkron.ops.lambdas.heuristics import DENSE_MAX_POSITIONS, WORK, Problem, estimate
from mmkron.ops.lambdas.position import FORMS, choose_form, position_lambda
from mmkron.ops.lambdas.tiled import Geometry, choose_tile

PROBLEMS = [
    Problem(2, 4, 16, 3, 1, (9, 11), (5, 7)),
    Problem(3, 2, 17, 2, 3, (5, 20), (23, 3)),
    Problem(1, 3, 16, 2, 1, (13, 30), (3, 5), 2),
    Problem(2, 1, 16, 1, 1, (1, 90), (1, 9)),
]


def operands(problem, dilation=1):
    p = problem
    size = [side * dilation for side in p.size]
    queries = [-(-side // p.stride) for side in size]
    query = torch.randn(p.batch, p.heads, p.depth, *queries)
    return query, torch.randn(p.batch, p.intra, p.width, *size), torch.randn(p.intra, p.depth, *p.scope)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('problem', PROBLEMS)
def test_multiply_adds(form, problem):
    """What is estimated is what torch's counter sees."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        position_lambda(*operands(problem), stride=problem.stride, form=form)
    work = WORK[form](problem)
    products = sum(work[:2]) if form == 'conv' else work[0]
    assert counter.get_total_flops() == 2 * products


@pytest.mark.parametrize('problem', PROBLEMS)
def test_tiles(monkeypatch, problem):
    """The tables, coefficients and tiles of the tiled form are those that it makes, two samples at a time."""
    tables, coefficients = [], []

    class Band(lambda_tiles.Band):
        def __init__(self, *args):
            super().__init__(*args)
            tables.append(self.table.numel())

    class Part(lambda_tiles.Part):
        def coefficients(self, buffer):
            result = super().coefficients(buffer)
            coefficients.append(result.numel())
            return result

    monkeypatch.setattr(lambda_tiles, 'Band', Band)
    monkeypatch.setattr(lambda_tiles, 'Part', Part)
    geometry = Geometry(problem.size, problem.scope, choose_tile(problem.size, problem.stride), problem.stride)
    limit = 2 * geometry.tile[0] * geometry.tile[1] * problem.heads * geometry.window()
    for module in (lambda_tiles, lambda_cost):
        monkeypatch.setattr(module, 'CHUNK_COEFFICIENTS', limit)
    with torch.no_grad():
        position_lambda(*operands(problem), stride=problem.stride, form='tiled')
    _, elements, _, tiles = lambda_cost.tiled_work(problem)
    assert tiles == len(tables) + len(coefficients)
    assert elements == pytest.approx(sum(tables) + sum(coefficients), rel=0.1)


def test_estimate():
    """Each amount at its rate, calls in microseconds each."""
    problem, (products, elements, calls) = PROBLEMS[0], lambda_cost.dense_work(PROBLEMS[0])
    rates = lambda_cost.RATES[True]['dense']
    expected = 1e-6 * (products * rates[0] + elements * rates[1]) + calls * rates[2]
    assert estimate('dense', problem, True) == pytest.approx(expected)


class TestChoice:
    @pytest.mark.parametrize(('stride', 'dilation'), [(1, 1), (3, 1), (1, 2)])
    @pytest.mark.parametrize('cheapest', FORMS)
    def test_least_estimate(self, monkeypatch, cheapest, stride, dilation):
        """Of the problem as it is, whose samples are the phases of a dilation."""
        problem, asked = Problem(2, 4, 3, 2, 1, (6, 5), (3, 7), stride), []

        def estimate(form, problem, backward):
            asked.append((problem, backward))
            return form != cheapest

        monkeypatch.setattr(lambdas, 'estimate', estimate)
        query, value, table = operands(problem, dilation)
        assert choose_form(query, value, table.requires_grad_(), stride, dilation) == cheapest
        with torch.no_grad():
            assert choose_form(query, value, table, stride, dilation) == cheapest
        problem = problem._replace(batch=2 * dilation**2)
        assert set(asked) == {(problem, True), (problem, False)}

    def test_dense_tables_stay_small(self, monkeypatch):
        monkeypatch.setattr(lambdas, 'estimate', lambda form, *_: form != 'dense')
        assert choose_form(*operands(Problem(1, 1, 1, 1, 1, (1, DENSE_MAX_POSITIONS), (3, 3)))) == 'dense'
        assert choose_form(*operands(Problem(1, 1, 1, 1, 1, (1, DENSE_MAX_POSITIONS + 1), (3, 3)))) != 'dense'

    def test_lambdas_stay_few(self, monkeypatch):
        monkeypatch.setattr(lambdas, 'estimate', lambda form, *_: form != 'conv')
        problem = Problem(2, 1, 3, 5, 1, (20, 30), (3, 3))
        monkeypatch.setattr(lambda_cost, 'CONV_MAX_LAMBDAS', 2 * 3 * 5 * 600)
        assert choose_form(*operands(problem)) == 'conv'
        monkeypatch.setattr(lambda_cost, 'CONV_MAX_LAMBDAS', 2 * 3 * 5 * 600 - 1)
        assert choose_form(*operands(problem)) == 'tiled'

    @pytest.mark.parametrize(
        ('problem', 'backward', 'form'),
        [
            (Problem(8, 4, 16, 64, 1, (7, 7), (23, 23)), False, 'dense'),
            (Problem(8, 4, 16, 64, 1, (7, 7), (23, 23)), True, 'dense'),
            (Problem(4, 4, 16, 64, 1, (64, 64), (23, 23)), True, 'tiled'),
            (Problem(4, 4, 16, 128, 1, (32, 32), (23, 23)), False, 'tiled'),
            (Problem(1, 4, 16, 16, 1, (56, 56), (3, 3)), False, 'conv'),
            (Problem(2, 16, 8, 4, 1, (28, 28), (7, 7)), True, 'conv'),
        ],
    )
    def test_clear_cases(self, problem, backward, form):
        """Those in which one form was measured to be faster than the others by half or more."""
        query, value, table = operands(problem)
        assert choose_form(query, value.requires_grad_(backward), table) == form

    def test_stride_and_dilation(self):
        inputs = operands(Problem(1, 1, 1, 1, 1, (5, 5), (3, 3), 2))
        assert choose_form(*inputs, stride=2, dilation=2) == 'conv'

    @pytest.mark.parametrize('owner', ['compiler.is_compiling', 'jit.is_tracing'])
    def test_graphs(self, monkeypatch, owner):
        problem = Problem(8, 4, 16, 64, 1, (7, 7), (23, 23))
        assert choose_form(*operands(problem)) == 'dense'
        monkeypatch.setattr(f'torch.{owner}', lambda: True)
        assert choose_form(*operands(problem)) == 'conv'


class TestTile:
    @pytest.mark.parametrize(
        ('size', 'stride', 'tile'),
        [
            ((14, 14), 1, (4, 14)),
            ((15, 15), 1, (4, 8)),
            ((28, 28), 1, (4, 10)),
            ((56, 64), 1, (4, 10)),
            ((56, 28), 2, (4, 14)),
            ((1, 56), 1, (1, 56)),
            ((1, 81), 1, (1, 27)),
            ((2, 3), 1, (2, 3)),
        ],
    )
    def test_shares(self, size, stride, tile):
        assert choose_tile(size, stride) == tile
