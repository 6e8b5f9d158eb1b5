"""KANet: the published counts, the four modules against plain PyTorch, other layouts."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from mmengine.analysis import FlopAnalyzer

from mmkron.models import KANet
from mmkron.models.backbones.kanet import ARCHS, KANET_LAYOUT, KANetModule
from mmkron.ops import kronecker_attention_kv

PRODUCTS = ('conv', 'linear', 'bmm', 'matmul', 'einsum')

# arch -> weights without batch norm and biases; multiply-adds of convolutions, products and classifier at 224 x 224
COUNTS = {
    'kanet-kv': (3_448_448, 288_413_728),
    'kanet-qkv': (3_448_448, 281_119_392),
    'attnnet': (3_448_448, 365_374_304),
    'attnnet-pool': (3_448_448, 300_248_480),
    'mobilenet-v2-kao': (3_461_120, 298_649_632),
    'kanet-wo-kao': (3_457_088, 290_538_368),
    'mobilenet-v2': (3_469_760, 300_774_272),
}


class Classifier(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.backbone = KANet(**kwargs)
        self.fc = nn.Linear(self.backbone.out_channels[0], 1000, bias=False)

    def forward(self, x):
        return self.fc(self.backbone(x)[-1].mean((2, 3)))


def count(model, size=224):
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    with torch.no_grad():
        analyzer = FlopAnalyzer(model.eval(), torch.randn(1, 3, size, size))
        analyzer.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        operators = analyzer.by_operator()
    return weights, sum(operators[name] for name in PRODUCTS if name in operators)


@pytest.mark.parametrize('arch', ARCHS)
def test_counts(arch):
    assert count(Classifier(arch=arch)) == COUNTS[arch]


def test_counts_of_the_other_readings():
    """Layouts B and C, and 'w/o KAO' that keeps its only Attn module."""
    rows = list(KANET_LAYOUT)
    layout_b = [*rows[:2], ('BaseSkip', 6, 32, 3, 2), ('Attn', 6, 64, 1, 2), *rows[5:]]
    layout_c = [*rows[:6], ('BaseSkip', 6, 96, 1, 1), ('AttnSkip', 6, 96, 2, 1), *rows[7:]]
    kept = [('Base', *row[1:]) if row[0] == 'AttnSkip' else row for row in rows]
    for layout, weights, madds in (
        (layout_b, 3_448_448, 288.58),
        (layout_c, 3_444_928, 287.71),
        (kept, 3_456_800, 292.38),
    ):
        counted = count(Classifier(arch=dict(layout=layout, attention='kv')))
        assert counted[0] == weights
        assert counted[1] / 1e6 == pytest.approx(madds, abs=0.006)


def test_mobilenet_v2_equals_torchvision():
    """With the same weights, the maps equal those of torchvision's MobileNetV2."""
    torch.manual_seed(0)
    theirs = torchvision.models.mobilenet_v2(width_mult=0.5).eval()
    ours = KANet('mobilenet-v2', widen_factor=0.5).eval()
    source = [v for k, v in theirs.features.state_dict().items()]
    target = ours.state_dict()
    assert [v.shape for v in source] == [v.shape for v in target.values()]
    ours.load_state_dict(dict(zip(target, source)))
    x = torch.randn(2, 3, 65, 97)
    torch.testing.assert_close(ours(x)[0], theirs.features(x), rtol=1e-4, atol=1e-5)


def test_initialization():
    """All weights are Xavier uniform."""
    model = KANet('kanet-kv')
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(weight)
            bound = (6 / (fan_in + fan_out)) ** 0.5
            assert 0.9 * bound < weight.abs().max() <= bound, name


def build_module(kind, out_channels, stride, expansion=3, channels=4):
    torch.manual_seed(0)
    attention = dict(mode='kv', norm='bn_softmax')
    module = KANetModule(
        kind, channels, out_channels, expansion, stride, attention, dict(type='BN'), dict(type='ReLU6')
    )
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.weight.data.uniform_(0.5, 1.5)
            m.running_var.uniform_(0.5, 1.5)
            if m.bias is not None:
                m.bias.data.uniform_(-0.5, 0.5)
    return module.double().eval()


def plain_module(module, kind, x, stride):
    """Compute a module of figure 4 of the paper with plain PyTorch."""

    def norm(y, bn):
        return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias)

    expanded = F.relu6(norm(F.conv2d(x, module.expand.conv.weight), module.expand.bn))
    path = torch.cat([expanded, x], 1) if kind == 'BaseSkip' else expanded
    weight = module.depthwise.conv.weight
    path = F.relu6(norm(F.conv2d(path, weight, None, stride, 1, 1, len(weight)), module.depthwise.bn))
    if 'Attn' in kind:
        bn = module.attention.coefficient_bn
        gain = bn.weight / (bn.running_var + bn.eps).sqrt()
        value = F.conv2d(x, module.attention.value_map.weight[..., None])
        attended = norm(kronecker_attention_kv(x, x, value, scale=gain.item()), module.attention_norm)
        if stride == 1 and kind == 'AttnSkip':
            attended = attended + x
        if stride == 2:
            height, width = attended.shape[2:]
            rows = [attended[:, :, i : i + 2] for i in range(0, height, 2)]
            attended = torch.stack(
                [torch.stack([r[..., j : j + 2].mean((2, 3)) for j in range(0, width, 2)], -1) for r in rows], 2
            )
        path = torch.cat([path, attended], 1)
    out = norm(F.conv2d(path, module.project.conv.weight), module.project.bn)
    return out + x if stride == 1 and out.shape == x.shape else out


@pytest.mark.parametrize('kind', ['Base', 'BaseSkip', 'Attn', 'AttnSkip'])
@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('out_channels', [4, 6])
def test_modules(kind, stride, out_channels):
    module = build_module(kind, out_channels, stride)
    x = torch.randn(2, 4, 7, 5).double()
    torch.testing.assert_close(module(x), plain_module(module, kind, x, stride), rtol=1e-9, atol=1e-9)


def test_stem_stride():
    model = KANet(widen_factor=0.25, stem_stride=1, in_channels=1, out_indices=(1, 4, 5)).eval()
    assert model.out_strides == (2, 16, 16)
    assert [tuple(o.shape[2:]) for o in model(torch.randn(1, 1, 32, 32))] == [(16, 16), (2, 2), (2, 2)]


def test_other_layout():
    layout = [('BaseSkip', 1, 16, 1, 1), ('Attn', 4, 24, 1, 2), ('AttnSkip', 6, 40, 2, 2)]
    given = dict(layout=layout, attention='qkv')
    model = KANet(given, out_indices=(0, 1, 2, 3)).eval()
    assert model.out_channels == (16, 24, 40, 1280)
    assert model.out_strides == (2, 4, 8, 8)
    assert given == dict(layout=layout, attention='qkv')
    assert {m.attention.mode for m in model.modules() if getattr(m, 'attention', None)} == {'qkv'}
