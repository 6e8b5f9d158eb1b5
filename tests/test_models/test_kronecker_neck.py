"""KroneckerNeck: the identity at the start, the operator with a scale afterwards, on chosen levels only."""

import pytest
import torch

from mmkron.layers import KroneckerAttention2d
from mmkron.models import KroneckerNeck
from support.errors import raises

CHANNELS = (4, 6, 8)


def build(**kwargs):
    torch.manual_seed(0)
    neck = KroneckerNeck(CHANNELS, **kwargs)
    neck.init_weights()
    return neck.double()


def pyramid():
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(2, channels, 13 >> i, 9 >> i, generator=generator, dtype=torch.float64)
        for i, channels in enumerate(CHANNELS)
    )


@pytest.mark.parametrize('mode', ['kv', 'qkv', 'dense', 'pooled'])
def test_starts_as_the_identity_and_learns(mode):
    """No level changes, yet after one step on the scales the maps have a gradient."""
    neck, inputs = build(mode=mode), pyramid()
    outs = neck(inputs)
    assert isinstance(outs, tuple)
    assert all(torch.equal(out, x) for out, x in zip(outs, inputs))
    sum(out.pow(3).sum() for out in outs).backward()
    assert all(p.grad is not None for p in neck.parameters())
    assert all(scale.grad.abs() > 0 for scale in neck.scales.values())
    with torch.no_grad():
        for scale in neck.scales.values():
            scale -= 1e-3 * scale.grad
    sum(out.pow(3).sum() for out in neck(inputs)).backward()
    assert all(p.grad.abs().max() > 0 for p in neck.parameters())


@pytest.mark.parametrize('mode', ['kv', 'qkv', 'dense', 'pooled'])
@pytest.mark.parametrize(('levels', 'refined'), [(None, (0, 1, 2)), (-1, (2,)), ((0, -2), (0, 1)), ([1], (1,))])
def test_adds_the_scaled_attention_to_the_chosen_levels(mode, levels, refined):
    neck, inputs = build(mode=mode, levels=levels, use_scale=True, key_channels=3), pyramid()
    assert neck.levels == refined
    for value, scale in enumerate(neck.scales.values(), 1):
        torch.nn.init.constant_(scale, value / 4)
    outs = neck(inputs)
    for level, (x, out) in enumerate(zip(inputs, outs)):
        if level not in refined:
            assert out is x
            continue
        layer = neck.attentions[str(level)]
        assert layer.scale == pytest.approx(3**-0.5)
        plain = KroneckerAttention2d(CHANNELS[level], mode, 'qkv', key_channels=3, scale=3**-0.5).double()
        plain.load_state_dict(layer.state_dict())
        torch.testing.assert_close(out, x + (refined.index(level) + 1) / 4 * plain(x))


def test_list_of_the_caller_is_left_as_it_is():
    levels, inputs = [0, -1], list(pyramid())
    neck, before = build(levels=levels), list(inputs)
    neck(inputs)
    assert levels == [0, -1]
    assert all(x is y for x, y in zip(inputs, before))


def test_initialization(tmp_path):
    """The layers' own by default, a given one instead, a checkpoint over both."""
    for init_cfg, least, most in (
        (None, 0.9 * (3 / 4) ** 0.5, (3 / 4) ** 0.5),  # Xavier uniform: sqrt(6 / (4 + 4))
        (dict(type='Constant', layer='Conv1d', val=0.5), 0.5, 0.5),
    ):
        neck = build(levels=0, init_cfg=init_cfg)
        for name in ('query_map', 'key_map', 'value_map'):
            bound = getattr(neck.attentions['0'], name).weight.abs().max()
            assert least / 1.2 <= bound <= most, name
        assert neck.scales['0'] == 0
    torch.nn.init.constant_(neck.scales['0'], 0.25)
    torch.save(neck.state_dict(), tmp_path / 'neck.pth')
    loaded = build(levels=0, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'neck.pth')))
    assert all(torch.equal(value, neck.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_arguments_reach_the_layers():
    layer = build(levels=0, maps='v', norm='bn').attentions['0']
    assert layer.norm == 'bn'
    assert isinstance(layer.query_map, torch.nn.Identity)
    assert isinstance(layer.value_map, torch.nn.Conv1d)


@pytest.mark.parametrize(
    ('kwargs', 'error', 'argument', 'value'),
    [
        (dict(in_channels=256), TypeError, 'in_channels', 256),
        (dict(in_channels=()), ValueError, 'in_channels', ()),
        (dict(in_channels=(4, 0)), ValueError, 'in_channels', 0),
        (dict(levels=3), ValueError, 'levels', 3),
        (dict(levels=()), ValueError, 'levels', ()),
        (dict(levels=(0, -3)), ValueError, 'levels', (0, -3)),
        (dict(levels='0'), TypeError, 'levels', '0'),
        (dict(key_channels=0, use_scale=True), ValueError, 'key_channels', 0),
        (dict(use_scale=1), ValueError, 'use_scale', 1),
        (dict(mode='x'), ValueError, 'mode', 'x'),
    ],
    ids=str,
)
def test_misuse(kwargs, error, argument, value):
    with raises(error, argument, value):
        KroneckerNeck(**{**dict(in_channels=CHANNELS), **kwargs})


def test_levels_that_do_not_fit():
    neck, inputs = build(levels=(0, 2)), pyramid()
    with raises(ValueError, 'inputs', 2):
        neck(inputs[:2])
    with raises(ValueError, 'level 2 of inputs', (2, 6, 6, 4)):
        neck((inputs[0], inputs[1], inputs[1]))
