"""The four attention operators: values against the definitions, gradients, misuse."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkron.ops import (
    CoefficientBN,
    attend,
    attention_coefficients,
    axis_means,
    dense_attention,
    kronecker_attention_kv,
    kronecker_attention_qkv,
    outer_sum,
    pool_context,
    pooled_attention,
)
from mmkron.ops.column_attention import CHUNK_COEFFICIENTS, TILED_MIN_KEYS, attend_plain, coefficient_moments
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


def numpy_columns(x, kind):
    """Columns of one sample (C, H, W) for a kind of reduction, written from the definitions."""
    channels, height, width = x.shape
    if kind == 'all':
        return np.stack([x[:, i, j] for i in range(height) for j in range(width)], 1)
    if kind == 'means':
        rows = [x[:, :, j].sum(1) / height for j in range(width)]
        return np.stack(rows + [x[:, i, :].sum(1) / width for i in range(height)], 1)
    windows = [x[:, i : i + 2, j : j + 2] for i in range(0, height, 2) for j in range(0, width, 2)]
    return np.stack([w.reshape(channels, -1).max(1) for w in windows], 1)


def numpy_attention(kind, query, key, value, norm='softmax', scale=1.0, eps=1e-5):
    """Any of the operators in float64 NumPy: all samples first, because batch norm looks at all of them."""
    reduce_query, reduce_context = {
        'dense': ('all', 'all'),
        'pooled': ('all', 'pooled'),
        'kv': ('all', 'means'),
        'qkv': ('means', 'means'),
    }[kind]
    query, key, value = (x.numpy().astype(np.float64) for x in (query, key, value))
    columns = [numpy_columns(x, reduce_query) for x in query]
    energies = np.stack([scale * numpy_columns(k, reduce_context).T @ q for k, q in zip(key, columns)])
    if norm != 'softmax':
        energies = (energies - energies.mean()) / np.sqrt(((energies - energies.mean()) ** 2).mean() + eps)
    if norm != 'bn':
        energies = np.exp(energies - energies.max(1, keepdims=True))
        energies /= energies.sum(1, keepdims=True)
    out = np.stack([numpy_columns(v, reduce_context) @ e for v, e in zip(value, energies)])
    height, width = query.shape[2:]
    if kind != 'qkv':
        return torch.from_numpy(out.reshape(*out.shape[:2], height, width))
    full = np.empty((*out.shape[:2], height, width))
    for i in range(height):
        for j in range(width):
            full[:, :, i, j] = out[:, :, j] + out[:, :, width + i]
    return torch.from_numpy(full)


@pytest.mark.parametrize('kind', OPERATORS)
class TestOperators:
    @pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
    def test_smoke(self, kind, dtype):
        out = OPERATORS[kind](maps(2, 3, 5, 7, dtype=dtype))
        assert out.dtype == dtype
        assert out.isfinite().all()

    def test_exception(self, kind):
        attention, x = OPERATORS[kind], maps(2, 3, 4, 5)
        for inputs, error, argument, value in (
            ([[1.0]], TypeError, 'query', 'list'),
            ([x, x.long(), x], TypeError, 'key', torch.int64),
            ([x[0]], ValueError, 'query', (3, 4, 5)),
            ([x[:, :, :0]], ValueError, 'query', (2, 3, 0, 5)),
            ([x, x[:, :2], x], ValueError, 'key', (2, 2, 4, 5)),
            ([x, x, x[:1]], ValueError, 'value', (1, 3, 4, 5)),
            ([x, x.float(), x], TypeError, 'key', torch.float32),
            ([x, x, x[..., :3]], ValueError, 'value', (2, 3, 4, 3)),
            ([x, None, None, 'sigmoid'], ValueError, 'norm', 'sigmoid'),
        ):
            with raises(error, argument, value):
                attention(*inputs)

    @pytest.mark.parametrize('size', [(1, 1), (1, 6), (6, 1), (5, 8), (7, 7)])
    @pytest.mark.parametrize('batch', [1, 3])
    def test_cardinality(self, kind, size, batch):
        x, context = maps(batch, 4, *size), maps(batch, 4, 3, 2)
        assert OPERATORS[kind](x).shape == x.shape
        assert OPERATORS[kind](x, context, maps(batch, 6, 3, 2)).shape == (batch, 6, *size)

    @pytest.mark.parametrize('norm', NORMS)
    @pytest.mark.parametrize('channels', [2, 9], ids=['few channels', 'many channels'])
    def test_feature(self, kind, norm, channels):
        x = maps(3, channels, 5, 7)
        expected = numpy_attention(kind, x, x, x, norm, scale=0.6)
        torch.testing.assert_close(OPERATORS[kind](x, norm=norm, scale=0.6), expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize('norm', NORMS)
    def test_feature_cross(self, kind, norm):
        query, key, value = maps(2, 3, 4, 7), maps(2, 3, 9, 5, seed=1), maps(2, 5, 9, 5, seed=2)
        expected = numpy_attention(kind, query, key, value, norm)
        torch.testing.assert_close(OPERATORS[kind](query, key, value, norm=norm), expected, rtol=1e-9, atol=1e-9)

    def test_feature_large(self, kind):
        """A map so large that dense and pooled attention take the tiled form; values with and without a graph."""
        x = maps(1, 3, 64, 66)
        assert x[0, 0].numel() / 4 >= TILED_MIN_KEYS
        expected = numpy_attention(kind, x, x, x)
        with torch.no_grad():
            torch.testing.assert_close(OPERATORS[kind](x), expected, rtol=1e-9, atol=1e-9)
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(OPERATORS[kind](leaf).detach(), expected, rtol=1e-9, atol=1e-9)

    def test_memory_formats(self, kind):
        x = maps(2, 3, 6, 8)
        for other in (x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT, x[:1].expand(2, 3, 6, 8)):
            torch.testing.assert_close(OPERATORS[kind](other), OPERATORS[kind](other.contiguous()))

    @pytest.mark.parametrize('norm', NORMS)
    def test_gradcheck(self, kind, norm):
        query, key, value = maps(2, 2, 3, 4), maps(2, 2, 4, 3, seed=1), maps(2, 3, 4, 3, seed=2)
        for x in (query, key, value):
            x.requires_grad_()
        assert torch.autograd.gradcheck(lambda q, k, v: OPERATORS[kind](q, k, v, norm=norm), (query, key, value))

    @pytest.mark.parametrize('norm', NORMS)
    def test_dynamo(self, kind, norm):
        x = maps(2, 3, 5, 6)
        compiled = torch.compile(OPERATORS[kind], backend='aot_eager', fullgraph=True)
        torch.testing.assert_close(compiled(x, norm=norm), OPERATORS[kind](x, norm=norm))

    def test_function_transforms(self, kind):
        """vmap, forward-mode and reverse-mode derivatives agree with a loop and with each other."""
        x, tangent = maps(3, 2, 2, 4, 5), maps(2, 2, 4, 5, seed=1)
        mapped = torch.func.vmap(OPERATORS[kind])(x)
        torch.testing.assert_close(mapped, torch.stack([OPERATORS[kind](sample) for sample in x]))
        _, forward = torch.func.jvp(OPERATORS[kind], (x[0],), (tangent,))
        _, pull = torch.func.vjp(OPERATORS[kind], x[0])
        cotangent = maps(2, 2, 4, 5, seed=2)
        torch.testing.assert_close((forward * cotangent).sum(), (tangent * pull(cotangent)[0]).sum())

    def test_input_is_left_alone(self, kind):
        x = maps(2, 3, 5, 6)
        before = x.clone()
        with torch.no_grad():
            first = OPERATORS[kind](x)
            assert torch.equal(first, OPERATORS[kind](x))
        assert torch.equal(x, before)

    def test_shift_of_all_coefficients_cancels(self, kind):
        """With softmax, adding a constant to the keys' inner products changes nothing: append a constant channel."""
        x, value = maps(1, 3, 4, 5), maps(1, 2, 4, 5, seed=1)
        ones = torch.ones(1, 1, 4, 5, dtype=torch.float64)
        shifted = OPERATORS[kind](torch.cat([x, ones], 1), torch.cat([x, 3 * ones], 1), value)
        torch.testing.assert_close(shifted, OPERATORS[kind](x, x, value))


COLUMNS = dict(query=maps(2, 3, 5), key=maps(2, 3, 6), value=maps(2, 4, 6))
BAD_COLUMNS = [
    (dict(query=[1.0]), TypeError, 'query', 'list'),
    (dict(key=maps(2, 3, 6).long()), TypeError, 'key', torch.int64),
    (dict(query=maps(2, 3, 5, 1)), ValueError, 'query', (2, 3, 5, 1)),
    (dict(query=maps(2, 3, 0)), ValueError, 'query', (2, 3, 0)),
    (dict(key=maps(2, 2, 6)), ValueError, 'key', (2, 2, 6)),
    (dict(key=maps(4, 3, 6)), ValueError, 'key', (4, 3, 6)),
    (dict(value=maps(4, 4, 6)), ValueError, 'value', (4, 4, 6)),
    (dict(value=maps(2, 4, 7)), ValueError, 'value', (2, 4, 7)),
    (dict(key=maps(2, 3, 6).to('meta')), ValueError, 'key', 'meta'),
    (dict(value=maps(2, 4, 6).to('meta')), ValueError, 'value', 'meta'),
    (dict(norm='relu'), ValueError, 'norm', 'relu'),
    (dict(norm='bn', bn=CoefficientBN(weight=torch.ones(6))), ValueError, 'weight', (6,)),
    (dict(norm='bn', bn=CoefficientBN(bias=torch.ones(()))), ValueError, 'bias', ()),
    (dict(norm='bn', bn=CoefficientBN(running_mean=torch.ones(5))), ValueError, 'running_mean', (5,)),
    (dict(norm='bn', bn=CoefficientBN(running_var=torch.ones(1, 1))), ValueError, 'running_var', (1, 1)),
]


@pytest.mark.parametrize(('change', 'error', 'argument', 'value'), BAD_COLUMNS)
def test_columns_are_checked(change, error, argument, value):
    """With and without a graph: the products in place would take the first samples of a larger batch."""
    operands = {**COLUMNS, **change}
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), raises(error, argument, value):
            attend(**operands)
    if argument != 'value':  # it takes none
        del operands['value']
        with raises(error, argument, value):
            attention_coefficients(**operands)


@pytest.mark.parametrize('function', [axis_means, pool_context])
def test_reductions_are_checked(function):
    with raises(TypeError, 'x', 'list'):
        function([1.0])
    for x in (maps(2, 3, 4), maps(2, 3, 4, 5, 6), maps(2, 3, 0, 4)):
        with raises(ValueError, 'x', tuple(x.shape)):
            function(x)


def test_outer_sum_is_checked():
    """Columns of another map's size would make a map of another height."""
    for shape in ((2, 3, 9), (2, 3, 11), (3, 10), (2, 3, 10, 1)):
        with raises(ValueError, 'y', shape):
            outer_sum(maps(*shape), (4, 6))


@pytest.mark.parametrize('batch', [1, 3, 5])
def test_chunks(batch):
    """Without a graph, large batches are taken a few samples at a time: here 2, with a rest."""
    x = maps(batch, 3, 50, 45)
    assert 2 <= CHUNK_COEFFICIENTS / (50 * 45 * 95) < 3
    with torch.no_grad():
        out = kronecker_attention_kv(x)
    torch.testing.assert_close(out, numpy_attention('kv', x, x, x), rtol=1e-9, atol=1e-9)


class TestKnownAnswers:
    def test_constant_map(self):
        """All keys alike: uniform coefficients, so the mean value; QKV adds two such terms."""
        x = torch.full((2, 3, 4, 6), 0.7, dtype=torch.float64)
        torch.testing.assert_close(kronecker_attention_kv(x), x)
        torch.testing.assert_close(kronecker_attention_qkv(x), 2 * x)
        torch.testing.assert_close(dense_attention(x), x)

    def test_kv_of_rank_one_plus_constant(self):
        """x[i, j] = a_i b_j + t, one channel: the means are mean(a) b_j + t and mean(b) a_i + t, in closed form."""
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

    def test_zero_query_averages_the_means(self):
        """Zero queries weigh all h + w means alike; each mean of means is the mean of the map."""
        value = maps(2, 3, 4, 6, seed=3)
        zero = torch.zeros_like(value)
        mean = value.mean((2, 3), keepdim=True).expand_as(value)
        torch.testing.assert_close(kronecker_attention_kv(zero, zero, value), mean)
        torch.testing.assert_close(kronecker_attention_qkv(zero, zero, value), 2 * mean)

    def test_bn_of_equal_coefficients_is_zero(self):
        x = torch.ones(2, 3, 4, 6, dtype=torch.float64)
        torch.testing.assert_close(kronecker_attention_kv(x, norm='bn'), torch.zeros_like(x))

    def test_kv_equals_dense_on_one_row(self):
        """On a single row the column part of C is the row itself and the other part its mean."""
        x = maps(1, 2, 1, 5)
        context = torch.cat([x, x.mean(3, keepdim=True)], 3)
        torch.testing.assert_close(kronecker_attention_kv(x), dense_attention(x, context, context))

    def test_axis_means_order(self):
        x = torch.arange(6.0).view(1, 1, 2, 3)
        assert axis_means(x).flatten().tolist() == [1.5, 2.5, 3.5, 1.0, 4.0]
        assert outer_sum(axis_means(x), (2, 3))[0, 0].tolist() == [[2.5, 3.5, 4.5], [5.5, 6.5, 7.5]]

    def test_transposed_map(self):
        for attention in OPERATORS.values():
            x = maps(1, 2, 4, 6)
            torch.testing.assert_close(attention(x.mT), attention(x).mT)


class TestCoefficientBN:
    """The forms without coefficients against the definition with them."""

    def state(self, training=True):
        tensors = (torch.tensor([v], dtype=torch.float64) for v in (1.7, -0.4, 0.2, 0.9))
        return CoefficientBN(*tensors, training)

    @pytest.mark.parametrize('norm', ['bn_softmax', 'bn'])
    @pytest.mark.parametrize('training', [True, False])
    @pytest.mark.parametrize('keys', [3, 40])
    def test_equals_plain(self, norm, training, keys):
        query, key, value = (maps(3, c, n, seed=s) for s, (c, n) in enumerate([(4, 30), (4, keys), (5, keys)]))
        key = key + 2  # so that the mean of the coefficients differs between the queries
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
        """A mean 1e4 times the spread: float32 moments keep the variance that a difference of squares would lose."""
        key = maps(2, 8, 300, seed=1, dtype=torch.float32) * 1e-2 + 1
        query = maps(2, 8, 500, seed=2, dtype=torch.float32) * 1e-2 + 100
        exact = (key.double().mT @ query.double()).var(unbiased=False)
        _, var = coefficient_moments(query, key)
        assert var.item() == pytest.approx(exact.item(), rel=1e-4)

    def test_running_statistics_equal_torch(self):
        """Buffers after a step, on both paths, equal the buffers of nn.BatchNorm2d(1) on the coefficients."""
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
        """Coefficients near 1e7 leave the range of float16, and the gain that normalizes them is below it."""
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

    def test_bn_alone_in_half_precision(self):
        """The sum over many keys is taken in float32; only the result has to fit."""
        x = 6 * maps(2, 16, 64, 64).relu()
        expected = dense_attention(x, norm='bn')
        assert expected.abs().max() < 60000
        with torch.autocast('cpu', dtype=torch.float16):
            out = dense_attention(x.float(), norm='bn')
        assert (out.double() - expected).abs().max() < 0.01 * expected.abs().max()
