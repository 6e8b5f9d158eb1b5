"""KroneckerNeck: the identity at first, then a scaled attention on the chosen levels."""

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
    """No level changes at first; the maps get a gradient after one step on the scales."""
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


def test_initialization(tmp_path):
    """The initialization is the layers' own, or init_cfg, or a checkpoint."""
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


def test_levels_that_do_not_fit():
    neck, inputs = build(levels=(0, 2)), pyramid()
    with raises(ValueError, 'inputs', 2):
        neck(inputs[:2])
    with raises(ValueError, 'level 2 of inputs', (2, 6, 6, 4)):
        neck((inputs[0], inputs[1], inputs[1]))
