"""The four attention operators against their definitions: values, gradients, statistics and precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkron.ops import (
    CoefficientBN,
    attend,
    axis_means,
    dense_attention,
    kronecker_attention_kv,
    kronecker_attention_qkv,
    outer_sum,
    pooled_attention,
)
from mmkron.ops.column_attention import CHUNK_COEFFICIENTS, TILED_MIN_KEYS, attend_plain, coefficient_moments
from support.definitions import map_attention
from support.errors import raises

OPERATORS = {
    'dense': dense_attention,
    'pooled': pooled_attention,
    'kv': kronecker_attention_kv,
    'qkv': kronecker_attention_qkv,
}
NORMS = ['softmax', 'bn_softmax', 'bn']


def maps(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize('kind', OPERATORS)
class TestOperators:
    @pytest.mark.parametrize('norm', NORMS)
    @pytest.mark.parametrize('channels', [2, 9], ids=['few channels', 'many channels'])
    def test_feature(self, kind, norm, channels):
        x = maps(3, channels, 5, 7)
        expected = map_attention(kind, x, x, x, norm, scale=0.6)
        torch.testing.assert_close(OPERATORS[kind](x, norm=norm, scale=0.6), expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize('norm', NORMS)
    @pytest.mark.parametrize('size', [(4, 7), (1, 1), (1, 6), (6, 1)])
    def test_feature_cross(self, kind, norm, size):
        query, key, value = maps(2, 3, *size), maps(2, 3, 9, 5, seed=1), maps(2, 5, 9, 5, seed=2)
        expected = map_attention(kind, query, key, value, norm)
        torch.testing.assert_close(OPERATORS[kind](query, key, value, norm=norm), expected, rtol=1e-9, atol=1e-9)

    def test_feature_large(self, kind):
        """Dense and pooled attention take the tiled form on large maps, with and without a graph."""
        x = maps(1, 3, 64, 66)
        assert x[0, 0].numel() / 4 >= TILED_MIN_KEYS
        expected = map_attention(kind, x, x, x)
        with torch.no_grad():
            torch.testing.assert_close(OPERATORS[kind](x), expected, rtol=1e-9, atol=1e-9)
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(OPERATORS[kind](leaf).detach(), expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize('norm', NORMS)
    def test_gradcheck(self, kind, norm):
        query, key, value = maps(2, 2, 3, 4), maps(2, 2, 4, 3, seed=1), maps(2, 3, 4, 3, seed=2)
        for x in (query, key, value):
            x.requires_grad_()
        assert torch.autograd.gradcheck(lambda q, k, v: OPERATORS[kind](q, k, v, norm=norm), (query, key, value))

    def test_dynamo(self, kind):
        x = maps(2, 3, 5, 6)
        compiled = torch.compile(OPERATORS[kind], backend='aot_eager', fullgraph=True)
        torch.testing.assert_close(compiled(x, norm='bn_softmax'), OPERATORS[kind](x, norm='bn_softmax'))

    def test_function_transforms(self, kind):
        """vmap, forward-mode and reverse-mode derivatives agree with a loop and with each other."""
        x, tangent = maps(3, 2, 2, 4, 5), maps(2, 2, 4, 5, seed=1)
        mapped = torch.func.vmap(OPERATORS[kind])(x)
        torch.testing.assert_close(mapped, torch.stack([OPERATORS[kind](sample) for sample in x]))
        _, forward = torch.func.jvp(OPERATORS[kind], (x[0],), (tangent,))
        _, pull = torch.func.vjp(OPERATORS[kind], x[0])
        cotangent = maps(2, 2, 4, 5, seed=2)
        torch.testing.assert_close((forward * cotangent).sum(), (tangent * pull(cotangent)[0]).sum())


@pytest.mark.parametrize('key', [maps(4, 3, 6), maps(2, 3, 6).to('meta')])
@pytest.mark.parametrize('grad', [True, False])
def test_columns_are_checked(key, grad):
    """The products in place would read the first samples of a larger batch, or the address of another device."""
    with torch.set_grad_enabled(grad), raises(ValueError, 'key'):
        attend(maps(2, 3, 5), key, maps(2, 4, 6))


@pytest.mark.parametrize('batch', [1, 5])
def test_chunks(batch):
    """Without a graph, large batches are split: here into chunks of 2."""
    x = maps(batch, 3, 50, 45)
    assert 2 <= CHUNK_COEFFICIENTS / (50 * 45 * 95) < 3
    with torch.no_grad():
        out = kronecker_attention_kv(x)
    torch.testing.assert_close(out, map_attention('kv', x, x, x), rtol=1e-9, atol=1e-9)


class TestKnownAnswers:
    def test_constant_map(self):
        """Equal keys give the mean value; QKV adds two such terms."""
        x = torch.full((2, 3, 4, 6), 0.7, dtype=torch.float64)
        torch.testing.assert_close(kronecker_attention_kv(x), x)
        torch.testing.assert_close(kronecker_attention_qkv(x), 2 * x)
        torch.testing.assert_close(dense_attention(x), x)

    def test_kv_of_rank_one_plus_constant(self):
        """The means of x[i, j] = a_i b_j + t are mean(a) b_j + t and mean(b) a_i + t, in closed form."""
        a = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
        b = torch.tensor([0.3, 0.9, -1.1, 0.4], dtype=torch.float64)
        shift = 0.25
        x = (a[:, None] * b + shift)[None, None]
        keys = [float(a.mean()) * float(v) + shift for v in b] + [float(b.mean()) * float(v) + shift for v in a]
        out = kronecker_attention_kv(x)
        for i in range(3):
            for j in range(4):
                query = float(a[i] * b[j]) + shift
                weights = [math.exp(query * key) for key in keys]
                expected = sum(w * key for w, key in zip(weights, keys)) / sum(weights)
                assert out[0, 0, i, j].item() == pytest.approx(expected, abs=1e-12)

    def test_bn_of_equal_coefficients_is_zero(self):
        x = torch.ones(2, 3, 4, 6, dtype=torch.float64)
        torch.testing.assert_close(kronecker_attention_kv(x, norm='bn'), torch.zeros_like(x))

    def test_axis_means_order(self):
        x = torch.arange(6.0).view(1, 1, 2, 3)
        assert axis_means(x).flatten().tolist() == [1.5, 2.5, 3.5, 1.0, 4.0]
        assert outer_sum(axis_means(x), (2, 3))[0, 0].tolist() == [[2.5, 3.5, 4.5], [5.5, 6.5, 7.5]]


class TestCoefficientBN:
    """Tests of the forms that never build the coefficients."""

    def state(self, training=True):
        tensors = (torch.tensor([v], dtype=torch.float64) for v in (1.7, -0.4, 0.2, 0.9))
        return CoefficientBN(*tensors, training)

    @pytest.mark.parametrize('norm', ['bn_softmax', 'bn'])
    @pytest.mark.parametrize('training', [True, False])
    @pytest.mark.parametrize('keys', [3, 40])
    def test_equals_plain(self, norm, training, keys):
        query, key, value = (maps(3, c, n, seed=s) for s, (c, n) in enumerate([(4, 30), (4, keys), (5, keys)]))
        key = key + 2  # the mean of the coefficients must differ between the queries
        states = [self.state(training) for _ in range(2)]
        leaves = [t.requires_grad_() for t in (query, key, value)]
        results = []
        for form, state in zip((attend, attend_plain), states):
            params = [state.weight.requires_grad_()] + ([state.bias.requires_grad_()] if norm == 'bn' else [])
            out = form(query, key, value, norm, 0.8, state)
            results.append([out, *torch.autograd.grad(out.pow(2).sum(), leaves + params)])
        for ours, plain in zip(*results):
            torch.testing.assert_close(ours, plain, rtol=1e-8, atol=1e-8)
        for name in ('running_mean', 'running_var'):
            torch.testing.assert_close(getattr(states[0], name), getattr(states[1], name))
        assert (states[0].running_mean.item() == 0.2) is (not training)

    @settings(max_examples=40, deadline=None)
    @given(
        st.integers(1, 3),
        st.integers(1, 5),
        st.integers(2, 9),
        st.integers(2, 9),
        st.integers(0, 1000),
        st.floats(-3, 3),
    )
    def test_moments(self, batch, channels, queries, keys, seed, shift):
        query, key = (
            maps(batch, channels, queries, seed=seed) + shift,
            maps(batch, channels, keys, seed=seed + 1) - shift,
        )
        coefficients = 0.7 * key.mT @ query
        mean, var = coefficient_moments(query, key, 0.7)
        torch.testing.assert_close(mean, coefficients.mean().view(1))
        torch.testing.assert_close(var, coefficients.var(unbiased=False).view(1))

    def test_moments_do_not_cancel(self):
        """Float32 moments keep a variance that a difference of squares would lose."""
        key = maps(2, 8, 300, seed=1, dtype=torch.float32) * 1e-2 + 1
        query = maps(2, 8, 500, seed=2, dtype=torch.float32) * 1e-2 + 100
        exact = (key.double().mT @ query.double()).var(unbiased=False)
        _, var = coefficient_moments(query, key)
        assert var.item() == pytest.approx(exact.item(), rel=1e-4)

    def test_running_statistics_equal_torch(self):
        """Buffers after a step equal those of nn.BatchNorm2d(1) on the coefficients, on both paths."""
        for channels in (2, 30):
            x = maps(2, channels, 6, 5, seed=channels)
            reference = torch.nn.BatchNorm2d(1).double()
            reference((axis_means(x).mT @ x.flatten(2))[:, None])
            state = CoefficientBN(None, None, *(t.double() for t in (torch.zeros(1), torch.ones(1))))
            kronecker_attention_kv(x, norm='bn_softmax', bn=state)
            torch.testing.assert_close(state.running_mean, reference.running_mean)
            torch.testing.assert_close(state.running_var, reference.running_var)

    @pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize('training', [True, False])
    @pytest.mark.parametrize('attention', [dense_attention, kronecker_attention_kv])
    @pytest.mark.parametrize('channels', [4, 40])
    def test_half_precision_keeps_the_gain(self, dtype, training, attention, channels):
        """Neither coefficients near 1e7 nor the small gain that normalizes them fit into float16."""
        x = (1000 * (maps(2, channels, 9, 9) + maps(2, channels, 1, 1, seed=1))).to(dtype)
        coefficients = x.double().flatten(2).mT @ x.double().flatten(2)
        stats = [value.view(1).float() for value in (coefficients.mean(), coefficients.var())]
        exact = [value.double() for value in stats]
        expected = attention(x.double(), norm='bn_softmax', bn=CoefficientBN(None, None, *exact, training))
        plain = attention(x, norm='bn_softmax', bn=CoefficientBN(None, None, *stats, training))
        with torch.autocast('cpu', dtype=dtype):
            cast = attention(x.float(), norm='bn_softmax', bn=CoefficientBN(None, None, *stats, training))
        for out in (plain, cast):
            assert (out.double() - expected).abs().max() < 0.05 * expected.abs().max()
