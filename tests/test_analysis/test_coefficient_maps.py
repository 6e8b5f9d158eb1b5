"""The weights of positions against the operators, and against numbers computed by hand."""

import pytest
import torch
import torch.nn.functional as F

from mmkron.analysis import position_weights
from mmkron.layers import KroneckerAttention2d

MODES = ['dense', 'pooled', 'kv', 'qkv']


def tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize('norm', ['softmax', 'bn'])
@pytest.mark.parametrize('context_shape', [None, (4, 9)], ids=['self', 'cross'])
@pytest.mark.parametrize('mode', MODES)
def test_weighted_sum_is_the_output(mode, context_shape, norm):
    """The weighted sum is the output at every position of an odd map that is not square."""
    layer = KroneckerAttention2d(3, mode, maps='qk', norm=norm).double().eval()
    x = tensor(2, 3, 5, 7)
    context = x if context_shape is None else tensor(2, 3, *context_shape, seed=1)
    output = layer(x, context)
    coefficients = layer.coefficients(x, context)
    values = F.max_pool2d(context, 2, ceil_mode=True) if mode == 'pooled' else context
    for i in range(5):
        for j in range(7):
            weights = position_weights(coefficients, mode, (5, 7), (i, j), context_shape)
            queries = 2 if mode == 'qkv' else 1
            assert weights.rows.shape == (2, queries, values.shape[2])
            assert weights.columns.shape == (2, queries, values.shape[3])
            weighted = torch.einsum('byx,bcyx->bc', weights.positions, values)
            torch.testing.assert_close(weighted, output[:, :, i, j], rtol=1e-12, atol=1e-12)
            if norm == 'softmax':
                assert weights.positions.sum((1, 2)).tolist() == pytest.approx([queries] * 2)
                parts = (weights.rows.sum(2), weights.columns.sum(2))
                if mode in ('kv', 'qkv'):  # one softmax over both
                    assert sum(parts).flatten().tolist() == pytest.approx([1] * 2 * queries)
                else:  # two sums over the same weights
                    assert torch.cat(parts).flatten().tolist() == pytest.approx([1] * 4)


def test_values_of_kv():
    """In a map of 2 x 3, position (1, 0) is query 3."""
    coefficients = torch.zeros(1, 5, 6)
    coefficients[0, :, 3] = torch.tensor([0.2, 0.4, 0.0, 0.1, 0.3])
    weights = position_weights(coefficients, 'kv', (2, 3), (1, 0))
    torch.testing.assert_close(weights.columns, torch.tensor([[[0.2, 0.4, 0.0]]]))
    torch.testing.assert_close(weights.rows, torch.tensor([[[0.1, 0.3]]]))
    top = [0.1 + 0.1 / 3, 0.2 + 0.1 / 3, 0.1 / 3]
    torch.testing.assert_close(weights.positions, torch.tensor([[top, [x + 0.2 / 3 for x in top]]]))


def test_values_of_qkv():
    """In a map of 2 x 3, position (1, 0) has the queries 3 + 1, of row 1, and 0, of column 0."""
    coefficients = torch.zeros(1, 5, 5)
    coefficients[0, :, 4] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    coefficients[0, :, 0] = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])
    weights = position_weights(coefficients, 'qkv', (2, 3), (1, 0))
    assert weights.columns.tolist() == [[[0, 1, 0], [0, 0, 0]]]
    assert weights.rows.tolist() == [[[0, 0], [1, 0]]]
    third = 1 / 3
    torch.testing.assert_close(
        weights.positions, torch.tensor([[[third, 0.5 + third, third], [0.0, 0.5, 0.0]]], dtype=torch.float32)
    )


def test_values_of_dense():
    coefficients = torch.zeros(1, 6, 6)
    coefficients[0, :, 3] = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    weights = position_weights(coefficients, 'dense', (2, 3), (1, 0))
    assert weights.positions.tolist() == [[[0, 0.25, 0], [0.5, 0.25, 0]]]
    assert weights.rows.tolist() == [[[0.25, 0.75]]]
    assert weights.columns.tolist() == [[[0.5, 0.5, 0]]]
