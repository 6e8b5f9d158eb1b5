"""Half precision: large operands give the same results as float64, without an overflow on the way."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmkron import ops
from mmkron.layers import KroneckerAttention2d
from mmkron.ops import lif
from mmkron.ops.column_attention import NORMS, TILED_MIN_KEYS, attend_plain
from mmkron.ops.neurons.norm_lif import norm_lif

HALVES = [torch.float16, torch.bfloat16]
MAPS = {
    'dense': ops.dense_attention,
    'pooled': ops.pooled_attention,
    'kv': ops.kronecker_attention_kv,
    'qkv': ops.kronecker_attention_qkv,
}


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differentiate(function, operands, dtype, autocast=None):
    """Return the output, the output without a graph, and the gradients of all operands, in float64."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in operands]
    with torch.autocast('cpu', autocast, enabled=autocast is not None):
        out = function(*leaves)
        with torch.no_grad():
            graphless = function(*leaves)
    cotangent = normal(*out.shape, seed=9, scale=0.05).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, cotangent)
    assert {out.dtype, graphless.dtype, *(g.dtype for g in grads)} == {dtype}
    return [x.detach().double() for x in (out, graphless, *grads)]


def check(function, operands, dtype, tolerance):
    """Compare half precision, and float32 under autocast, with float64."""
    operands = [x.to(dtype).double() for x in operands]
    expected = differentiate(function, operands, torch.float64)
    limits = torch.finfo(dtype)
    assert all(x.abs().max() < limits.max for x in expected)
    for outs in (differentiate(function, operands, dtype), differentiate(function, operands, torch.float32, dtype)):
        for out, other in zip(outs, expected):
            assert out.isfinite().all()
            assert (out - other).abs().max() <= tolerance * other.abs().max() + limits.smallest_normal


def tolerance(dtype):
    """Return the relative error of a few roundings."""
    return 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('kind', MAPS)
class TestKronecker:
    @pytest.mark.parametrize(
        ('shape', 'scale'), [((1, 640, 6, 6), 12.0), ((2, 32, 12, 13), 1.0), ((1, 16, 30, 29), 12.0)]
    )
    def test_large_operands(self, kind, norm, dtype, shape, scale):
        """Coefficients of up to 92,160, and coefficients with small differences, with and without tiles."""
        query, key, value = (normal(*shape, seed=seed, scale=scale) for seed in range(3))
        key = 0.7 * query + 0.3 * key  # makes the coefficients large
        check(lambda q, k, v: MAPS[kind](q, k, v, norm=norm), (query, key, value), dtype, tolerance(dtype))

    def test_scale(self, kind, norm, dtype):
        """Scaled keys may leave the range of half precision as long as the coefficients do not."""
        query, key, value = (normal(2, 8, 7, 9, seed=seed) for seed in range(3))
        for factor in (1e-6, 1e5):
            operands = (query / math.sqrt(factor), key / math.sqrt(factor), value)
            check(lambda q, k, v, s=factor: MAPS[kind](q, k, v, norm=norm, scale=s), operands, dtype, tolerance(dtype))


@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('scale', [1.0, 0.05, -0.05])
@pytest.mark.parametrize('backend', [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_forms_of_torchs_attention(dtype, scale, backend):
    """Every form that torch may choose has the coefficients in float32."""
    operands = [normal(1, 40, n, seed=seed, scale=20) for seed, n in enumerate((50, TILED_MIN_KEYS, TILED_MIN_KEYS))]
    operands[1][..., :50] = operands[0]
    operands = [x.to(dtype) for x in operands]
    with sdpa_kernel(backend):
        out = ops.attend(*operands, scale=scale)
    expected = attend_plain(*(x.double() for x in operands), scale=scale)
    assert (out.double() - expected).abs().max() <= tolerance(dtype) * expected.abs().max()


@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('mode', MAPS)
@pytest.mark.parametrize('maps', ['', 'qkv'])
def test_layer(dtype, norm, mode, maps):
    """A training step of a cast layer is close to float64's."""
    torch.manual_seed(0)
    layer = KroneckerAttention2d(24, mode, maps, norm=norm, residual=True)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.2, 0.1)
    layer = layer.to(dtype).train()
    reference = KroneckerAttention2d(24, mode, maps, norm=norm, residual=True).double().train()
    reference.load_state_dict(layer.state_dict())
    leaves = [normal(2, 24, 9, 8, scale=3).to(dtype).to(cast).requires_grad_() for cast in (dtype, torch.float64)]
    results = []
    for model, x in zip((layer, reference), leaves):
        out = model(x)
        grads = torch.autograd.grad(out.square().mean(), [x, *model.parameters()])
        assert {out.dtype, *(g.dtype for g in grads)} == {x.dtype}
        results.append([y.detach().double() for y in (out, *grads)])
    # Mapped columns are rounded before they are multiplied, as in any model of half precision.
    assert all(y.isfinite().all() for y in results[0])
    if 'q' not in maps:
        error = (results[0][0] - results[1][0]).abs().max()
        assert error <= 2 * tolerance(dtype) * results[1][0].abs().max()


@pytest.mark.parametrize('dtype', HALVES)
class TestLambdas:
    def test_content(self, dtype):
        """Keys may be far apart, and thousands of large values may be summed."""
        query, value = normal(1, 2, 4, 9, 9), normal(1, 2, 3, 40, 50, seed=2, scale=500) + 400
        for scale in (0.1, 30):
            key = normal(1, 2, 4, 40, 50, seed=1, scale=scale)
            check(ops.content_lambda, (query, key, value), dtype, 4 * tolerance(dtype))

    @pytest.mark.parametrize('form', [None, *('conv', 'dense', 'tiled')])
    def test_position(self, dtype, form):
        """Lambdas may exceed the range of float16 if outputs and gradients do not."""
        operands = normal(2, 2, 4, 8, 9, scale=0.02), normal(2, 1, 3, 8, 9, seed=1, scale=4000)
        operands = (*operands, normal(1, 4, 7, 7, seed=2, scale=5), normal(2, 4, 3, seed=3, scale=1000))
        check(lambda *x: ops.position_lambda(*x, form=form), operands, dtype, 4 * tolerance(dtype))


@pytest.mark.parametrize('dtype', HALVES)
class TestSpiking:
    def test_norm_lif(self, dtype):
        """Statistics of maps far from zero are exact; spikes differ only at the threshold."""
        x = (normal(4 * 3, 5, 20, 21, scale=300) + 900).to(dtype)
        weight, bias = normal(5, seed=1).abs() + 1, normal(5, seed=2)
        results = []
        for cast in (dtype, torch.float64):
            mean, var = (torch.zeros(5, dtype=torch.promote_types(cast, torch.float32)) for _ in range(2))
            leaf = x.to(cast).requires_grad_()
            out = norm_lif(leaf, 4, weight.to(mean.dtype), bias.to(mean.dtype), mean, var, momentum=1.0)
            (grad,) = torch.autograd.grad(out.sum(), leaf)
            results.append([y.detach().double() for y in (out, mean, var, grad)])
        ours, expected = results
        assert 0.1 < expected[0].mean() < 0.9
        assert (ours[0] != expected[0]).double().mean() < tolerance(dtype)
        torch.testing.assert_close(ours[1:3], expected[1:3], rtol=1e-5, atol=0)
        assert ours[3].isfinite().all()
        same = (ours[0] == expected[0]).all(0).expand_as(ours[0]).flatten(0, 1)
        error = (ours[3] - expected[3])[same].abs().max()
        assert error <= 16 * torch.finfo(dtype).eps * expected[3].abs().max()

    def test_lif(self, dtype):
        """Currents may be as large as the range of float16."""
        x = normal(4, 300, scale=15000).to(dtype)
        for settings in (dict(v_threshold=9000.0), dict(v_threshold=9000.0, v_reset=None, decay_input=False)):
            assert torch.equal(lif(x, **settings).double(), lif(x.double(), **settings))

    @pytest.mark.parametrize('function', [ops.token_qk_attention, ops.channel_qk_attention])
    def test_counts(self, dtype, function):
        """Sums of 3,000 spikes are not rounded."""
        shape = (2, 1, 3000, 2) if function is ops.token_qk_attention else (2, 1, 2, 3000)
        q, k = ((normal(*shape, seed=seed) > -1.5).to(dtype) for seed in range(2))
        counts = q.double().sum(3 - (function is ops.token_qk_attention)).flatten()
        threshold = counts[: len(counts) // 2].sort().values[0].item() / 2 + 0.25
        out = function(q, k, 1, v_threshold=threshold)
        expected = function(q.double(), k.double(), 1, v_threshold=threshold)
        assert 0 < expected.mean() < 1
        assert torch.equal(out.double(), expected)


def test_means_of_half_precision():
    """Means of numbers near the limit of float16 do not overflow."""
    x = torch.full((1, 1, 400, 400), 60000.0, dtype=torch.float16)
    assert (ops.axis_means(x) == 60000).all()
    assert ops.axis_means(x).dtype == torch.float16
    assert F.mse_loss(ops.axis_means(normal(2, 3, 9, 8).half()).double(), ops.axis_means(normal(2, 3, 9, 8))) < 1e-6
