"""Attention between spikes: values against the definitions, exactness of the OR, precision."""

import math

import pytest
import torch

from mmkron.ops import channel_qk_attention, lif, spiking_self_attention, token_qk_attention
from mmkron.ops.spiking import is_stateless
from support.definitions import spiking_attention
from support.errors import raises

FUNCTIONS = [token_qk_attention, channel_qk_attention, spiking_self_attention]
KINDS = dict(zip(FUNCTIONS, ('token', 'channel', 'self')))


def spikes(*shape, seed=0, rate=0.3, dtype=torch.float64):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < rate).to(dtype)


def operands_of(function, *shape, **kwargs):
    count = 3 if function is spiking_self_attention else 2
    return [spikes(*shape, seed=seed, **kwargs) for seed in range(count)]


@pytest.mark.parametrize('needs_grad', [False, True])
@pytest.mark.parametrize(('channels', 'tokens', 'heads'), [(8, 5, 1), (8, 5, 4), (6, 11, 2), (12, 1, 12), (4, 30, 2)])
@pytest.mark.parametrize('function', FUNCTIONS)
def test_feature(function, channels, tokens, heads, needs_grad):
    operands = operands_of(function, 4, 3, channels, tokens, rate=0.15 if function is token_qk_attention else 0.4)
    out = function(*(x.requires_grad_(needs_grad) for x in operands), heads)
    assert torch.equal(out, spiking_attention(KINDS[function], *operands, heads=heads))
    assert set(out.detach().unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize('threshold', [0.3, 2.5])
@pytest.mark.parametrize('function', FUNCTIONS)
def test_threshold(function, threshold):
    """A threshold of 2.5 needs a state: several spikes have to add up."""
    operands = operands_of(function, 6, 2, 8, 9, rate=0.5)
    out = function(*operands, 2, v_threshold=threshold)
    assert torch.equal(out, spiking_attention(KINDS[function], *operands, v_threshold=threshold))


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
    """A neuron that is_stateless accepts is a logical OR of counts."""
    neuron = dict(dict(v_threshold=0.5), **neuron)
    assert is_stateless(**neuron) is stateless
    counts = torch.randint(0, 4, (16, 500), generator=torch.Generator().manual_seed(0)).double()
    fired, v = lif(counts, return_state=True, **neuron)
    if stateless:
        assert torch.equal(fired, (counts > 0).double())
        assert (v == 0).all()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_counts_are_exact_in_half_precision(dtype):
    """Counts above 2048, which float16 cannot represent, are exact."""
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
def test_operands_on_different_devices(function):
    operands = operands_of(function, 4, 2, 8, 5)
    operands[1] = operands[1].to('meta')
    with raises(ValueError, 'k', 'meta'):
        function(*operands, 2)


@pytest.mark.parametrize('function', FUNCTIONS)
def test_unknown_settings_are_refused(function):
    with pytest.raises(TypeError, match='surrogat'):
        function(*operands_of(function, 4, 2, 8, 5), 2, surrogat='atan')
