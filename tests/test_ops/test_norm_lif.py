"""Batch norm and neurons in one operation, against one after the other."""

import copy

import pytest
import torch
import torch.nn.functional as F

from mmkron.layers import SpikingConv
from mmkron.ops import lif
from mmkron.ops.norm_lif import norm_lif


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


def test_half():
    x, parameters = operands(torch.bfloat16)
    cotangent, results = torch.randn(4, 3, *x.shape[1:], generator=torch.Generator().manual_seed(1)), []
    for joined in (True, False):
        weight, bias, mean, var = (y.clone() for y in parameters)
        leaves = [x.clone().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        if joined:
            out = norm_lif(leaves[0], 4, weight, bias, mean, var)
        else:
            out = lif(F.batch_norm(leaves[0], mean, var, weight, bias, True).unflatten(0, (4, 3)))
        results.append([out, mean, var, *torch.autograd.grad(out, leaves, cotangent.bfloat16())])
    ours, theirs = results
    assert [y.dtype for y in ours] == [y.dtype for y in theirs]
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1:3], theirs[1:3])
    torch.testing.assert_close(ours[3:], theirs[3:], rtol=2e-2, atol=2e-3)  # bfloat16 has 8 bits


def test_far_from_zero():
    """The variance is exact where the mean is a thousand times the deviation."""
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
    """A training step of the layer that uses it is that of the layer that does not."""
    torch.manual_seed(0)
    layer = SpikingConv(3, 4, 3, pool=pool, pool_first=True, neuron_cfg=dict(kind=kind)).double().train()
    x, results, used = torch.randn(4, 2, 3, 7, 6, dtype=torch.float64), [], []
    fire = SpikingConv.fire
    monkeypatch.setattr(SpikingConv, 'fire', lambda *args: used.append(1) or fire(*args))
    for joined in (True, False):
        if not joined:
            monkeypatch.setattr(SpikingConv, 'joins_norm', lambda _: False)
        model = copy.deepcopy(layer)
        out = model(x)
        (out * x[:, :, :1, : out.shape[3], : out.shape[4]]).sum().backward()
        results.append([out, *model.state_dict().values(), *(p.grad for p in model.parameters())])
    assert used == [1]
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


def test_where_the_layer_does_without():
    layer = SpikingConv(3, 4).train()
    assert layer.joins_norm()
    with torch.no_grad():
        assert not layer.joins_norm()
    assert not SpikingConv(3, 4).eval().joins_norm()
    assert not SpikingConv(3, 4, pool=True).joins_norm()
    assert not SpikingConv(3, 4, fires=False).joins_norm()
    for part in ('norm', 'neuron'):
        watched = SpikingConv(3, 4).train()
        getattr(watched, part).register_forward_hook(lambda *_: None)
        assert not watched.joins_norm()
    assert not SpikingConv(3, 4, norm_cfg=dict(type='GN', num_groups=1)).joins_norm()


@pytest.mark.parametrize(('shape', 'steps'), [((4, 5, 2, 2), 3), ((4, 5, 2, 2), 0), ((1, 5, 1, 1), 1)])
def test_exception(shape, steps):
    """Before the statistics change."""
    weight, bias, mean, var = (torch.ones(5) for _ in range(4))
    with pytest.raises(
        ValueError, match=r'steps must|more than one value a channel in training, got shape \(1, 5, 1, 1\)'
    ):
        norm_lif(torch.randn(shape), steps, weight, bias, mean, var)
    assert torch.equal(mean, torch.ones(5))
