"""The content lambda against its definition, and the errors of both lambdas."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkron.ops import content_lambda, content_matrix, position_lambda
from support.errors import raises


def operands(batch, heads, depth, intra, width, size, context=None, seed=0, dtype=torch.float64):
    """Query, key and value; keys and values on a map of their own size where ``context`` says so."""
    generator = torch.Generator().manual_seed(seed)
    context = context or size
    shapes = ((batch, heads, depth, *size), (batch, intra, depth, *context), (batch, intra, width, *context))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def numpy_matrix(key, value, mask=None):
    """The content lambda (B, k, v), sample by sample, over the positions that the mask leaves."""
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
    """Random positions, at least one a sample."""
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
        """Positions of the context may stand in any order, as long as keys and values agree; outputs follow queries."""
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
        """Values and gradients are those of the crop, whatever stands in the padding, which gets none."""
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
        with pytest.raises(TypeError, match='query must be a floating-point tensor, got list'):
            content_lambda([1.0], key, value)
        with pytest.raises(TypeError, match='key must be a floating-point tensor, got torch.int64'):
            content_lambda(query, key.long(), value)
        with pytest.raises(TypeError, match='value must be of type torch.float64, got torch.float32'):
            content_lambda(query, key, value.float())
        with pytest.raises(TypeError, match='key must be of type torch.float64, got torch.float32'):
            content_lambda(query, key.float(), value.float())
        with pytest.raises(ValueError, match=r'query must have 4 or 5 dimensions, .*got shape \(4, 6\)'):
            content_lambda(query[0, 0, 0], key, value)
        with pytest.raises(ValueError, match=r'query must have .*none of them empty, got shape \(2, 4, 3, 0, 6\)'):
            content_lambda(query[..., :0, :], key, value)
        with pytest.raises(ValueError, match=r'key must have 5 dimensions, .*got shape \(2, 1, 3, 2\)'):
            content_lambda(query, key[..., 0, :], value)
        with pytest.raises(ValueError, match=r'value must have 5 dimensions, .*got shape \(2, 1, 5, 2\)'):
            content_lambda(query, key, value[..., 0, :])
        with pytest.raises(ValueError, match=r'key must have batch size 2, got shape \(1, 1, 3, 3, 2\)'):
            content_lambda(query, key[:1], value)
        with pytest.raises(ValueError, match=r'value must have batch size 2, got shape \(1, 1, 5, 3, 2\)'):
            content_lambda(query, key, value[:1])
        with pytest.raises(ValueError, match=r'key does not fit: shapes \(2, 1, 2, 3, 2\) and \(2, 4, 3, 4, 6\)'):
            content_lambda(query, key[:, :, :2], value)
        with pytest.raises(ValueError, match=r'value does not fit: shapes \(2, 1, 5, 3, 1\) and \(2, 1, 3, 3, 2\)'):
            content_lambda(query, key, value[..., :1])
        with pytest.raises(ValueError, match=r'value does not fit: shapes \(2, 2, 5, 3, 2\) and \(2, 1, 3, 3, 2\)'):
            content_matrix(key, value.repeat(1, 2, 1, 1, 1))
        with pytest.raises(TypeError, match='key_mask must be a bool tensor, got torch.float32'):
            content_lambda(query, key, value, mask.float())
        with pytest.raises(TypeError, match='key_mask must be a bool tensor, got list'):
            content_lambda(query, key, value, [True])
        with pytest.raises(ValueError, match=r'key_mask must have shape \(2, 3, 2\), got \(2, 2, 3\)'):
            content_lambda(query, key, value, mask.mT)
        mask[1] = False
        with pytest.raises(ValueError, match='key_mask must leave each sample at least one position'):
            content_lambda(query, key, value, mask)


class TestPositionLambdaErrors:
    def operands(self, size=(4, 6), scope=(3, 5)):
        query, _, value = operands(2, 4, 3, 2, 5, size)
        return query, value, torch.randn(2, 3, *scope, dtype=torch.float64)

    @pytest.mark.parametrize('form', [None, 'conv', 'dense', 'tiled'])
    def test_operands(self, form):
        query, value, table = self.operands()

        def refused(error, match, *inputs, **kwargs):
            with pytest.raises(error, match=match):
                position_lambda(*inputs, form=form, **kwargs)

        number = 'must be a floating-point tensor, got'
        refused(TypeError, f'query {number} list', [1.0], value, table)
        refused(TypeError, f'value {number} torch.int64', query, value.long(), table)
        refused(TypeError, f'table {number} torch.int32', query, value, table.int())
        refused(TypeError, 'value must be of type torch.float64, got torch.float32', query, value.float(), table)
        refused(ValueError, r'query must have 4 or 5 dimensions.*\(4, 6\)', query[0, 0, 0], value, table)
        refused(ValueError, r'value must have 5 dimensions.*\(2, 2, 5, 6\)', query, value[..., 0, :], table)
        refused(ValueError, r'value must .*none of them empty.*\(2, 2, 0, 4, 6\)', query, value[:, :, :0], table)
        refused(ValueError, r'value must have batch size 2, got shape \(1, 2, 5, 4, 6\)', query, value[:1], table)
        refused(ValueError, r'table must have 4 dimensions.*\(2, 3, 5\)', query, value, table[..., 0, :])
        sizes = r'table must be for u = 2 \(of value\) and k = 3 \(of query\), got shape'
        refused(ValueError, rf'{sizes} \(1, 3, 3, 5\)', query, value, table[:1])
        refused(ValueError, rf'{sizes} \(2, 2, 3, 5\)', query, value, table[:, :2])
        refused(ValueError, r'scope of table must be odd, got shape \(2, 3, 2, 5\)', query, value, table[:, :, :2])
        refused(ValueError, r'scope of table must be odd, got shape \(2, 3, 3, 4\)', query, value, table[..., :4])
        sizes = r'query must have the positions \(4, 6\) \(value \(4, 6\) at stride 1\), got \(4, 5\)'
        refused(ValueError, sizes, query[..., :5], value, table)
        sizes = r'query must have the positions \(2, 3\) \(value \(4, 6\) at stride 2\), got \(4, 6\)'
        refused(ValueError, sizes, query, value, table, stride=2)

        content = torch.zeros(2, 3, value.shape[2], dtype=torch.float64)
        refused(TypeError, f'content {number} list', query, value, table, [1.0])
        refused(TypeError, f'content {number} torch.int64', query, value, table, content.long())
        shape = r'content must have shape \(B, k, v\) = \(2, 3, 5\), got'
        refused(ValueError, rf'{shape} \(1, 3, 5\)', query, value, table, content[:1])
        refused(ValueError, rf'{shape} \(3, 3, 5\)', query, value, table, content[[0, 1, 1]])
        refused(ValueError, rf'{shape} \(2, 5, 3\)', query, value, table, content.mT)

    @pytest.mark.parametrize('form', [None, 'conv', 'dense', 'tiled'])
    def test_devices(self, form):
        operands = dict(zip(('query', 'value', 'table'), self.operands()))
        operands['content'] = torch.zeros(2, 3, 5, dtype=torch.float64)
        for name in ('value', 'table', 'content'):
            with raises(ValueError, name, 'meta'):
                position_lambda(**{**operands, name: operands[name].to('meta')}, form=form)
        query, key, value = (torch.ones(2, 1, 3, 4) for _ in range(3))
        mask = torch.ones(2, 4, dtype=torch.bool)
        with raises(ValueError, 'key', 'meta'):
            content_lambda(query, key.to('meta'), value)
        with raises(ValueError, 'value', 'meta'):
            content_lambda(query, key, value.to('meta'))
        with raises(ValueError, 'key_mask', 'meta'):
            content_lambda(query, key, value, mask.to('meta'))

    @pytest.mark.parametrize('name', ['stride', 'dilation'])
    def test_steps(self, name):
        for step, message in ((0, 'at least 1, got 0'), (-2, 'at least 1, got -2')):
            with pytest.raises(ValueError, match=f'{name} must be {message}'):
                position_lambda(*self.operands(), **{name: step})
        for step in (True, 1.0, '2', (1, 1)):
            with pytest.raises(TypeError, match=f'{name} must be an int, got '):
                position_lambda(*self.operands(), **{name: step})

    def test_form(self):
        message = r"form must be one of \('conv', 'dense', 'tiled'\), got 'fft'"
        with pytest.raises(ValueError, match=message):
            position_lambda(*self.operands(), form='fft')

    @pytest.mark.parametrize('form', ['dense', 'tiled'])
    def test_stride_and_dilation(self, form):
        query, value, table = self.operands()
        with pytest.raises(ValueError, match="form must be 'conv' .*, got 2 and 3"):
            position_lambda(query[..., ::2, ::2], value, table, stride=2, dilation=3, form=form)
