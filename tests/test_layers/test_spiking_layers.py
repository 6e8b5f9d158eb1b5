"""Spiking layers against their parts."""

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
from mmkron.ops import channel_qk_attention, lif, spiking_self_attention, token_qk_attention


def maps(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(layer, seed=0):
    """Draw the factors and statistics of all norms; return the layer in float64 and evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for part in layer.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.weight.data.uniform_(1, 3, generator=generator)
            part.bias.data.uniform_(0, 1, generator=generator)
            part.running_mean.uniform_(-0.5, 0.5, generator=generator)
            part.running_var.uniform_(0.5, 1.5, generator=generator)
    return layer.double().eval()


def normed(part, x, steps):
    """Apply the convolution and the norm of a SpikingConv to maps (T, B, ...)."""
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
        """The time constant is learned, starting from the given one."""
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
        """A time constant without dimensions still loads; FSDP needs one dimension."""
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
    ('cls', 'function'),
    [
        (TokenQKAttention, token_qk_attention),
        (ChannelQKAttention, channel_qk_attention),
        (SpikingSelfAttention, spiking_self_attention),
    ],
)
@pytest.mark.parametrize('threshold', [0.5, 1.7])
def test_attention(cls, function, threshold):
    """One convolution gives queries, keys and, for self-attention, values, in this order."""
    torch.manual_seed(0)
    layer, x = make(cls(8, heads=2, v_threshold=threshold)), maps(4, 3, 8, 3, 5)
    operands = lif(normed(layer.operand_map, x, 4)).flatten(3).split(8, 2)
    attended = function(*operands, 2, v_threshold=threshold).reshape(x.shape)
    out = layer(x)
    assert torch.equal(out, lif(normed(layer.project, attended, 4)))
    assert 0.05 < out.mean() < 0.95


def test_legacy_order():
    """The last neuron treats the maps of the batch as steps, ordered by step and then by sample."""
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
        """The shortcut begins after the given number of convolutions, also for odd sizes."""
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
