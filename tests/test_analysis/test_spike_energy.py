"""Activity and operations of the layers of a spiking network, against counts of every addition."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from mmkron.analysis import LayerActivity, Operations, SpikeActivity, measure_activity
from mmkron.analysis.spike_energy import convolution_events, convolution_macs, dense_macs
from mmkron.layers import SpikingConv, SpikingSelfAttention, TokenQKAttention
from mmkron.layers.spiking import SpikingAttention
from mmkron.models import QKFormer
from mmkron.ops import spiking_self_attention
from support.errors import raises

SIZE = (13, 10)
STEPS = 3


def lively(model):
    """Return the model in evaluation mode, with norms that make neurons fire."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 1, 3)
            nn.init.uniform_(module.bias, 0, 0.6)
            module.running_var.fill_(0.05)
    return model.eval()


def tiny(attentions=('qkta', 'ssa'), in_channels=3, **kwargs):
    torch.manual_seed(0)
    stem = dict(widths=(4, 8), pools=(False, True), shortcut_from=1)
    arch = dict(dims=(8, 16), depths=(1, 2), heads=2, mlp_ratio=2, steps=STEPS, stem=stem, pools=(True, False))
    arch['attentions'] = attentions
    return lively(QKFormer(arch, in_channels=in_channels, **kwargs))


def images(*batches):
    return [torch.randn(batch, 3, *SIZE) for batch in batches]


def frames(*batches):
    return [torch.poisson(torch.full((batch, STEPS, 2, *SIZE), 0.3)) for batch in batches]


def conv_inputs(model, batches):
    """Return the inputs (N, C, H, W) of each SpikingConv's convolution, one tensor per batch."""
    inputs, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, SpikingConv):
            keep = inputs.setdefault(name, [])
            handles.append(module.conv.register_forward_hook(lambda m, args, out, keep=keep: keep.append(args[0])))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return inputs


def count_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(
    ('kernel', 'stride', 'padding', 'dilation', 'groups', 'size'),
    [
        (1, 1, 0, 1, 1, (3, 4)),
        (1, 2, 0, 1, 1, (5, 4)),
        (3, 1, 1, 1, 1, (4, 5)),
        (3, 2, 1, 1, 2, (5, 6)),
        (3, 1, 2, 2, 1, (6, 3)),
        ((3, 1), (2, 1), (0, 1), (1, 1), 1, (5, 2)),
    ],
)
def test_events_of_a_convolution(kernel, stride, padding, dilation, groups, size):
    """Every value other than 0 in the window of an output is an addition."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, kernel, stride, padding, dilation, groups, bias=False)
    x = torch.randint(0, 3, (2, 4, *size)).float()
    out = conv(x)
    additions = macs = 0
    for n, c, i, j in itertools.product(*map(range, out.shape)):
        first = c // (6 // groups) * (4 // groups)
        taps = itertools.product(range(first, first + 4 // groups), *map(range, conv.kernel_size))
        for channel, a, b in taps:
            macs += 1
            y = i * conv.stride[0] - conv.padding[0] + a * conv.dilation[0]
            z = j * conv.stride[1] - conv.padding[1] + b * conv.dilation[1]
            if 0 <= y < size[0] and 0 <= z < size[1]:
                additions += x[n, channel, y, z].item() != 0
    assert convolution_events(conv, x) == additions
    assert convolution_macs(conv, x) == dense_macs(conv, x, out) == macs


@pytest.mark.parametrize('kind', ['image', 'frames'])
def test_convolutions(kind):
    """Additions are counted by a convolution of ones, over two batches of different sizes."""
    model = tiny(in_channels=3 if kind == 'image' else 2)
    batches = images(3, 1) if kind == 'image' else frames(3, 1)
    activity = measure_activity(model, batches)
    layers = {layer.name: layer for layer in activity.layers}
    assert activity.samples == 4
    inputs = conv_inputs(model, batches)
    assert inputs.keys() == {layer.name for layer in activity.layers if layer.kind == 'convolution'}
    kinds = set()
    for name, maps in inputs.items():
        layer, conv = layers[name], model.get_submodule(name).conv
        once = kind == 'image' and name == 'stem.convs.0'
        assert (layer.steps, layer.once) == (STEPS, once)
        x = torch.cat(maps).double()
        assert len(x) == 4 * (1 if once else STEPS)
        assert layer.mean == pytest.approx(x.mean().item(), rel=1e-12)
        assert layer.nonzero == (x != 0).double().mean().item()
        assert layer.maximum == x.max().item()
        values = set(x.unique().tolist())
        binary, whole = values <= {0, 1}, all(value >= 0 and value == int(value) for value in values)
        assert layer.values == ('binary' if binary else 'integer' if whole else 'real')
        kinds.add(layer.values)
        out = F.conv2d((x != 0).double(), torch.ones_like(conv.weight).double(), None, conv.stride, conv.padding)
        assert layer.events == out.sum().item() / 4
        assert layer.macs == out[0].numel() * conv.in_channels * math.prod(conv.kernel_size)
    assert kinds == {'binary', 'integer', *(['real'] if kind == 'image' else [])}


@pytest.mark.parametrize('size', [SIZE, (6, 8)])
@pytest.mark.parametrize('kind', ['qkta', 'qkca', 'ssa'])
def test_attentions(kind, size):
    """Additions are the products of operands that are not 0, each written out."""
    model = tiny((kind, 'ssa'))  # heads of 8 channels in the end, and 12 tokens, or 4
    batches = [torch.randn(3, 3, *size), torch.randn(1, 3, *size)]
    activity = measure_activity(model, batches)
    layers = {layer.name: layer for layer in activity.layers}
    rates = {neuron.name: neuron.rate for neuron in activity.neurons}
    inputs = conv_inputs(model, batches)
    for name, module in model.named_modules():
        if not isinstance(module, SpikingAttention):
            continue
        with torch.no_grad():
            spikes = [module.operand_map(x.unflatten(0, (STEPS, -1))) for x in inputs[f'{name}.operand_map']]
        spikes = torch.cat(spikes, 1).flatten(3).double()
        operands = [x.unflatten(2, (2, -1)) for x in spikes.chunk(module.operands, 2)]
        q, k, *v = operands
        width, tokens = q.shape[3:]
        if not v:
            made, mask = layers[f'{name}.q'], layers[f'{name}.k']
            assert (made.kind, made.macs, made.values) == ('sum', 2 * width * tokens, 'binary')
            assert made.events == q.sum() / 4
            assert (mask.kind, mask.macs, mask.events, mask.mean) == ('mask', 0, 0, pytest.approx(k.mean().item()))
            assert mask.operations('strict') == mask.operations('events') == (0, 0)
            assert 0.01 < q.mean() < 0.6
            fires = q.amax(3 if isinstance(module, TokenQKAttention) else 4)
            assert rates[f'{name}.neuron'] == pytest.approx(fires.mean().item())
            continue
        if width < tokens:
            met = k[:, :, :, :, None] * v[0][:, :, :, None]  # (.., width, width, tokens)
            added = q[:, :, :, None] * torch.ones(width, 1, 1)
            labels, second, dims = ('k*v', 'q'), q, (k, v[0])
        else:
            met = k[..., :, None] * q[..., None, :]  # (.., width, tokens, tokens)
            added = v[0][..., None] * torch.ones(tokens)
            labels, second, dims = ('k*q', 'v'), v[0], (k, q)
        first, last = (layers[f'{name}.{label}'] for label in labels)
        assert first.events == met.count_nonzero() / 4
        assert last.events == added.count_nonzero() / 4
        assert first.macs * 4 * STEPS == met.numel()
        assert last.macs * 4 * STEPS == added.numel()
        assert first.mean == pytest.approx(min(x.mean().item() for x in dims))
        assert last.mean == pytest.approx(second.mean().item())
        out = spiking_self_attention(*(x.flatten(2, 3) for x in operands), 2, v_threshold=0.5)
        assert rates[f'{name}.neuron'] == pytest.approx(out.mean().item())
        assert first.events > 0
        assert last.events > 0
        for layer in (first, last):
            assert layer.operations('strict') == layer.operations('paper')


@pytest.mark.parametrize('legacy', [False, True])
def test_neurons(legacy):
    model, (x, y) = tiny(legacy_ssa_order=legacy), images(2, 3)
    spikes, handles = {}, []
    for name in ('stem.convs.1.neuron', 'stages.1.1.attention.project.neuron', 'stages.1.2.mlp.project.neuron'):
        keep = spikes.setdefault(name, [])
        hook = model.get_submodule(name).register_forward_hook(lambda m, args, out, keep=keep: keep.append(out))
        handles.append(hook)
    activity = measure_activity(model, [x, y], raster=5)
    neurons = {neuron.name: neuron for neuron in activity.neurons}
    assert len(neurons) == sum(isinstance(module, SpikingConv) for module in model.modules()) + 3  # and 3 attentions
    for name, (first, second) in spikes.items():
        total = first.sum(dtype=torch.float64) + second.sum(dtype=torch.float64)
        assert neurons[name].rate == pytest.approx(total.item() / (first.numel() + second.numel()), rel=1e-12)
        row = first[:, 0].flatten(1)
        last = row.shape[1] - 1
        chosen = [round(last * i / 4) for i in range(5)]
        torch.testing.assert_close(neurons[name].raster, row[:, chosen].t().to(torch.uint8), rtol=0, atol=0)
    stages = {name.split('.attention')[0]: neuron.stage for name, neuron in neurons.items() if 'attention' in name}
    assert stages == {'stages.0.0': 'stage 1', 'stages.1.1': 'stage 2', 'stages.1.2': 'stage 2'}
    assert count_hooks(model) == len(handles)


def test_batches_of_other_sizes():
    """If sizes and numbers of steps differ, operations are the mean over the samples."""
    torch.manual_seed(0)
    conv = lively(SpikingConv(3, 4, 3))
    batches = [torch.randint(0, 3, (2, 1, 3, 5, 4)).float(), torch.randint(0, 2, (5, 2, 3, 8, 6)).float()]
    (layer,) = measure_activity(conv, batches).layers
    assert layer.steps == (2 + 2 * 5) / 3
    macs = [2 * 5 * 4 * 3 * 4 * 9, 2 * 5 * 8 * 6 * 3 * 4 * 9]
    assert layer.macs * layer.steps == pytest.approx(sum(macs) / 3)
    values = torch.cat([batch.flatten() for batch in batches])
    assert layer.operations('paper').accumulates == pytest.approx(values.mean().item() * sum(macs) / 3)
    events = [convolution_events(conv.conv, batch.flatten(0, 1)) for batch in batches]
    assert layer.events == pytest.approx(sum(events) / 3)
    assert (layer.values, layer.maximum) == ('integer', 2)


def test_conventions_by_hand():
    """Energies equal those computed on paper."""
    layer = LayerActivity('a', 'stem', 'convolution', 100.0, 4.0, False, 1.5, 0.5, 'integer', 3.0, 180.0)
    assert layer.operations('paper') == (600, 0)
    assert layer.operations('strict') == (0, 400)
    assert layer.operations('events') == (180, 0)
    assert layer.operations('paper').energy == pytest.approx(540e-9)
    assert layer.operations('strict').energy == pytest.approx(1840e-9)
    assert layer.operations('events').energy == pytest.approx(162e-9)
    binary = layer._replace(values='binary', mean=0.5, maximum=1.0)
    assert binary.operations('strict') == binary.operations('paper') == (200, 0)
    real = layer._replace(values='real')
    dense = layer._replace(kind='dense', stage='head', steps=1.0)
    image = layer._replace(once=True)
    for convention in ('paper', 'strict', 'events'):
        assert real.operations(convention) == (0, 400)
        assert dense.operations(convention) == image.operations(convention) == (0, 100)
    activity = SpikeActivity(1, (image, layer, binary._replace(stage='stage 1'), dense), ())
    assert activity.total('paper') == (800, 100)
    assert activity.total('paper', 'stem') == (600, 100)
    assert activity.total('strict', dense=True) == (200, 600)
    assert Operations.total([]) == (0, 0)


def test_dense_layers():
    """Layers without spikes are counted for each call, with positional and keyword arguments."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = tiny()
            self.neck = nn.ConvTranspose2d(16, 6, 3, 2, groups=2)
            self.head = nn.ModuleList([nn.Conv2d(6, 4, 3, 2, 1), nn.Linear(4, 7)])

        def forward(self, x):
            (x,) = self.backbone(x)
            self.inner = x.shape[2:]
            x = self.head[0](input=self.neck(x))
            self.outer = x.shape[2:]
            return self.head[1](x.mean((2, 3))) + self.head[1](x.amax((2, 3)))

    model = Network().eval()
    activity = measure_activity(model, images(2, 3))
    layers = {layer.name: layer for layer in activity.layers if layer.kind == 'dense'}
    # Each input of a transposed convolution and each output of the other meet every entry of a kernel.
    macs = [math.prod(model.inner) * 16 * 3 * 9, math.prod(model.outer) * 4 * 6 * 9, 2 * 4 * 7]
    assert [layer.macs for layer in layers.values()] == macs
    assert [(layer.name, layer.stage) for layer in layers.values()] == list(zip(layers, ('neck', 'head', 'head')))
    assert activity.total('events', dense=True).macs - activity.total('events').macs == sum(macs)


class Adaptive(nn.Conv2d):
    """Convolution that pads its input in ``forward``, as MMCV's Conv2dAdaptivePadding does."""

    def forward(self, x):
        return super().forward(F.pad(x, (2, 2, 2, 2)))


@pytest.mark.parametrize('conv', [nn.Conv2d(16, 6, 3, padding='same', groups=2), Adaptive(16, 6, 5, groups=2)])
def test_dense_layers_that_pad_otherwise(conv):
    model = nn.Sequential(SpikingConv(3, 16), nn.Flatten(0, 1), conv).eval()
    layer = measure_activity(model, [torch.ones(1, 1, 3, 7, 9)]).layers[-1]
    assert (layer.kind, layer.macs) == ('dense', 7 * 9 * 6 * 8 * math.prod(conv.kernel_size))


def test_published_size():
    """HST-10-384 has 5.90 G multiply-adds per step at 224 x 224, computed from its shapes.

    The additions of the two kinds of Q-K attention are not in this figure.
    """
    model = QKFormer('hst-10-384', steps=1).eval()
    sums: dict[str, float] = {}
    for layer in measure_activity(model, [torch.zeros(1, 3, 224, 224)]).layers:
        embed = layer.stage == 'stem' or re.match(r'stages\.\d\.0\.(convs|shortcut)', layer.name)
        kind = 'first' if layer.once else 'embed' if embed else layer.kind
        sums[f'{layer.stage} {kind}'] = sums.get(f'{layer.stage} {kind}', 0) + layer.macs / 1e9
    expected = {
        'stem first': 0.065,
        'stem embed': 0.795,
        'stage 1 convolution': 0.318,
        'stage 2 embed': 0.795,
        'stage 2 convolution': 0.636,
        'stage 3 embed': 0.795,
        'stage 3 convolution': 2.428,
        'stage 3 product': 0.067,
    }
    assert {name: round(sums[name], 3) for name in expected} == expected
    assert round(sum(sums[name] for name in expected), 2) == 5.90
    assert sum(sums.values()) - sum(sums[name] for name in expected) == pytest.approx((96 * 3136 + 2 * 192 * 784) / 1e9)


def test_state_is_kept():
    """Neither hooks nor changed buffers are left after a measurement, also if it fails."""
    model, (x,) = tiny(), images(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measure_activity(model, [x])
    with pytest.raises(RuntimeError, match='stop'):
        measure_activity(model, [x], lambda model, x: (_ for _ in ()).throw(RuntimeError('stop')))
    x[1, 2, 3, 4] = math.nan
    with raises(ValueError, 'stem.convs.0'):
        measure_activity(model, [x])
    assert count_hooks(model) == 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_unknown_attention():
    class Other(SpikingSelfAttention.__base__):
        pass

    model = nn.Sequential(TokenQKAttention(8), Other(8)).eval()
    with raises(ValueError, 'Other'):
        measure_activity(model, [torch.zeros(2, 1, 8, 3, 3)])
    assert count_hooks(model) == 0


def test_mixed_inputs():
    batches = [dict(x=torch.randn(2, 3, 4, 4), steps=2), dict(x=torch.ones(2, 2, 3, 4, 4))]
    with raises(ValueError, 'image'):
        measure_activity(lively(SpikingConv(3, 4)), batches, lambda model, batch: model(**batch))
