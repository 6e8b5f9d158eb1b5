"""SpikeRateNeck: means over time of both layouts of QKFormer's maps."""

import pytest
import torch
from mmengine.registry import MODELS

from mmkron.models import QKFormer, SpikeRateNeck
from support.errors import raises

ARCH = dict(
    dims=(8, 16, 32),
    depths=(1, 1, 1),
    heads=4,
    mlp_ratio=1,
    steps=3,
    attentions=('qkta', 'qkta', 'ssa'),
    stem=dict(widths=(8, 8), pools=(True, True), shortcut_from=1),
    pools=(True, False),
)


def test_values():
    steps = torch.tensor([[[[[1.0, 0.0]]], [[[2.0, 4.0]]]], [[[[0.0, 0.0]]], [[[1.0, 2.0]]]]])  # (T=2, B=2, 1, 1, 2)
    expected = torch.tensor([[[[0.5, 0.0]]], [[[1.5, 3.0]]]])
    (rates,) = SpikeRateNeck()(steps)
    assert torch.equal(rates, expected)
    (rates,) = SpikeRateNeck(steps=2)(steps.flatten(0, 1))
    assert torch.equal(rates, expected)


@pytest.mark.parametrize('mode', ['folded', 'steps'])
def test_after_the_backbone(mode):
    """Maps and gradients equal those of ``out_mode='mean'`` on every level."""
    torch.manual_seed(0)
    mean = QKFormer(ARCH, out_indices=(0, 1, 2)).train()
    other = QKFormer(ARCH, out_indices=(0, 1, 2), out_mode=mode).train()
    other.load_state_dict(mean.state_dict())
    neck = MODELS.build(dict(type='mmkron.SpikeRateNeck', steps=3 if mode == 'folded' else None))
    x = torch.randn(2, 3, 33, 40)
    expected, maps = mean(x), neck(other(x))
    for ours, theirs in zip(maps, expected):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs)
    for outs in (expected, maps):
        sum((out**2).sum() for out in outs).backward()
    for (name, ours), theirs in zip(other.named_parameters(), mean.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f'{name}: {text}')


@pytest.mark.parametrize(
    ('steps', 'shape', 'argument'),
    [(None, (4, 2, 3, 3), 'level 0 of inputs'), (2, (2, 2, 2, 3, 3), 'level 0 of inputs'), (3, (4, 2, 3, 3), 'steps')],
)
def test_bad_input(steps, shape, argument):
    with raises(ValueError, argument, shape):
        SpikeRateNeck(steps)(torch.zeros(shape))
