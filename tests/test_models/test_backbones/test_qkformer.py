"""QKFormer: the paper's counts, the logits of the released program, independence of samples, events, options."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mmkron.converters import convert_qkformer
from mmkron.layers import LIF
from mmkron.models import QKFormer
from support.errors import raises

GOLDEN = Path(__file__).parents[2] / 'data' / 'qkformer_cifar_8-16-32.npz'
# The network that GOLDEN is of.
SMALL = dict(
    dims=(8, 16, 32),
    depths=(1, 1, 2),
    heads=8,
    mlp_ratio=2,
    steps=4,
    attentions=('qkta', 'qkta', 'ssa'),
    stem=dict(widths=(4, 8), pools=(False, False), shortcut_from=1),
    pools=(False, True),
)


def build(seed=0, **kwargs):
    """Build a network whose neurons fire at every depth."""
    torch.manual_seed(seed)
    model = QKFormer(**dict(dict(arch=SMALL), **kwargs)).double().train()
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.weight.uniform_(1, 3)
                part.bias.uniform_(0, 1)
        for _ in range(3):
            model(torch.randn(6, 3, 24, 20, dtype=torch.float64))
    return model.eval()


def images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ('arch', 'classes', 'count', 'strides'),
    [
        ('hst-10-384', 1000, 16_473_688, (4, 8, 16)),
        ('hst-10-512', 1000, 29_079_336, (4, 8, 16)),
        ('hst-10-768', 1000, 64_962_760, (4, 8, 16)),
        ('cifar', 10, 6_706_234, (1, 2, 4)),
        ('cifar', 100, 6_740_884, (1, 2, 4)),
        ('cifar10-dvs', 10, 1_504_138, (8, 16)),
        ('dvs-gesture', 11, 1_999_371, (8, 16)),
    ],
)
def test_parameters(arch, classes, count, strides):
    """The number of parameters, with the linear classifier, is the paper's."""
    with torch.device('meta'):
        model = QKFormer(arch, out_indices=tuple(range(len(strides))))
    head = model.out_channels[-1] * classes + classes
    assert sum(p.numel() for p in model.parameters()) + head == count
    assert model.out_strides == strides


@pytest.mark.parametrize('legacy', [False, True])
def test_released_program(legacy):
    """Logits equal those of the public network, as released and with the order of steps corrected."""
    golden = np.load(GOLDEN)
    weights = {name[3:]: torch.from_numpy(golden[name]) for name in golden.files if name.startswith('sd.')}
    model = QKFormer(SMALL, legacy_ssa_order=legacy).eval()
    converted = convert_qkformer(weights, model.state_dict())
    assert converted.unused == converted.missing == []
    model.load_state_dict(converted.state_dict, strict=True)
    with torch.no_grad():
        features = model(torch.from_numpy(golden['x']))[0].mean((2, 3))
    logits = torch.nn.functional.linear(features, converted.head['weight'], converted.head['bias'])
    expected = {name: torch.from_numpy(golden[name]) for name in ('legacy', 'correct')}
    assert (logits - expected['legacy' if legacy else 'correct']).abs().max() < 1e-4
    assert (logits - expected['correct' if legacy else 'legacy']).abs().max() > 1e-3


def test_samples_do_not_depend_on_their_batch():
    """A sample depends neither on the others, their order and their number nor on earlier calls."""
    model, x = build(), images(5, 3, 24, 20)
    with torch.no_grad():
        out = model(x)[0]
        assert 0.02 < out.mean() < 1
        others = torch.cat([x[:2], images(3, 3, 24, 20, seed=2)])
        torch.testing.assert_close(model(others)[0][:2], out[:2], rtol=0, atol=1e-9)
        torch.testing.assert_close(model(x.flip(0))[0].flip(0), out, rtol=0, atol=1e-9)
        torch.testing.assert_close(model(x[:3])[0], out[:3], rtol=0, atol=1e-9)
        torch.testing.assert_close(model(x)[0], out, rtol=0, atol=0)
        state = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    model(x[:4])[0].sum().backward()
    model.eval().load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(model(x[:3])[0], out[:3], rtol=0, atol=1e-9)


def test_image_at_every_step():
    """The first convolution runs once per image and gives the same as frames that repeat the image."""
    model, x = build(), images(2, 3, 24, 20)
    calls = []
    model.stem.convs[0].conv.register_forward_hook(lambda m, args, out: calls.append(len(out)))
    with torch.no_grad():
        out = model(x)[0]
        frames = model(x[:, None].repeat(1, 4, 1, 1, 1))[0]
    assert calls == [2, 8]
    torch.testing.assert_close(out, frames, rtol=0, atol=1e-9)


def test_events():
    """Frames may have any size; there are as many as steps."""
    torch.manual_seed(0)
    model = QKFormer('cifar10-dvs', steps=5, out_indices=(0, 1)).eval()
    x = torch.randint(0, 3, (2, 5, 2, 40, 56)).float()
    with torch.no_grad():
        outs = model(x)
    assert [tuple(o.shape) for o in outs] == [(2, 128, 5, 7), (2, 256, 3, 4)]


SMALL_EVENTS = dict(arch=SMALL, in_channels=2)


@pytest.mark.parametrize(
    ('kwargs', 'shape'),
    [
        (SMALL_EVENTS, (4, 6, 2, 16, 16)),  # (T, B, C, H, W)
        (dict(arch=SMALL), (4, 6, 3, 16, 16)),  # frames of images in that order
        (SMALL_EVENTS, (6, 2, 4, 16, 16)),  # (B, C, T, H, W)
        (SMALL_EVENTS, (6, 4, 16, 16, 2)),  # (B, T, H, W, C)
        (SMALL_EVENTS, (4, 2, 16, 16)),  # (T, C, H, W): one sample, or images
        (dict(arch='cifar10-dvs', in_channels=3), (16, 3, 16, 16)),
        (SMALL_EVENTS, (6, 8, 16, 16)),  # (B, T C, H, W)
    ],
)
def test_other_layouts_are_refused(kwargs, shape):
    model = QKFormer(**kwargs).eval()
    with raises(ValueError, 'x', shape):
        model(torch.zeros(shape))


def test_two_channels():
    """An arch for images repeats an image of two channels at every step; a sample of events needs a batch axis."""
    image = torch.randn(2, 2, 16, 16)
    model = QKFormer('cifar', in_channels=2, out_indices=0).eval()
    frames = image[:, None].expand(2, 4, 2, 16, 16)
    torch.testing.assert_close(model(image)[0], model(frames)[0])
    assert QKFormer(**SMALL_EVENTS).eval()(torch.zeros(4, 2, 16, 16)[None])[0].shape == (1, 32, 4, 4)


def test_out_modes():
    model, x = build(), images(2, 3, 24, 20)
    outs = {}
    for mode in ('mean', 'folded', 'steps'):
        other = QKFormer(SMALL, out_mode=mode, out_indices=(0, 2)).double().eval()
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            outs[mode] = other(x)
    for mean, folded, steps in zip(*outs.values()):
        torch.testing.assert_close(steps.mean(0), mean)
        assert torch.equal(steps.flatten(0, 1), folded)
        assert len(steps) == 4
        assert torch.equal(steps, steps.round())


def test_ranges():
    """Neurons give 0 or 1; patch embeddings and blocks add up to 2 spikes each."""
    model, x = build(out_mode='steps', out_indices=(0, 1, 2)), images(2, 3, 24, 20)
    values = []
    for module in model.modules():
        if isinstance(module, LIF):
            module.register_forward_hook(lambda m, args, out: values.append(out.unique().tolist()))
    with torch.no_grad():
        outs = model(x)
    assert all(set(of) <= {0.0, 1.0} for of in values)
    assert any(1.0 in of for of in values)
    assert [o.max().item() <= bound for o, bound in zip(outs, (4, 4, 6))] == [True] * 3


def test_pre_activation():
    """The neuron follows the sum, so that the patch embedding gives spikes."""
    model = build(embed_mode='pa')
    with torch.no_grad():
        out = model.stem(images(2, 3, 24, 20), 4)
    assert set(out.unique().tolist()) == {0.0, 1.0}
    convs = [*model.stem.convs, model.stem.shortcut]
    assert [conv.neuron is None for conv in convs] == [False, True, True]


@pytest.mark.parametrize('attentions', [('ssa', 'qkca', 'qkta'), ('qkca', 'qkca', 'qkca')])
@pytest.mark.parametrize('kind', ['lif', 'if', 'plif'])
def test_mixes(attentions, kind):
    """All parameters get a gradient with any attention in any stage and any neuron."""
    model = QKFormer(SMALL, attentions=attentions, neuron_cfg=dict(kind=kind), pool_first=True).double()
    model(images(2, 3, 24, 20))[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_drop_path():
    """A path is dropped at all steps of a sample or at none; kept paths are scaled up."""
    torch.manual_seed(0)
    model = QKFormer(SMALL, drop_path_rate=0.4).train()
    assert [b.drop_path_rate for s in model.stages for b in s if hasattr(b, 'drop_path_rate')] == pytest.approx(
        [0, 0.4 / 3, 0.8 / 3, 0.4]
    )
    block = model.stages[2][2]
    x = torch.ones(4, 200, 3, 1, 1)
    out = block.drop_path(x)
    factors = out[0, :, 0, 0, 0]
    assert torch.equal(out, factors[None, :, None, None, None].expand_as(out))
    assert set(factors.tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    assert 0.45 < (factors > 0).float().mean() < 0.75
    assert block.eval().drop_path(x) is x


@pytest.mark.parametrize(
    ('argument', 'kwargs'),
    [
        ('kind', dict(neuron_cfg=dict(kind='rlif'))),
        ('tau', dict(neuron_cfg=dict(kind='plif', tau=1.0))),
        ('widths of stem', dict(arch={**SMALL, 'dims': (16, 16, 32)})),
        ('stem', dict(arch={**SMALL, 'stem': dict(widths=(4, 8))})),
        ('legacy_ssa_order', dict(legacy_ssa_order=True, attentions=('qkta', 'qkca', 'qkta'))),
    ],
)
def test_bad_combinations(argument, kwargs):
    """tests/test_bad_values.py has single bad values."""
    with raises(ValueError, argument):
        QKFormer(**{'arch': SMALL, **kwargs})
