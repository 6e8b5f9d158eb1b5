"""Spiking layers: each against its parts, written out."""

import math

import pytest
import torch
import torch.nn.functional as F

from mmkron.layers import (
    LIF,
    ChannelQKAttention,
    SpikingConv,
    SpikingMLP,
    SpikingPatchEmbed,
    SpikingSelfAttention,
    TokenQKAttention,
)
from mmkron.ops import channel_qk_attention, lif, token_qk_attention


def maps(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(layer, seed=0):
    """In float64, with norms of their own factors and statistics, in evaluation."""
    generator = torch.Generator().manual_seed(seed)
    for part in layer.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.weight.data.uniform_(1, 3, generator=generator)
            part.bias.data.uniform_(0, 1, generator=generator)
            part.running_mean.uniform_(-0.5, 0.5, generator=generator)
            part.running_var.uniform_(0.5, 1.5, generator=generator)
    return layer.double().eval()


def normed(part, x, steps):
    """Convolution and norm of a SpikingConv on maps (T, B, ...), without pooling and neuron."""
    return part.norm(part.conv(x.flatten(0, 1))).unflatten(0, (steps, -1))


class TestLIF:
    def test_lif(self):
        x = maps(5, 3, 4)
        for settings in (
            dict(),
            dict(tau=3.0, v_threshold=0.4, v_reset=None),
            dict(decay_input=False, surrogate='atan'),
        ):
            assert torch.equal(LIF(**settings)(x), lif(x, **settings))

    def test_if(self):
        x = maps(5, 3, 4)
        expected = lif(x, tau=math.inf, decay_input=False)
        assert torch.equal(LIF('if')(x), expected)
        assert torch.equal(LIF('if', tau=3.0)(x), expected)

    def test_plif(self):
        """One time constant, learnt from the given one on."""
        neuron, x = LIF('plif', tau=3.0).double(), maps(5, 3, 4)
        assert neuron.settings()['tau'].item() == pytest.approx(3)
        torch.testing.assert_close(neuron(x), lif(x, tau=3.0))
        before = neuron.weight.item()
        neuron(x).sum().backward()
        torch.optim.SGD(neuron.parameters(), lr=0.1).step()
        assert neuron.weight.item() != before
        assert [name for name, _ in neuron.named_parameters()] == ['weight']
        assert list(LIF().parameters()) == list(LIF('if').parameters()) == []

    def test_plif_of_older_checkpoints(self):
        """Its time constant had no dimensions, of which FSDP takes no parameter."""
        layer = SpikingConv(3, 4, neuron_cfg=dict(kind='plif', tau=3.0))
        assert layer.neuron.weight.shape == (1,)
        assert layer.neuron.weight.item() == pytest.approx(-math.log(2))
        older = {**layer.state_dict(), 'neuron.weight': torch.tensor(0.75)}
        layer.load_state_dict(older, strict=True)
        assert layer.neuron.weight.tolist() == [0.75]
        assert older['neuron.weight'].shape == ()
        layer.load_state_dict({**older, 'neuron.weight': torch.tensor([0.5])})
        assert layer.neuron.weight.tolist() == [0.5]

    def test_state(self):
        x, neuron = maps(5, 3, 4), LIF()
        first, v = neuron(x[:2], return_state=True)
        assert torch.equal(torch.cat([first, neuron(x[2:], v)]), neuron(x))


class TestSpikingConv:
    @pytest.mark.parametrize('pool_first', [False, True])
    @pytest.mark.parametrize('pool', [False, True])
    def test_order(self, pool, pool_first):
        torch.manual_seed(0)
        layer, x = make(SpikingConv(3, 4, 3, pool=pool, pool_first=pool_first)), maps(4, 2, 3, 7, 5)
        y = F.conv2d(x.flatten(0, 1), layer.conv.weight, padding=1)
        if pool and pool_first:
            y = F.max_pool2d(y, 3, 2, 1)
        n = layer.norm
        y = F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias)
        if pool and not pool_first:
            y = F.max_pool2d(y, 3, 2, 1)
        out = layer(x)
        assert torch.equal(out, lif(y.unflatten(0, (4, 2))))
        assert out.shape == ((4, 2, 4, 4, 3) if pool else (4, 2, 4, 7, 5))
        assert 0.05 < out.mean() < 0.95

    def test_the_same_at_every_step(self):
        torch.manual_seed(0)
        layer, x = make(SpikingConv(3, 4, 3)), maps(2, 3, 7, 5)
        assert torch.equal(layer(x, 5), layer(x.expand(5, *x.shape)))

    def test_without_a_neuron(self):
        torch.manual_seed(0)
        layer, x = make(SpikingConv(3, 4, fires=False)), maps(4, 2, 3, 7, 5)
        assert torch.equal(layer(x), normed(layer, x, 4))


@pytest.mark.parametrize(
    ('cls', 'function'), [(TokenQKAttention, token_qk_attention), (ChannelQKAttention, channel_qk_attention)]
)
@pytest.mark.parametrize('threshold', [0.5, 1.7])
def test_qk_attention(cls, function, threshold):
    torch.manual_seed(0)
    layer, x = make(cls(8, heads=2, v_threshold=threshold)), maps(4, 3, 8, 3, 5)
    q, k = lif(normed(layer.operand_map, x, 4)).flatten(3).chunk(2, 2)
    attended = function(q, k, 2, v_threshold=threshold).reshape(x.shape)
    out = layer(x)
    assert torch.equal(out, lif(normed(layer.project, attended, 4)))
    assert 0.05 < out.mean() < 0.95


def test_legacy_order():
    """The last neuron takes the maps of the batch for steps, in the order of steps, then samples."""
    torch.manual_seed(0)
    layer, x = make(SpikingSelfAttention(8, heads=2, legacy_order=True)), maps(4, 3, 8, 3, 5)
    correct = SpikingSelfAttention(8, heads=2).double().eval()
    correct.load_state_dict(layer.state_dict())
    inputs = []
    layer.project.neuron.register_forward_hook(lambda m, args, out: inputs.append(args[0]))
    out = layer(x)
    assert torch.equal(out, lif(inputs[0].reshape(12, 8, 3, 5)).reshape(x.shape))
    assert torch.equal(correct(x), lif(inputs[0]))
    assert not torch.equal(out, correct(x))


def test_mlp():
    torch.manual_seed(0)
    layer, x = make(SpikingMLP(6, 15)), maps(4, 3, 6, 3, 5)
    hidden = lif(normed(layer.expand, x, 4))
    assert hidden.shape[2] == 15
    assert torch.equal(layer(x), lif(normed(layer.project, hidden, 4)))


class TestSpikingPatchEmbed:
    @pytest.mark.parametrize('mode', ['aba', 'pa'])
    @pytest.mark.parametrize('shortcut_from', [0, 1])
    def test_sum(self, mode, shortcut_from):
        """Odd sizes; the shortcut begins behind the given number of convolutions."""
        torch.manual_seed(0)
        layer = make(SpikingPatchEmbed(3, (4, 6, 6), (True, False, True), shortcut_from, mode))
        x = maps(4, 2, 3, 13, 9)
        outs = [x]
        for conv in layer.convs:
            outs.append(conv(outs[-1]))
        branch = layer.shortcut(outs[shortcut_from])
        total = outs[-1] + branch
        out = layer(x)
        assert torch.equal(out, total if mode == 'aba' else lif(total))
        assert out.shape == (4, 2, 6, 4, 3)
        assert out.max() == (2 if mode == 'aba' else 1)
        assert layer.shortcut.conv.stride == ((4, 4), (2, 2))[shortcut_from]
        torch.testing.assert_close(layer(x[0], 4), layer(x[:1].expand(4, 2, 3, 13, 9)))

    @pytest.mark.parametrize(
        ('kwargs', 'error', 'message'),
        [
            (
                dict(widths=(4,), pools=(True, False)),
                ValueError,
                r'widths.*got \(4,\), \(True, False\)',
            ),
            (dict(shortcut_from=2), ValueError, 'more than shortcut_from; got .* and 2'),
            (dict(shortcut_from=-1), ValueError, 'shortcut_from must be at least 0, got -1'),
            (dict(mode='post'), ValueError, r"mode must be one of \('aba', 'pa'\), got 'post'"),
        ],
    )
    def test_exception(self, kwargs, error, message):
        with pytest.raises(error, match=message):
            SpikingPatchEmbed(3, **dict(dict(widths=(4, 4), pools=(True, False)), **kwargs))


@pytest.mark.parametrize('cls', [TokenQKAttention, ChannelQKAttention, SpikingSelfAttention])
@pytest.mark.parametrize(
    ('kwargs', 'error', 'message'),
    [
        (dict(heads=3), ValueError, 'heads must divide channels, got heads=3 and channels=8'),
        (dict(channels=0), ValueError, 'channels must be at least 1, got 0'),
        (dict(heads=2.0), TypeError, 'heads must be an int, got 2.0'),
        (dict(neuron_cfg=dict(tau=0.5)), ValueError, 'tau must be at least 1, got 0.5'),
        (dict(v_threshold='0'), TypeError, "v_threshold must be a number, got '0'"),
    ],
)
def test_attention_exception(cls, kwargs, error, message):
    with pytest.raises(error, match=message):
        cls(**dict(dict(channels=8, heads=2), **kwargs))
