"""Means over time: of both layouts of QKFormer's maps, in a host's registry, and what is refused."""

import pytest
import torch
from mmengine.registry import MODELS

from mmkron.models import QKFormer, SpikeRateNeck

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
    """The maps of every level are those of ``out_mode='mean'``, and so are the gradients."""
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
    ('steps', 'x', 'error', 'message'),
    [
        (
            None,
            torch.zeros(4, 2, 3, 3),
            ValueError,
            r'level 0 of inputs must .*\(T, B, C, H, W\) .*steps=None.*\(4, 2,',
        ),
        (
            2,
            torch.zeros(2, 2, 2, 3, 3),
            ValueError,
            r'level 0 of inputs must .*\(T B, C, H, W\) .*steps=2, got shape',
        ),
        (
            3,
            torch.zeros(4, 2, 3, 3),
            ValueError,
            r'steps must divide T B of level 0 .*, got 3 and shape \(4, 2, 3, 3\)',
        ),
        (None, torch.zeros(0, 2, 2, 3, 3), ValueError, 'no empty dimension'),
        (None, torch.zeros(1, 2, 2, 3, 3, dtype=torch.int), TypeError, 'floating-point tensor, got torch.int32'),
        (None, [None], TypeError, 'level 0 of inputs must be a floating-point tensor, got NoneType'),
        (None, None, TypeError, 'inputs must be a sequence, got None'),
        (None, {}, TypeError, 'inputs must be a sequence, got {}'),
    ],
)
def test_bad_input(steps, x, error, message):
    with pytest.raises(error, match=message):
        SpikeRateNeck(steps)(x)


@pytest.mark.parametrize(
    ('steps', 'error', 'message'),
    [(0, ValueError, 'steps must be at least 1, got 0'), (2.0, TypeError, 'steps must be an int, got 2.0')],
)
def test_bad_steps(steps, error, message):
    with pytest.raises(error, match=message):
        SpikeRateNeck(steps)
