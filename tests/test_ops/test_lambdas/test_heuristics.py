"""Estimated times of the forms of the position lambda, and the choice between them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmkron.ops.lambdas import heuristics
from mmkron.ops.lambdas.heuristics import DENSE_MAX_POSITIONS, WORK, Problem
from mmkron.ops.lambdas.position import FORMS, choose_form, position_lambda
from mmkron.ops.lambdas.tiled import choose_tile

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
    """The estimate equals the count of torch's counter."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        position_lambda(*operands(problem), stride=problem.stride, form=form)
    work = WORK[form](problem)
    assert counter.get_total_flops() == 2 * (work.macs + work.slow_macs)


class TestChoice:
    @pytest.mark.parametrize(('stride', 'dilation'), [(1, 1), (3, 1), (1, 2)])
    @pytest.mark.parametrize('cheapest', FORMS)
    def test_least_estimate(self, monkeypatch, cheapest, stride, dilation):
        """The form with the least estimate is chosen; the phases of a dilation count as samples."""
        problem, seen = Problem(2, 4, 3, 2, 1, (6, 5), (3, 7), stride), []

        def estimate(form, problem, backward):
            seen.append((problem, backward))
            return form != cheapest

        monkeypatch.setattr(heuristics, 'estimate', estimate)
        query, value, table = operands(problem, dilation)
        assert choose_form(query, value, table.requires_grad_(), stride, dilation) == cheapest
        with torch.no_grad():
            assert choose_form(query, value, table, stride, dilation) == cheapest
        problem = problem._replace(batch=2 * dilation**2)
        assert set(seen) == {(problem, True), (problem, False)}

    def test_dense_tables_stay_small(self, monkeypatch):
        monkeypatch.setattr(heuristics, 'estimate', lambda form, *_: form != 'dense')
        assert choose_form(*operands(Problem(1, 1, 1, 1, 1, (1, DENSE_MAX_POSITIONS), (3, 3)))) == 'dense'
        assert choose_form(*operands(Problem(1, 1, 1, 1, 1, (1, DENSE_MAX_POSITIONS + 1), (3, 3)))) != 'dense'

    def test_lambdas_stay_few(self, monkeypatch):
        monkeypatch.setattr(heuristics, 'estimate', lambda form, *_: form != 'conv')
        problem = Problem(2, 1, 3, 5, 1, (20, 30), (3, 3))
        monkeypatch.setattr(heuristics, 'CONV_MAX_LAMBDAS', 2 * 3 * 5 * 600)
        assert choose_form(*operands(problem)) == 'conv'
        monkeypatch.setattr(heuristics, 'CONV_MAX_LAMBDAS', 2 * 3 * 5 * 600 - 1)
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
        """Problems in which one form was measured to be at least 1.5 times as fast as the others."""
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


@pytest.mark.parametrize(
    ('size', 'stride', 'tile'),
    [((14, 14), 1, (4, 14)), ((15, 15), 1, (4, 8)), ((56, 28), 2, (4, 14)), ((1, 81), 1, (1, 27)), ((2, 3), 1, (2, 3))],
)
def test_tiles_share_the_map_evenly(size, stride, tile):
    assert choose_tile(size, stride) == tile
