"""The content lambda against its definition, and errors of both lambdas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkron.ops import content_lambda, content_matrix, position_lambda
from support import definitions
from support.errors import raises


def operands(batch, heads, depth, intra, width, size, context=None, seed=0, dtype=torch.float64):
    """Return query, key and value; keys and values on a map of size ``context`` if it is given."""
    generator = torch.Generator().manual_seed(seed)
    context = context or size
    shapes = ((batch, heads, depth, *size), (batch, intra, depth, *context), (batch, intra, width, *context))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def masks(batch, *size, seed=0):
    """Return random positions, at least one per sample."""
    mask = torch.rand(batch, *size, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask.flatten(1)[:, -1] = True
    return mask


def close(out, expected, tolerance=1e-11):
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


class TestContentLambda:
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
        close(content_matrix(key, value, mask), definitions.content_matrix(key, value, mask))
        close(content_lambda(query, key, value, mask), definitions.content_lambda(query, key, value, mask))

    def test_one_dimension(self):
        query, key, value = operands(2, 4, 3, 2, 5, (6,), (9,))
        close(content_lambda(query, key, value), definitions.content_lambda(query, key, value))
        mask = masks(2, 9)
        close(content_lambda(query, key, value, mask), definitions.content_lambda(query, key, value, mask))

    @pytest.mark.parametrize('with_mask', [False, True], ids=['', 'mask'])
    def test_gradcheck(self, with_mask):
        inputs = [x.requires_grad_() for x in operands(2, 2, 3, 2, 2, (2, 3), (3, 2))]
        mask = masks(2, 3, 2) if with_mask else None
        assert torch.autograd.gradcheck(lambda *x: content_lambda(*x, mask), inputs)

    def test_softmax(self):
        """A constant on all keys has no effect, equal keys give the mean value, a huge key gives its value."""
        query, key, value = operands(2, 4, 3, 1, 5, (4, 6))
        close(content_lambda(query, key + 1000, value), content_lambda(query, key, value))
        mean = value.mean((3, 4))[:, :, None].expand(2, 1, 3, 5)[:, 0]
        close(content_matrix(torch.ones_like(key), value), mean)
        key[..., 2, 3] = 1e4
        close(content_matrix(key, value), value[:, :, :, 2, 3].expand(2, 3, 5))

    def test_mask_is_a_crop(self):
        """Padding has no effect and gets no gradient, whatever its content is."""
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

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype):
        """Both dtypes stay close to float64; float16 is computed in float32."""
        query, key, value = operands(2, 4, 16, 2, 5, (9, 9), (64, 64), dtype=dtype)
        mask = masks(2, 64, 64)
        for extra in ((), (mask,)):
            matrix = content_matrix(key, value, *extra)
            exact = definitions.content_matrix(key.double(), value.double(), *extra)
            assert (matrix - exact).abs().max() < (1e-6 if dtype == torch.float16 else 0.02 * exact.abs().max())
            expected = definitions.content_lambda(query.double(), key.double(), value.double(), *extra)
            out = content_lambda(query, key, value, *extra)
            tolerance = 0.003 if dtype == torch.float16 else 0.03
            assert (out - expected).abs().max() < tolerance * expected.abs().max()


class TestErrors:
    """Errors of operands that do not fit each other; tests/test_bad_values.py has wrong types and shapes."""

    def test_sample_without_a_key(self):
        mask = torch.ones(2, 3, 2, dtype=torch.bool)
        mask[1] = False
        with raises(ValueError, 'key_mask'):
            content_lambda(*operands(2, 4, 3, 1, 5, (4, 6), (3, 2)), mask)

    @pytest.mark.parametrize('form', [None, 'conv', 'dense', 'tiled'])
    def test_position_lambda(self, form):
        query, _, value = operands(2, 4, 3, 2, 5, (4, 6))
        good = dict(query=query, value=value, table=torch.randn(2, 3, 3, 5), content=torch.zeros(2, 3, 5))
        good = {name: x.double() for name, x in good.items()}
        for argument, bad in (
            ('table', good['table'][:, :2]),
            ('table', good['table'][:, :, :2]),
            ('query', query[..., :5]),
            ('content', good['content'][[0, 1, 1]]),
        ):
            with raises(ValueError, argument):
                position_lambda(**{**good, argument: bad}, form=form)
        with raises(ValueError, 'query', (4, 6)):
            position_lambda(**good, stride=2, form=form)
        for name in ('value', 'table', 'content'):
            with raises(ValueError, name, 'meta'):
                position_lambda(**{**good, name: good[name].to('meta')}, form=form)
        if form in ('dense', 'tiled'):
            with raises(ValueError, 'form'):
                position_lambda(query[..., ::2, ::2], value, good['table'], stride=2, dilation=3, form=form)

    def test_devices_of_content_lambda(self):
        good = {name: torch.ones(2, 1, 3, 4) for name in ('query', 'key', 'value')}
        good['key_mask'] = torch.ones(2, 4, dtype=torch.bool)
        for name in ('key', 'value', 'key_mask'):
            with raises(ValueError, name, 'meta'):
                content_lambda(**{**good, name: good[name].to('meta')})
