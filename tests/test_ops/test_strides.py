"""Every operator against its definition: operands of any strides, and any device and dtype."""

import copy
from functools import partial

import pytest
import torch

from mmkron import ops
from mmkron.layers import KroneckerAttention2d, LambdaLayer, SpikingConv, SpikingPatchEmbed, SpikingSelfAttention
from mmkron.ops.neurons.norm_lif import norm_lif
from support import definitions
from support.definitions import attention, map_attention, spiking_attention
from support.strides import restride

SEEDS = range(4)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spikes(*shape, seed=0):
    return (normal(*shape, seed=seed) > 0.3).double()


def constant_along(axis, x):
    """Return a tensor that is constant, and expanded, along an axis."""
    return x.narrow(axis, 0, 1).expand_as(x)


def fused(x, weight, bias):
    """Apply norm_lif with strided running statistics, which become the statistics of the batch."""
    mean, var = (torch.zeros(2 * len(weight), dtype=x.dtype, device=x.device)[::2] for _ in range(2))
    out = norm_lif(x, 4, weight, bias, mean, var, momentum=1.0)
    torch.testing.assert_close(mean, x.detach().mean((0, 2, 3)))
    torch.testing.assert_close(var, x.detach().var((0, 2, 3)))
    return out


MAPS = [normal(2, 3, 5, 6), normal(2, 3, 4, 7, seed=1), normal(2, 4, 4, 7, seed=2)]
COLUMNS = [normal(2, 3, 9), normal(2, 3, 14, seed=1), normal(2, 4, 14, seed=2)]
MANY = [normal(2, 3, 10), normal(2, 3, 800, seed=1), normal(2, 3, 800, seed=2)]
CONTENT = [normal(2, 3, 4, 5, 3), normal(2, 2, 4, 3, 6, seed=1), normal(2, 2, 3, 3, 6, seed=2)]
SPIKES = [spikes(4, 2, 6, 5, seed=seed) for seed in range(3)]


def lambda_operands(size, scope, stride=1):
    queries = [-(-side // stride) for side in size]
    shapes = (2, 3, 4, *queries), (2, 2, 3, *size), (2, 4, *scope), (2, 4, 3)
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


# name -> operator, definition, operands
CASES = {
    'attend': (ops.attend, attention, COLUMNS),
    'attend, tiled': (ops.attend, attention, MANY),
    'attend, tiled, scaled': (partial(ops.attend, scale=-0.3), partial(attention, scale=-0.3), MANY),
    'attend, bn': (partial(ops.attend, norm='bn', scale=0.7), partial(attention, norm='bn', scale=0.7), COLUMNS),
    'attention_coefficients': (ops.attention_coefficients, definitions.coefficients, COLUMNS[:2]),
    'axis_means': (ops.axis_means, definitions.means, MAPS[:1]),
    'content_lambda': (ops.content_lambda, definitions.content_lambda, CONTENT),
    'content_matrix': (ops.content_matrix, definitions.content_matrix, CONTENT[1:]),
    'lif': (
        ops.lif,
        definitions.neurons,
        [1.5 * normal(4, 2, 3, 5), normal(2, 3, 5, seed=1), torch.tensor([2.5]).double()],
    ),
    'norm_lif': (
        fused,
        definitions.norm_neurons,
        [normal(8, 3, 4, 5), normal(3, seed=1).abs() + 0.5, normal(3, seed=2)],
    ),
    'outer_sum': (
        partial(ops.outer_sum, size=(4, 5)),
        lambda y: torch.stack([y[..., 5 + i, None] + y[..., :5] for i in range(4)], 2),
        [normal(2, 3, 9)],
    ),
    'pool_context': (ops.pool_context, definitions.pooled, MAPS[:1]),
    'position_lambda': (ops.position_lambda, definitions.position_lambda, lambda_operands((5, 12), (5, 7))),
}
for _kind, _name in (('token', 'token_qk'), ('channel', 'channel_qk'), ('self', 'spiking_self')):
    _operator = partial(getattr(ops, f'{_name}_attention'), heads=2)
    CASES[f'{_name}_attention'] = (_operator, partial(spiking_attention, _kind), SPIKES[: 2 + (_kind == 'self')])
for _mode, _name in (('dense', 'dense'), ('pooled', 'pooled'), ('kv', 'kronecker'), ('qkv', 'kronecker')):
    _name = f'{_name}_attention' + (f'_{_mode}' if _name == 'kronecker' else '')
    for _norm in ('softmax', 'bn_softmax', 'bn') if _mode in ('dense', 'kv') else ('softmax',):
        _operator, _definition = partial(getattr(ops, _name), norm=_norm), partial(map_attention, _mode, norm=_norm)
        CASES[f'{_name}, {_norm}'] = (_operator, _definition, MAPS)
for _form in ('conv', 'dense', 'tiled'):
    for _size, _scope, _settings in (
        ((5, 12), (5, 7), {}),
        ((1, 1), (5, 3), {}),
        ((3, 3), (5, 5), dict(stride=3)),
        ((9, 21), (3, 5), dict(stride=2)),
        ((5, 9), (3, 5), dict(dilation=2)),
        ((5, 9), (5, 3), dict(dilation=7)),
    ):
        CASES[f'position_lambda, {_form}, {_size}, {_settings}'] = (
            partial(ops.position_lambda, form=_form, **_settings),
            partial(definitions.position_lambda, **_settings),
            lambda_operands(_size, _scope, _settings.get('stride', 1)),
        )


def differentiate(function, operands, cotangent=None):
    """Return the output and the gradients of all operands, and the cotangent."""
    leaves = [x.detach().requires_grad_() for x in operands]
    out = function(*leaves)
    if cotangent is None:
        cotangent = normal(*out.shape, seed=9).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)], cotangent


def assert_equal(ours, expected):
    for out, other in zip(ours, expected):
        torch.testing.assert_close(out, other, rtol=1e-9, atol=1e-9)


def test_every_operator_has_a_case():
    assert {name.split(',')[0] for name in CASES} >= {*ops.__all__} - {'CoefficientBN'}


@pytest.mark.parametrize('case', CASES)
def test_any_strides(case):
    """Operands and cotangents may have any strides."""
    operator, definition, operands = CASES[case]
    expected, cotangent = differentiate(definition, operands)
    assert_equal(differentiate(operator, operands, cotangent)[0], expected)
    for seed in SEEDS:
        others = [restride(x, 10 * seed + i) for i, x in enumerate(operands)]
        assert_equal(differentiate(operator, others, restride(cotangent, seed))[0], expected)
        with torch.no_grad():
            assert_equal([operator(*others)], expected)


@pytest.mark.parametrize('case', CASES)
def test_expanded(case):
    """Every operand may be expanded along any dimension."""
    operator, definition, operands = CASES[case]
    for index, x in enumerate(operands):
        for axis in range(x.dim()):
            changed = list(operands)
            changed[index] = constant_along(axis, x)
            expected, cotangent = differentiate(definition, [y.contiguous() for y in changed])
            assert_equal(differentiate(operator, changed, cotangent)[0], expected)


@pytest.mark.parametrize('case', CASES)
def test_device_and_dtype(case, device, dtype):
    """Outputs and gradients with ``--device`` and ``--dtype`` are close to the definition in float64."""
    operator, definition, operands = CASES[case]
    operands = [x.to(dtype) for x in operands]
    expected, cotangent = differentiate(definition, [x.double() for x in operands])
    ours, _ = differentiate(operator, [x.to(device) for x in operands], cotangent.to(device, dtype))
    for out, other in zip(ours, expected):
        assert out.device.type == device.type
        assert out.dtype == dtype or case in ('attention_coefficients', 'content_matrix')  # may be float32
        assert (out.cpu().double() - other).norm() <= 16 * torch.finfo(dtype).eps * (other.norm() + 1)


LAYERS = {
    **{
        mode: (lambda mode=mode: KroneckerAttention2d(4, mode, 'qkv', residual=True), (2, 4, 5, 6))
        for mode in ('kv', 'qkv', 'dense', 'pooled')
    },
    'lambda': (lambda: LambdaLayer(8, dim_key=3, heads=2, scope=5, intra_depth=2), (2, 8, 5, 6)),
    'conv': (lambda: SpikingConv(3, 4, 3, pool=True, pool_first=True), (4, 2, 3, 7, 6)),
    'embed': (lambda: SpikingPatchEmbed(3, (4, 6), (True, False)), (4, 2, 3, 7, 6)),
    'self-attention': (
        lambda: SpikingSelfAttention(4, 2, 0.1, dict(v_threshold=0.2), legacy_order=True),
        (4, 2, 4, 3, 5),
    ),
}


@pytest.mark.parametrize('name', LAYERS)
def test_layers(name):
    """A training step on maps of any strides equals a step on contiguous maps."""
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = build().double().train()
    x = normal(*shape)
    expected, cotangent = differentiate(layer, [x])
    assert all(out.isfinite().all() and out.any() for out in expected)
    for seed in SEEDS:
        assert_equal(differentiate(layer, [restride(x, seed)], restride(cotangent, seed + 1))[0], expected)


@pytest.mark.parametrize('name', LAYERS)
def test_layers_on_device_and_dtype(name, device, dtype):
    """A training step with ``--device`` and ``--dtype`` is close to float64's, unless rounding flips spikes."""
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = build().to(dtype).train(), normal(*shape).to(dtype)
    expected, cotangent = differentiate(copy.deepcopy(layer).double(), [x.double()])
    ours, _ = differentiate(layer.to(device), [x.to(device)], cotangent.to(device, dtype))
    for out, other in zip(ours, expected):
        assert (out.dtype, out.device.type) == (dtype, device.type)
        assert out.isfinite().all()
        if x.dim() == 4:  # without spikes
            assert (out.cpu().double() - other).norm() <= 32 * torch.finfo(dtype).eps * (other.norm() + 1)
