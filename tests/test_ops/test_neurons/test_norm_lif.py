"""The fused operation of batch norm and neurons against one after the other."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from mmkron.layers import SpikingConv, neuron
from mmkron.ops import lif
from mmkron.ops.neurons.norm_lif import norm_lif
from support.errors import raises

NAMES = ('weight', 'bias', 'running_mean', 'running_var')


def operands(dtype=torch.float64, channels=5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * 3, channels, 6, 7, generator=generator, dtype=torch.float64).to(dtype)
    weight, bias = (2 * torch.rand(channels, generator=generator, dtype=torch.float64) for _ in range(2))
    mean, var = (torch.rand(channels, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, [y.to(torch.float64 if dtype == torch.float64 else torch.float32) for y in (weight, bias, mean, var)]


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    'settings', [dict(), dict(v_reset=None, detach_reset=False, surrogate='atan'), dict(tau=3.0, decay_input=False)]
)
def test_feature(settings, layout):
    x, parameters = operands()
    results = []
    for joined in (True, False):
        weight, bias, mean, var = (y.clone() for y in parameters)
        leaves = [x.clone(memory_format=layout).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        if joined:
            out = norm_lif(leaves[0], 4, leaves[1], leaves[2], mean, var, 0.3, 1e-3, **settings)
        else:
            currents = F.batch_norm(leaves[0], mean, var, leaves[1], leaves[2], True, 0.3, 1e-3)
            out = lif(currents.unflatten(0, (4, 3)), **settings)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        results.append([out, mean, var, *torch.autograd.grad(out, leaves, cotangent)])
    assert 0.05 < results[0][0].mean() < 0.95
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_learnable_tau():
    x, (weight, bias, mean, var) = operands()
    tau = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    out = norm_lif(x, 4, weight, bias, mean.clone(), var.clone(), tau=tau)
    expected = lif(F.batch_norm(x, mean, var, weight, bias, True).unflatten(0, (4, 3)), tau=tau)
    grads = [torch.autograd.grad(y.square().sum() + (y * x.view_as(y)).sum(), tau)[0] for y in (out, expected)]
    torch.testing.assert_close(*grads)
    assert grads[0] != 0


def test_far_from_zero():
    """The variance is exact although the mean is a thousand times the deviation."""
    x, (weight, bias, mean, var) = operands(torch.float32)
    x = x + 1000
    norm_lif(x, 4, weight, bias, mean, var, momentum=1.0)
    expected = x.double()
    torch.testing.assert_close(mean, expected.mean((0, 2, 3)).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(var, expected.var((0, 2, 3)).float(), rtol=1e-5, atol=0)


def test_only_the_input_is_kept():
    x, (weight, bias, mean, var) = operands()
    x.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm_lif(x, 4, weight, bias, mean, var)
    assert [t.data_ptr() for t in kept if t.numel() > 5] == [x.data_ptr()]


@pytest.mark.parametrize('kind', ['lif', 'plif', 'if'])
@pytest.mark.parametrize('pool', [False, True])
def test_layer(monkeypatch, kind, pool):
    """A training step of a layer is the same with and without fusion."""
    torch.manual_seed(0)
    layer = SpikingConv(3, 4, 3, pool=pool, pool_first=True, neuron_cfg=dict(kind=kind)).double().train()
    x, results, used = torch.randn(4, 2, 3, 7, 6, dtype=torch.float64), [], []
    fused = neuron.norm_lif
    monkeypatch.setattr(neuron, 'norm_lif', lambda *args, **kwargs: used.append(1) or fused(*args, **kwargs))
    for joined in (True, False):
        if not joined:
            monkeypatch.setattr(neuron, 'can_fuse', lambda *_: False)
        model = copy.deepcopy(layer)
        out = model(x)
        (out * x[:, :, :1, : out.shape[3], : out.shape[4]]).sum().backward()
        results.append([out, *model.state_dict().values(), *(p.grad for p in model.parameters())])
    assert used == [1]
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


def test_the_layer_runs_them_apart(monkeypatch):
    """A layer does not fuse without gradients, in evaluation, with pooling in between, with hooks or another norm."""
    monkeypatch.setattr(neuron, 'norm_lif', None)
    x = torch.randn(4, 2, 3, 7, 6)
    with pytest.raises(TypeError):
        SpikingConv(3, 4).train()(x)
    with torch.no_grad():
        SpikingConv(3, 4).train()(x)
    SpikingConv(3, 4).eval()(x)
    SpikingConv(3, 4, pool=True)(x)
    SpikingConv(3, 4, fires=False)(x)
    SpikingConv(3, 4, norm_cfg=dict(type='GN', num_groups=1))(x)
    for part in ('norm', 'neuron'):
        watched, seen = SpikingConv(3, 4).train(), []
        getattr(watched, part).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        watched(x)
        assert seen == [1]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision(dtype):
    """Cast parameters are computed in float32; gradients and statistics keep their dtype."""
    x, parameters = operands(dtype)
    cotangent, results = torch.randn(4, 3, *x.shape[1:], generator=torch.Generator().manual_seed(1)).to(dtype), []
    for cast in (dtype, torch.float32):
        weight, bias, mean, var = (y.to(dtype).to(cast) for y in parameters)
        leaves = [x.clone().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        out = norm_lif(leaves[0], 4, weight, bias, mean, var)
        grads = torch.autograd.grad(out, leaves, cotangent)
        assert [y.dtype for y in (*grads, mean, var)] == [dtype, *[cast] * 4]
        results.append([y.float() for y in (out, *grads, mean, var)])
    assert torch.equal(*(each[0] for each in results))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=2e-3)


BAD = [
    ('steps', 3, ValueError, 3),
    ('steps', 0, ValueError, 0),
    ('steps', 2.0, TypeError, 2.0),
    ('x', torch.randn(1, 5, 1, 1), ValueError, (1, 5, 1, 1)),  # one value per channel
    ('x', torch.randn(0, 5, 2, 2), ValueError, (0, 5, 2, 2)),
    ('x', torch.randn(4, 5, 0, 2), ValueError, (4, 5, 0, 2)),
    ('x', torch.randn(4, 0, 2, 2), ValueError, (4, 0, 2, 2)),
    ('x', torch.randn(2, 2, 5, 2, 2), ValueError, (2, 2, 5, 2, 2)),
    ('x', torch.ones(4, 5, 2, 2, dtype=torch.int32), TypeError, torch.int32),
    ('x', [1.0], TypeError, 'list'),
    ('momentum', -0.1, ValueError, -0.1),
    ('momentum', math.nan, ValueError, math.nan),
    ('momentum', None, TypeError, None),
    ('eps', -1e-5, ValueError, -1e-5),
    ('eps', math.inf, ValueError, math.inf),
    ('eps', '1e-5', TypeError, '1e-5'),
    ('tau', 0.5, ValueError, 0.5),
]
for _name in NAMES:
    BAD += [
        (_name, torch.ones(40), ValueError, (40,)),
        (_name, torch.ones(0), ValueError, (0,)),
        (_name, torch.ones(5, 1), ValueError, (5, 1)),
        (_name, None, TypeError, 'NoneType'),
        (_name, torch.ones(5, dtype=torch.int64), TypeError, torch.int64),
        (_name, torch.ones(5, dtype=torch.float64), TypeError, torch.float64),
        (_name, torch.ones(5, device='meta'), ValueError, 'meta'),
    ]


@pytest.mark.parametrize(('argument', 'bad', 'error', 'value'), BAD)
def test_exception(argument, bad, error, value):
    """Nothing is read and no statistics change before all arguments are checked."""
    good = dict(x=torch.randn(4, 5, 2, 2), steps=1, **{name: torch.ones(5) for name in NAMES})
    with raises(error, argument, value):
        norm_lif(**{**good, argument: bad})
    assert all(torch.equal(good[name], torch.ones(5)) for name in NAMES)
