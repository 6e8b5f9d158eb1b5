"""All forms of the position lambda: values, gradients, precision and memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmkron.ops import position_lambda
from mmkron.ops.lambdas import position as lambdas
from mmkron.ops.lambdas import tiled
from mmkron.ops.lambdas.position import FORMS
from support.definitions import position_lambda as definition

# batch, h, k, u, v, size, scope, stride, dilation
CASES = {
    'one of each': (1, 1, 1, 1, 1, (1, 1), (1, 1), 1, 1),
    'one position': (2, 4, 3, 4, 2, (1, 1), (5, 3), 1, 1),
    'non-square scope': (3, 4, 3, 1, 2, (5, 7), (5, 3), 1, 1),
    'h = 8': (2, 8, 2, 1, 5, (6, 5), (3, 3), 1, 1),
    'h > k': (1, 8, 3, 4, 2, (4, 9), (3, 7), 1, 1),
    'several tiles': (3, 4, 3, 1, 2, (11, 19), (5, 9), 1, 1),
    'map smaller than the scope': (2, 4, 3, 1, 3, (4, 3), (9, 11), 1, 1),
    'rows only': (2, 2, 3, 2, 2, (1, 19), (1, 7), 1, 1),
    'columns only': (2, 2, 3, 2, 2, (11, 1), (7, 3), 1, 1),
    'point scope': (2, 4, 3, 2, 2, (5, 9), (1, 1), 1, 1),
    'stride 2': (3, 4, 3, 2, 2, (9, 7), (5, 3), 2, 1),
    'stride 2, even sizes': (1, 4, 3, 1, 2, (8, 22), (3, 5), 2, 1),
    'stride over the map': (2, 2, 3, 1, 4, (2, 3), (3, 3), 5, 1),
    'dilation 2': (3, 4, 3, 2, 2, (9, 7), (5, 3), 1, 2),
    'dilation over the map': (2, 2, 3, 1, 4, (2, 3), (3, 3), 1, 4),
    'dilation over the columns': (2, 2, 3, 2, 2, (14, 3), (5, 3), 1, 5),
    'dilation far over the map': (2, 3, 3, 2, 2, (4, 11), (7, 23), 1, 1000),
    'stride 2, dilation over the map': (2, 2, 3, 2, 2, (5, 4), (3, 5), 2, 9),
    'stride 3, dilation 2': (1, 4, 3, 1, 2, (7, 10), (5, 3), 3, 2),
}


def operands(batch, heads, depth, intra, width, size, scope, stride=1, dilation=1, seed=0, dtype=torch.float64):
    """Return query, value, table and content of a case."""
    generator = torch.Generator().manual_seed(seed)
    queries = [-(-side // stride) for side in size]
    shapes = (
        (batch, heads, depth, *queries),
        (batch, intra, width, *size),
        (intra, depth, *scope),
        (batch, depth, width),
    )
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def forms_for(stride, dilation):
    """Return the forms that support the stride and the dilation."""
    return (None, 'conv') if stride > 1 and dilation > 1 else (None, *FORMS)


def differentiate(inputs, autocast=None, function=position_lambda, **kwargs):
    """Return the output and the gradients of all inputs for a random cotangent."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast('cpu', autocast, enabled=autocast is not None):
        out = function(*leaves, **kwargs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


def close(outs, expected, tolerance=1e-10):
    for out, other in zip(outs, expected):
        torch.testing.assert_close(out, other, rtol=tolerance, atol=tolerance)


class Recorder(TorchDispatchMode):
    """Mode that records the size of the largest storage that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize('with_content', [False, True], ids=['', 'content'])
@pytest.mark.parametrize('case', CASES)
def test_feature(case, with_content):
    """Outputs and gradients of all forms are those of the definition."""
    *_, stride, dilation = CASES[case]
    steps = dict(stride=stride, dilation=dilation)
    inputs = operands(*CASES[case])[: 3 + with_content]
    expected = differentiate(inputs, function=definition, **steps)
    for form in forms_for(stride, dilation):
        close(differentiate(inputs, form=form, **steps), expected)
        with torch.no_grad():
            close([position_lambda(*inputs, form=form, **steps)], expected[:1])


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(1, 3),
        st.tuples(st.integers(1, 8), st.integers(1, 13)),
        st.tuples(*[st.integers(0, 6).map(lambda radius: 2 * radius + 1)] * 2),
        st.integers(1, 3),
        st.integers(1, 3) | st.integers(4, 20),
    ),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_sizes(case, with_content, seed):
    *_, stride, dilation = case
    inputs = operands(*case, seed=seed)[: 3 + with_content]
    expected = definition(*inputs, stride=stride, dilation=dilation)
    for form in forms_for(stride, dilation):
        close([position_lambda(*inputs, stride=stride, dilation=dilation, form=form)], [expected])


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize(
    ('size', 'scope', 'stride', 'dilation'),
    [((3, 4), (3, 5), 1, 1), ((5, 3), (3, 3), 2, 1), ((3, 5), (3, 3), 1, 2), ((2, 3), (5, 7), 1, 1)],
)
def test_gradcheck(form, size, scope, stride, dilation):
    inputs = [x.requires_grad_() for x in operands(2, 2, 2, 2, 2, size, scope, stride)]
    for count in (3, 4):
        assert torch.autograd.gradcheck(
            lambda *x: position_lambda(*x, stride=stride, dilation=dilation, form=form), inputs[:count], fast_mode=True
        )


@pytest.mark.parametrize('form', ['conv', 'dense'])
def test_gradgradcheck(form):
    inputs = [x.requires_grad_() for x in operands(1, 2, 2, 1, 2, (2, 3), (3, 3))]
    assert torch.autograd.gradgradcheck(lambda *x: position_lambda(*x, form=form), inputs, fast_mode=True)


def test_tiles_have_no_second_derivative():
    inputs = [x.requires_grad_() for x in operands(1, 2, 2, 1, 2, (3, 4), (3, 3))]
    out = position_lambda(*inputs, form='tiled')
    gradients = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        sum(g.sum() for g in gradients).backward()


@pytest.mark.parametrize('form', FORMS)
def test_some_operands_frozen(form):
    """An operand gets the same gradient whether or not the others need one."""
    inputs = operands(2, 4, 3, 2, 2, (6, 11), (5, 3))
    cotangent = torch.randn(2, 4, 2, 6, 11, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(position_lambda(*leaves, form=form), leaves, cotangent)
    for alone in range(4):
        leaves = [x.clone().requires_grad_(i == alone) for i, x in enumerate(inputs)]
        position_lambda(*leaves, form=form).backward(cotangent)
        assert [x.grad is not None for x in leaves] == [i == alone for i in range(4)]
        close([leaves[alone].grad], [expected[alone]])


@pytest.mark.parametrize('form', [None, *FORMS])
@pytest.mark.parametrize(('stride', 'dilation'), [(1, 1), (3, 1), (1, 2)])
def test_one_dimension(form, stride, dilation):
    query, value, table, content = operands(2, 4, 3, 2, 3, (1, 23), (1, 7), stride)
    line = [x[..., 0, :] for x in (query, value, table)]
    for extra in ((), (content,)):
        expected = definition(query, value, table, *extra, stride=stride, dilation=dilation)[..., 0, :]
        close([position_lambda(*line, *extra, stride=stride, dilation=dilation, form=form)], [expected])


class TestProperties:
    @pytest.mark.parametrize('form', FORMS)
    def test_known_answers(self, form):
        """A table with a single 1 at the offset (1, -2) selects the value one row down and two columns to the left."""
        query, value, table, _ = operands(2, 1, 1, 1, 1, (5, 9), (3, 5))
        table.zero_()[0, 0, 2, 0] = 1
        expected = torch.zeros_like(query)
        expected[..., :-1, 2:] = (query[..., :-1, 2:] * value[..., 1:, :-2])[:, :, 0:1]
        close([position_lambda(query, value, table, form=form)], [expected])

    @pytest.mark.parametrize('form', [None, *FORMS])
    def test_global_table(self, form):
        """Only the center (2H - 1, 2W - 1) of a larger table has an effect."""
        for side in (17, 23):
            inputs = operands(2, 4, 3, 2, 3, (5, 9), (side, side))
            rows, columns = (side - 9) // 2, (side - 17) // 2
            table = inputs[2][..., rows : side - rows, columns : side - columns]
            assert table.shape[2:] == (9, 17)
            expected = differentiate([*inputs[:2], table, inputs[3]], form=form)
            out, query, value, grad, content = differentiate(inputs, form=form)
            inner = grad[..., rows : side - rows, columns : side - columns]
            close([out, query, value, inner, content], expected)
            assert grad.count_nonzero() == inner.count_nonzero()


class TestTiles:
    @pytest.mark.parametrize('count', [1, 2, 3])
    @pytest.mark.parametrize('stride', [1, 2])
    def test_chunks(self, monkeypatch, count, stride):
        """The batch is split into chunks of a few samples."""
        inputs = operands(5, 2, 3, 2, 3, (11, 19), (3, 5), stride)
        expected = differentiate(inputs, stride=stride, form='conv')
        taken = set()
        tile = tiled.QueryTile

        def spy(*args):
            result = tile(*args)
            taken.add(result.num_samples)
            return result

        monkeypatch.setattr(tiled, 'QueryTile', spy)
        window = (3 * stride + 1 + 2) * (7 * stride + 1 + 4)  # of 4 x 8 queries and a scope of 3 x 5
        monkeypatch.setattr(lambdas, 'choose_tile', lambda *_: (4, 8))
        monkeypatch.setattr(tiled, 'CHUNK_COEFFICIENTS', count * 4 * 8 * 2 * window)
        close(differentiate(inputs, stride=stride, form='tiled'), expected)
        assert taken == {count, 5 % count or count}

    @pytest.mark.parametrize('tile', [(1, 1), (2, 3), (5, 4), (64, 64)])
    @pytest.mark.parametrize('stride', [1, 3])
    def test_tile(self, monkeypatch, tile, stride):
        inputs = operands(2, 2, 3, 2, 3, (11, 10), (5, 7), stride)
        expected = differentiate(inputs, stride=stride, form='conv')
        monkeypatch.setattr(lambdas, 'choose_tile', lambda *_: tile)
        close(differentiate(inputs, stride=stride, form='tiled'), expected)

    def test_memory(self):
        """The tiled form holds neither all lambdas (k v per query) nor a table of all pairs; the other forms do."""
        batch, heads, depth, width, positions = 3, 2, 16, 32, 24 * 24
        inputs = operands(batch, heads, depth, 1, width, (24, 24), (9, 9), dtype=torch.float32)
        largest = {}
        for form in FORMS:
            with Recorder() as recorder:
                differentiate(inputs, form=form)
            largest[form] = recorder.largest
        assert batch * heads * width * positions <= largest['tiled'] < positions * depth * width / 2
        assert largest['conv'] >= batch * positions * depth * width
        assert largest['dense'] >= positions * positions * depth


@pytest.mark.parametrize('form', [None, *FORMS])
@pytest.mark.parametrize('dilation', [19, 1000, 10**9])
def test_dilation_costs_no_more_than_the_map(form, dilation):
    """Offsets outside the map are skipped: no tensor is larger than a few maps, however large the dilation."""
    inputs = operands(1, 2, 4, 1, 3, (20, 15), (23, 23), dtype=torch.float32)
    with Recorder() as recorder:
        outs = differentiate(inputs, form=form, dilation=dilation)
    # The table of all pairs is the largest tensor of the dense form.
    assert recorder.largest <= (300**2 * 4 if form == 'dense' else 16 * 300 * 8)
    close([outs[0]], [definition(*inputs, dilation=dilation)], 1e-5)


class TestPrecision:
    @pytest.mark.parametrize('form', FORMS)
    @pytest.mark.parametrize('dilation', [1, 2])
    def test_float16_is_float32_inside(self, form, dilation):
        """The result is float32's, rounded once, even if products exceed the range of float16."""
        inputs = operands(2, 4, 16, 2, 3, (6, 11), (5, 7))
        inputs[0], inputs[1] = 0.002 * inputs[0], 3000 * inputs[1]
        inputs = [x.half() for x in inputs]
        exact = definition(*(x.double() for x in inputs), dilation=dilation)
        out = position_lambda(*inputs, dilation=dilation, form=form)
        assert out.dtype == torch.float16
        assert torch.equal(out, position_lambda(*(x.float() for x in inputs), dilation=dilation, form=form).half())
        assert (out - exact).abs().max() < 1e-3 * exact.abs().max()

    @pytest.mark.parametrize('form', [None, *FORMS])
    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_autocast(self, form, dtype):
        """Autocast computes in bfloat16 for bfloat16 and in float32 for float16; float64 stays float64."""
        inputs = operands(2, 4, 16, 1, 8, (12, 17), (9, 7))
        single = [x.float() for x in inputs]
        expected, exact = differentiate(single, form=form), differentiate(inputs, form=form)
        outs, doubles = (differentiate(x, autocast=dtype, form=form) for x in (single, inputs))
        close(doubles, exact)
        for out, other in zip(outs, expected):
            assert out.dtype == torch.float32
            error = (out - other).abs().max() / other.abs().max()
            assert 0 < error < 0.03 if dtype == torch.bfloat16 else torch.equal(out, other)

    @pytest.mark.parametrize('form', FORMS)
    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_parameters_of_float32(self, form, dtype):
        """Maps in half precision work with a table and a content lambda in float32, as in mixed precision."""
        query, value, table, content = operands(2, 4, 16, 1, 8, (12, 17), (9, 7), dtype=torch.float32)
        query, value = query.to(dtype), value.to(dtype)
        expected = differentiate([query.float(), value.float(), table, content], form=form)
        outs = differentiate([query, value, table, content], form=form)
        assert [x.dtype for x in outs] == [dtype, dtype, dtype, torch.float32, torch.float32]
        for out, other in zip(outs, expected):
            assert (out - other).abs().max() < 0.03 * other.abs().max()


@pytest.mark.parametrize(('stride', 'dilation'), [(1, 1), (2, 1), (1, 2)])
def test_trace(stride, dilation):
    """A traced graph supports other batches and sizes."""

    def function(*inputs):
        return position_lambda(*inputs, stride=stride, dilation=dilation)

    sizes = ((2, (6, 11)), (1, (3, 4)), (3, (13, 12)))
    for batch, traced_size in sizes[::2]:
        inputs = [x.requires_grad_() for x in operands(batch, 4, 3, 2, 3, traced_size, (5, 3), stride)]
        traced = torch.jit.trace(function, inputs, check_trace=False)
        for other, size in sizes:
            inputs = operands(other, 4, 3, 2, 3, size, (5, 3), stride)
            close([traced(*inputs)], [definition(*inputs, stride=stride, dilation=dilation)])
