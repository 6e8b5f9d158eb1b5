"""Attention between spikes: values against loops over heads, exactness of the OR, gradients, precision."""

import math

import numpy as np
import pytest
import torch

from mmkron.ops import channel_qk_attention, lif, spiking_self_attention, token_qk_attention
from mmkron.ops.spiking import is_stateless
from support.errors import raises

FUNCTIONS = [token_qk_attention, channel_qk_attention, spiking_self_attention]


def spikes(*shape, seed=0, rate=0.3, dtype=torch.float64):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < rate).to(dtype)


def fire(x, threshold=0.5):
    """A LIF neuron of tau 2 and hard reset to 0, in NumPy."""
    v, out = np.zeros_like(x[0]), []
    for current in x:
        h = v + (current - v) / 2
        out.append((h >= threshold).astype(x.dtype))
        v = np.where(h >= threshold, 0, h)
    return np.stack(out)


def expected(function, operands, heads, threshold=0.5, scale=0.125):
    """Head by head, sample by sample."""
    arrays = [x.numpy() for x in operands]
    out = np.empty_like(arrays[0])
    width = arrays[0].shape[2] // heads
    for sample in range(arrays[0].shape[1]):
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            q, k, *v = (x[:, sample, part] for x in arrays)
            if function is token_qk_attention:
                result = fire(q.sum(1), threshold)[:, None] * k
            elif function is channel_qk_attention:
                result = fire(q.sum(2), threshold)[..., None] * k
            else:
                weights = np.einsum('tcn,tcm->tnm', q, k)  # query tokens n, key tokens m
                result = fire(scale * np.einsum('tnm,tcm->tcn', weights, v[0]), threshold)
            out[:, sample, part] = result
    return torch.from_numpy(out)


def operands_of(function, *shape, **kwargs):
    count = 3 if function is spiking_self_attention else 2
    return [spikes(*shape, seed=seed, **kwargs) for seed in range(count)]


@pytest.mark.parametrize('needs_grad', [False, True])
@pytest.mark.parametrize(('channels', 'tokens', 'heads'), [(8, 5, 1), (8, 5, 4), (6, 11, 2), (12, 1, 12), (4, 30, 2)])
@pytest.mark.parametrize('function', FUNCTIONS)
def test_feature(function, channels, tokens, heads, needs_grad):
    operands = operands_of(function, 4, 3, channels, tokens, rate=0.15 if function is token_qk_attention else 0.4)
    out = function(*(x.requires_grad_(needs_grad) for x in operands), heads)
    want = expected(function, [x.detach() for x in operands], heads)
    assert torch.equal(out, want)
    assert set(out.detach().unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize('threshold', [0.3, 2.5])
@pytest.mark.parametrize('function', FUNCTIONS)
def test_threshold(function, threshold):
    """A threshold of 2.5 needs a state: several spikes have to add up."""
    operands = operands_of(function, 6, 2, 8, 9, rate=0.5)
    out = function(*operands, 2, v_threshold=threshold)
    assert torch.equal(out, expected(function, operands, 2, threshold))


@pytest.mark.parametrize(
    ('neuron', 'stateless'),
    [
        (dict(), True),
        (dict(v_threshold=1.0), False),
        (dict(v_threshold=1.0, decay_input=False), True),
        (dict(v_threshold=0.5, tau=3.0), False),
        (dict(v_threshold=0.25, tau=3.0), True),
        (dict(tau=math.inf, decay_input=False), True),
        (dict(v_reset=None), False),
        (dict(v_reset=-0.5), False),
        (dict(tau=torch.tensor(2.0)), False),
    ],
)
def test_or(neuron, stateless):
    """Where the neuron is called a logical OR of counts, it is one."""
    neuron = dict(dict(v_threshold=0.5), **neuron)
    assert is_stateless(**neuron) is stateless
    counts = torch.randint(0, 4, (16, 500), generator=torch.Generator().manual_seed(0)).double()
    fired, v = lif(counts, return_state=True, **neuron)
    if stateless:
        assert torch.equal(fired, (counts > 0).double())
        assert (v == 0).all()


@pytest.mark.parametrize('function', FUNCTIONS)
def test_gradients(function):
    """Those of the definition, written with the neuron alone."""
    operands = [x.requires_grad_() for x in operands_of(function, 4, 2, 6, 5)]
    heads = 2

    def definition(q, k, *v):
        q, k, *v = (x.unflatten(2, (heads, -1)) for x in (q, k, *v))
        if function is token_qk_attention:
            out = lif(q.sum(3, keepdim=True), v_threshold=0.5) * k
        elif function is channel_qk_attention:
            out = lif(q.sum(4, keepdim=True), v_threshold=0.5) * k
        else:
            weights = torch.einsum('tbhcn,tbhcm->tbhnm', q, k)
            out = lif(0.125 * torch.einsum('tbhnm,tbhcm->tbhcn', weights, v[0]), v_threshold=0.5)
        return out.flatten(2, 3)

    cotangent = torch.randn(4, 2, 6, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    grads = [
        torch.autograd.grad(f(*operands), operands, cotangent) for f in (lambda *x: function(*x, heads), definition)
    ]
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs)
    assert all(grad.abs().sum() > 0 for grad in grads[0])


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_counts_are_exact_in_half_precision(dtype):
    """Counts above 2048 are no numbers of float16; the neuron sees them whole."""
    operands = operands_of(spiking_self_attention, 2, 1, 64, 700, rate=0.9, dtype=dtype)
    settings = dict(scale=1.0, v_threshold=20555.0)
    out = spiking_self_attention(*operands, 1, **settings)
    assert out.dtype == dtype
    want = spiking_self_attention(*(x.double() for x in operands), 1, **settings)
    assert 0 < want.mean() < 1
    assert torch.equal(out.double(), want)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(spiking_self_attention(*(x.float() for x in operands), 1, **settings).double(), want)


@pytest.mark.parametrize('function', FUNCTIONS)
@pytest.mark.parametrize('needs_grad', [False, True])
def test_settings_are_checked(function, needs_grad):
    operands = [x.requires_grad_(needs_grad) for x in operands_of(function, 4, 2, 8, 5)]
    with pytest.raises(TypeError, match='unexpected keyword argument'):
        function(*operands, 2, surrogat='atan')
    with pytest.raises(ValueError, match='surrogate must be one of'):
        function(*operands, 2, surrogate='nope')
    with pytest.raises(ValueError, match='tau must be at least 1, got 0'):
        function(*operands, 2, tau=0)


@pytest.mark.parametrize('function', FUNCTIONS)
def test_samples_are_independent(function):
    operands = operands_of(function, 4, 5, 8, 6)
    out = function(*operands, 2)
    assert torch.equal(function(*(x[:, 2:3] for x in operands), 2), out[:, 2:3])


@pytest.mark.parametrize('function', FUNCTIONS)
def test_operands_on_different_devices(function):
    operands = operands_of(function, 4, 2, 8, 5)
    operands[1] = operands[1].to('meta')
    with raises(ValueError, 'k', 'meta'):
        function(*operands, 2)


@pytest.mark.parametrize('function', FUNCTIONS)
@pytest.mark.parametrize(
    ('change', 'heads', 'error', 'message'),
    [
        (lambda x: x, 3, ValueError, 'heads must divide the channels, got heads=3 and 8 channels'),
        (lambda x: x, 0, ValueError, 'heads must be at least 1, got 0'),
        (lambda x: x[0], 2, ValueError, r'k must have shape \(T, B, C, N\) .*, got \(2, 8, 5\)'),
        (lambda x: x[..., :3], 2, ValueError, r'k must have shape \(4, 2, 8, 5\), as q, got \(4, 2, 8, 3\)'),
        (lambda x: x.float(), 2, TypeError, 'k must be of type torch.float64, as q, got torch.float32'),
        (lambda x: x.bool(), 2, TypeError, 'k must be a floating-point tensor, got torch.bool'),
    ],
)
def test_exception(function, change, heads, error, message):
    operands = operands_of(function, 4, 2, 8, 5)
    operands[1] = change(operands[1])
    with pytest.raises(error, match=message):
        function(*operands, heads)
