"""Constructors initialize like init_weights, but without checkpoints, logs and effects on other random numbers."""

import pytest
import torch
import torch.nn as nn
from mmengine.model import BaseModule, Sequential

from mmkron.layers import LambdaLayer
from mmkron.layers.initialize import initialize

KAIMING = dict(type='Kaiming', layer='Conv2d')


class Net(BaseModule):
    """Network of a convolution with an init_cfg and a child with an initialization of its own."""

    def __init__(self, init_cfg=KAIMING):
        super().__init__(init_cfg)
        self.conv = nn.Conv2d(16, 32, 3)
        self.own = Sequential(LambdaLayer(16, scope=5))
        initialize(self)


def test_values():
    """Weights are Kaiming normal, sqrt(2 / fan_out), except in the child with its own rule."""
    torch.manual_seed(0)
    net = Net()
    assert net.conv.weight.std().item() == pytest.approx((2 / (32 * 9)) ** 0.5, rel=0.05)
    assert net.conv.weight.abs().max() > 3 * (2 / (32 * 9)) ** 0.5
    assert net.conv.bias.count_nonzero() == 0
    layer = net.own[0]
    keys = layer.qkv_map.weight[layer.widths[0] : sum(layer.widths[:2])]
    assert keys.std().item() == pytest.approx(16**-0.5, rel=0.15)
    assert layer.position_table.std().item() == pytest.approx(1, rel=0.15)


def test_random_numbers():
    """A seed determines the network, and the random numbers drawn afterwards do not correlate with it."""
    torch.manual_seed(3)
    net = Net()
    following = torch.randn(net.conv.weight.numel())
    correlation = torch.corrcoef(torch.stack([net.conv.weight.detach().flatten(), following]))[0, 1]
    assert abs(correlation) < 5 / len(following) ** 0.5
    state = torch.get_rng_state()
    initialize(net)
    assert torch.equal(torch.get_rng_state(), state)
    weights = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        weights.append(Net().conv.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_init_weights_comes_after_as_ever(monkeypatch):
    """init_weights initializes once more, from the current random numbers, and logs; the constructor does not log."""
    logged = []
    monkeypatch.setattr(BaseModule, '_dump_init_info', lambda module: logged.append(type(module).__name__))
    net = Net()
    assert logged == []
    torch.manual_seed(7)
    net.init_weights()
    torch.manual_seed(7)
    expected = torch.empty_like(net.conv.weight)
    nn.init.kaiming_normal_(expected, mode='fan_out', nonlinearity='relu')
    assert torch.equal(net.conv.weight, expected)
    assert logged == ['Net']
    assert net.is_init
    net.conv.weight.data.zero_()
    net.init_weights()  # a second call of MMEngine's changes nothing
    assert net.conv.weight.count_nonzero() == 0


@pytest.mark.parametrize('as_list', [False, True])
def test_checkpoint(tmp_path, as_list):
    """Only init_weights reads the checkpoint, which may be missing while a network is built."""
    path = tmp_path / 'weights.pth'
    pretrained = dict(type='Pretrained', checkpoint=str(path))
    init_cfg = [KAIMING, pretrained] if as_list else pretrained
    net, source = Net(init_cfg), Net()
    assert net.init_cfg == init_cfg
    assert (net.conv.bias.count_nonzero() == 0) == as_list
    torch.save(source.state_dict(), path)
    net.init_weights()
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in net.state_dict().items())


def test_meta_device():
    with torch.device('meta'):
        assert all(p.is_meta for p in Net().parameters())


class Extended(Net):
    """Network whose init_weights needs a module that its constructor adds last."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(2, 2)

    def init_weights(self):
        super().init_weights()
        nn.init.constant_(self.extra.weight, 2)


def test_subclass():
    net = Extended()
    assert not (net.extra.weight == 2).any()
    net.init_weights()
    assert (net.extra.weight == 2).all()
