"""Content lambda against its definition, and the errors of both lambdas."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkron.ops import content_lambda, content_matrix, position_lambda
from support.errors import raises


def operands(batch, heads, depth, intra, width, size, context=None, seed=0, dtype=torch.float64):
    """Return query, key and value; keys and values on a map of size ``context`` if it is given."""
    generator = torch.Generator().manual_seed(seed)
    context = context or size
    shapes = ((batch, heads, depth, *size), (batch, intra, depth, *context), (batch, intra, width, *context))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def numpy_matrix(key, value, mask=None):
    """Return the content lambda (B, k, v), sample by sample, over the positions that the mask selects."""
    matrices = []
    for sample in range(len(key)):
        keep = np.ones(key[sample, 0, 0].numel(), bool) if mask is None else mask[sample].numpy().ravel()
        total = 0
        for keys, values in zip(key[sample].detach().double().numpy(), value[sample].detach().double().numpy()):
            keys, values = (x.reshape(len(x), -1)[:, keep] for x in (keys, values))
            weights = np.exp(keys - keys.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            total = total + weights @ values.T
        matrices.append(total)
    return torch.from_numpy(np.stack(matrices))


def numpy_content(query, key, value, mask=None):
    return torch.einsum('bhk...,bkv->bhv...', query.detach().double(), numpy_matrix(key, value, mask))


def masks(batch, *size, seed=0):
    """Return random positions, at least one per sample."""
    mask = torch.rand(batch, *size, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask.flatten(1)[:, -1] = True
    return mask


def close(out, expected, tolerance=1e-11):
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


class TestContentLambda:
    @pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    def test_smoke(self, dtype):
        out = content_lambda(*operands(2, 4, 3, 1, 5, (4, 7), dtype=dtype))
        assert out.shape == (2, 4, 5, 4, 7)
        assert out.dtype == dtype
        assert out.isfinite().all()

    @settings(max_examples=40, deadline=None)
    @given(
        st.tuples(
            *[st.integers(1, 4)] * 5,
            st.tuples(st.integers(1, 7), st.integers(1, 7)),
            st.tuples(st.integers(1, 7), st.integers(1, 7)),
        ),
        st.booleans(),
        st.integers(0, 1000),
    )
    def test_feature(self, case, with_mask, seed):
        query, key, value = operands(*case, seed=seed)
        mask = masks(len(key), *key.shape[3:], seed=seed) if with_mask else None
        close(content_matrix(key, value, mask), numpy_matrix(key, value, mask))
        close(content_lambda(query, key, value, mask), numpy_content(query, key, value, mask))

    @pytest.mark.parametrize('batch', [1, 3])
    @pytest.mark.parametrize('heads', [1, 4, 8])
    @pytest.mark.parametrize('intra', [1, 4])
    def test_cardinality(self, batch, heads, intra):
        inputs = operands(batch, heads, 3, intra, 2, (5, 3), (2, 7))
        close(content_lambda(*inputs), numpy_content(*inputs))

    def test_one_dimension(self):
        query, key, value = operands(2, 4, 3, 2, 5, (6,), (9,))
        close(content_lambda(query, key, value), numpy_content(query, key, value))
        mask = masks(2, 9)
        close(content_lambda(query, key, value, mask), numpy_content(query, key, value, mask))

    @pytest.mark.parametrize('with_mask', [False, True], ids=['', 'mask'])
    def test_gradcheck(self, with_mask):
        inputs = [x.requires_grad_() for x in operands(2, 2, 3, 2, 2, (2, 3), (3, 2))]
        mask = masks(2, 3, 2) if with_mask else None
        assert torch.autograd.gradcheck(lambda *x: content_lambda(*x, mask), inputs)

    def test_order_of_positions(self):
        """The order of the context's positions does not matter if keys and values agree; outputs follow queries."""
        query, key, value = operands(2, 4, 3, 2, 5, (20,), (30,))
        out = content_lambda(query, key, value)
        order = torch.randperm(30)
        close(content_lambda(query, key[..., order], value[..., order]), out)
        order = torch.randperm(20)
        close(content_lambda(query[..., order], key, value), out[..., order])

    def test_linearity(self):
        query, key, value = operands(2, 4, 3, 2, 5, (4, 6))
        other = operands(2, 4, 3, 2, 5, (4, 6), seed=1)[2]
        expected = 2 * content_lambda(query, key, value) - 3 * content_lambda(query, key, other)
        close(content_lambda(query, key, 2 * value - 3 * other), expected)

    def test_softmax(self):
        """Keys plus a constant: the same; constant keys: the mean of the values; one huge key: its value."""
        query, key, value = operands(2, 4, 3, 1, 5, (4, 6))
        close(content_lambda(query, key + 1000, value), content_lambda(query, key, value))
        mean = value.mean((3, 4))[:, :, None].expand(2, 1, 3, 5)[:, 0]
        close(content_matrix(torch.ones_like(key), value), mean)
        key[..., 2, 3] = 1e4
        close(content_matrix(key, value), value[:, :, :, 2, 3].expand(2, 3, 5))

    def test_mask_is_a_crop(self):
        """Values and gradients equal the crop's for any content of the padding, which gets no gradient."""
        query, key, value = operands(2, 4, 3, 2, 5, (4, 6), (7, 9))
        mask = torch.zeros(2, 7, 9, dtype=torch.bool)
        mask[:, :5, :6] = True
        leaves = [x[..., :5, :6].clone().requires_grad_() for x in (key, value)]
        out = content_lambda(query, *leaves)
        expected = [out, *torch.autograd.grad(out.square().sum(), leaves)]
        for padding in (0, 1e3, -1e30):
            leaves = [x.masked_fill(~mask[:, None, None], padding).requires_grad_() for x in (key, value)]
            leaves[1].data.clamp_(-1e6, 1e6)
            out = content_lambda(query, *leaves, mask)
            gradients = torch.autograd.grad(out.square().sum(), leaves)
            for ours, other in zip([out, *(x[..., :5, :6] for x in gradients)], expected):
                close(ours, other)
            assert all(x.masked_select(~mask[:, None, None]).count_nonzero() == 0 for x in gradients)

    def test_mask_of_all(self):
        inputs = operands(2, 4, 3, 2, 5, (4, 6))
        assert torch.equal(content_lambda(*inputs, torch.ones(2, 4, 6, dtype=torch.bool)), content_lambda(*inputs))

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype):
        """float16 is computed in float32: thousands of equal keys keep their weights. Both stay close to float32."""
        query, key, value = operands(2, 4, 16, 2, 5, (9, 9), (64, 64), dtype=dtype)
        mask = masks(2, 64, 64)
        for extra in ((), (mask,)):
            matrix = content_matrix(key, value, *extra)
            exact = numpy_matrix(key, value, *extra)
            assert (matrix - exact).abs().max() < (1e-6 if dtype == torch.float16 else 0.02 * exact.abs().max())
            expected = numpy_content(query, key, value, *extra)
            out = content_lambda(query, key, value, *extra)
            tolerance = 0.003 if dtype == torch.float16 else 0.03
            assert (out - expected).abs().max() < tolerance * expected.abs().max()

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_autocast(self, dtype):
        query, key, value = operands(2, 4, 16, 2, 5, (9, 9), (30, 40))
        leaves = [x.float().requires_grad_() for x in (query, key, value)]
        expected = numpy_content(query, key, value)
        with torch.autocast('cpu', dtype):
            out = content_lambda(*leaves)
            exact = content_lambda(query, key, value)
        assert (out - expected).abs().max() < 0.03 * expected.abs().max()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))
        close(exact, expected)

    def test_memory_formats(self):
        query, key, value = operands(2, 4, 3, 2, 5, (4, 6))
        before = [x.clone() for x in (query, key, value)]
        expected = content_lambda(query, key, value)
        others = [x.mT.contiguous().mT for x in (query, key, value)]
        close(content_lambda(*others), expected)
        close(content_lambda(query, key[:1].expand_as(key), value), numpy_content(query, key[:1].expand_as(key), value))
        assert all(torch.equal(x, other) for x, other in zip((query, key, value), before))

    def test_dynamo(self):
        inputs = operands(2, 4, 3, 2, 5, (4, 6))
        compiled = torch.compile(content_lambda, backend='aot_eager', fullgraph=True)
        close(compiled(*inputs), numpy_content(*inputs))

    def test_trace(self):
        traced = torch.jit.trace(content_lambda, operands(2, 4, 3, 2, 5, (4, 6)), check_trace=False)
        for batch, size in ((2, (4, 6)), (3, (5, 2))):
            inputs = operands(batch, 4, 3, 2, 5, size)
            close(traced(*inputs), numpy_content(*inputs))

    def test_exception(self):
        query, key, value = operands(2, 4, 3, 1, 5, (4, 6), (3, 2))
        mask = torch.ones(2, 3, 2, dtype=torch.bool)
        with raises(TypeError, 'value', torch.float32):
            content_lambda(query, key, value.float())
        with raises(ValueError, 'key', (2, 1, 2, 3, 2)):
            content_lambda(query, key[:, :, :2], value)
        with raises(ValueError, 'value', (2, 1, 5, 3, 1)):
            content_lambda(query, key, value[..., :1])
        with raises(ValueError, 'value', (2, 2, 5, 3, 2)):
            content_matrix(key, value.repeat(1, 2, 1, 1, 1))
        with raises(ValueError, 'key_mask', (2, 2, 3)):
            content_lambda(query, key, value, mask.mT)
        mask[1] = False
        with raises(ValueError, 'key_mask'):
            content_lambda(query, key, value, mask)


class TestPositionLambdaErrors:
    """Errors of operands that do not fit each other; tests/test_bad_values.py has the wrong types and shapes."""

    def operands(self):
        query, _, value = operands(2, 4, 3, 2, 5, (4, 6))
        return query, value, torch.randn(2, 3, 3, 5, dtype=torch.float64)

    @pytest.mark.parametrize('form', [None, 'conv', 'dense', 'tiled'])
    def test_operands(self, form):
        query, value, table = self.operands()
        content = torch.zeros(2, 3, 5, dtype=torch.float64)
        for argument, got, inputs, kwargs in (
            ('table', (1, 3, 3, 5), (query, value, table[:1]), {}),
            ('table', (2, 2, 3, 5), (query, value, table[:, :2]), {}),
            ('table', (2, 3, 2, 5), (query, value, table[:, :, :2]), {}),
            ('table', (2, 3, 3, 4), (query, value, table[..., :4]), {}),
            ('query', (4, 5), (query[..., :5], value, table), {}),
            ('query', (4, 6), (query, value, table), dict(stride=2)),
            ('content', (3, 3, 5), (query, value, table, content[[0, 1, 1]]), {}),
            ('content', (2, 5, 3), (query, value, table, content.mT), {}),
        ):
            with raises(ValueError, argument, got):
                position_lambda(*inputs, form=form, **kwargs)

    @pytest.mark.parametrize('form', [None, 'conv', 'dense', 'tiled'])
    def test_devices(self, form):
        operands = dict(zip(('query', 'value', 'table'), self.operands()))
        operands['content'] = torch.zeros(2, 3, 5, dtype=torch.float64)
        for name in ('value', 'table', 'content'):
            with raises(ValueError, name, 'meta'):
                position_lambda(**{**operands, name: operands[name].to('meta')}, form=form)

    def test_devices_of_content_lambda(self):
        good = {name: torch.ones(2, 1, 3, 4) for name in ('query', 'key', 'value')}
        good['key_mask'] = torch.ones(2, 4, dtype=torch.bool)
        for name in ('key', 'value', 'key_mask'):
            with raises(ValueError, name, 'meta'):
                content_lambda(**{**good, name: good[name].to('meta')})

    @pytest.mark.parametrize('form', ['dense', 'tiled'])
    def test_stride_and_dilation(self, form):
        query, value, table = self.operands()
        with raises(ValueError, 'form'):
            position_lambda(query[..., ::2, ::2], value, table, stride=2, dilation=3, form=form)
