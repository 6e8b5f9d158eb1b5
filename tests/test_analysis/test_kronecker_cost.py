"""Closed-form costs against the published savings and MMEngine's counts of the operators."""

import pytest
import torch
from mmengine.analysis import FlopAnalyzer

from mmkron.analysis import attention_cost
from mmkron.layers import KroneckerAttention2d

MODES = ['dense', 'pooled', 'kv', 'qkv']


@pytest.mark.parametrize(('mode', 'saved'), [('kv', 96.18), ('qkv', 99.73)])
def test_memory_saved_in_the_paper(mode, saved):
    """The paper's figures are for a batch of 8 maps of 8 channels and 56 x 56 positions."""
    dense = attention_cost('dense', (56, 56), 8, batch=8).held
    assert round(100 * (1 - attention_cost(mode, (56, 56), 8, batch=8).held / dense), 2) == saved


@pytest.mark.parametrize(
    ('size', 'madds'),
    [
        (56, (1258.8, 314.7, 44.96, 1.606)),
        (28, (78.68, 19.67, 5.620, 0.4014)),
        (14, (4.917, 1.229, 0.7025, 0.1004)),
    ],
)
def test_madds(size, madds):
    """Multiply-adds are in millions, for the paper's eight channels."""
    for mode, expected in zip(MODES, madds):
        assert attention_cost(mode, (size, size), 8, batch=8).madds / 1e6 == pytest.approx(expected, rel=5e-4)


@pytest.mark.parametrize('mode', MODES)
def test_equals_the_traced_count(mode):
    layer = KroneckerAttention2d(4, mode=mode, maps='v', out_channels=6, context_channels=4).eval()
    x, context = torch.randn(3, 4, 9, 6), torch.randn(3, 4, 5, 7)
    with torch.no_grad():
        analyzer = FlopAnalyzer(layer, (x, context)).unsupported_ops_warnings(False)
        assert analyzer.by_operator()['bmm'] == attention_cost(mode, (9, 6), 4, 6, (5, 7), batch=3).madds
