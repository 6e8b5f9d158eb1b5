"""LambdaMobileNetV2: parameters, the places of the lambda layers, the block against plain PyTorch."""

import pytest
import torch
import torch.nn as nn
import torchvision

from mmkron.layers import LambdaLayer
from mmkron.models import LambdaMobileNetV2
from mmkron.models.backbones.lambda_mobilenet_v2 import LambdaInvertedResidual
from support.errors import raises


def count(**kwargs):
    """Return the parameters with a head of 1000 classes."""
    with torch.device('meta'):
        return 1280 * 1000 + 1000 + sum(p.numel() for p in LambdaMobileNetV2(**kwargs).parameters())


def lambda_block(width, k=32, h=4, r=5):
    """Return the parameters of a lambda block: two 1 x 1 convolutions of the same width, the layer, three norms."""
    v = width // h
    layer = width * (h * k + k + v) + 2 * h * k + 2 * v + k * r * r
    return 2 * width * width + 3 * 2 * width + layer


def test_count():
    """The count is MobileNetV2's with two blocks replaced, 3.237 M; 3.21 M is recalled as the paper's."""
    with torch.device('meta'):
        plain = torchvision.models.mobilenet_v2()
    total = sum(p.numel() for p in plain.parameters())
    assert count(lambda_blocks=()) == total == 3_504_872
    for number, width in ((10, 64), (16, 160)):
        assert plain.features[number].conv[-1].num_features == width
        total += lambda_block(width) - sum(p.numel() for p in plain.features[number].parameters())
    assert count() == total == 3_236_824


def test_equals_torchvision_without_lambda_layers():
    torch.manual_seed(0)
    theirs = torchvision.models.mobilenet_v2(width_mult=0.5).eval()
    ours = LambdaMobileNetV2(lambda_blocks=(), widen_factor=0.5).eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.features.state_dict().values())))
    x = torch.randn(2, 3, 65, 97)
    torch.testing.assert_close(ours(x)[0], theirs.features(x), rtol=1e-4, atol=1e-5)


def test_placement():
    """Lambda layers are in the last block of 64 channels and in the last one of 160, at stride 1."""
    model = LambdaMobileNetV2(out_indices=(3, 4)).eval()
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LambdaLayer)}
    assert {name: (m.dim, m.dim_key, m.heads) for name, m in layers.items()} == {
        'stages.3.3.spatial.layer': (64, 32, 4),
        'stages.4.2.spatial.layer': (160, 32, 4),
    }
    assert {tuple(m.position_table.shape) for m in layers.values()} == {(1, 32, 5, 5)}
    other = LambdaMobileNetV2(
        lambda_blocks=[2], lambda_cfg=dict(scope=3, dim_key=8), widen_factor=0.25, stem_stride=1, out_indices=(1, 4)
    ).eval()
    assert other.out_strides == (2, 16)
    (layer,) = (m for m in other.modules() if isinstance(m, LambdaLayer))
    assert layer.position_table.shape == (1, 8, 3, 3)
    assert [tuple(out.shape[2:]) for out in other(torch.randn(1, 3, 33, 32))] == [(17, 16), (3, 2)]


@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('out_channels', [8, 12])
def test_block(stride, out_channels):
    torch.manual_seed(0)
    cfg = dict(dim_key=4, heads=2, scope=3)
    norms = dict(norm_cfg=dict(type='BN'), act_cfg=dict(type='ReLU6'))
    block = LambdaInvertedResidual(8, out_channels, stride, cfg, **norms).double().eval()
    for m in block.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.uniform_(-0.5, 0.5)
            m.running_var.uniform_(0.5, 1.5)
    x = torch.randn(2, 8, 6, 7, dtype=torch.float64)
    path = block.keep.bn(torch.einsum('oi,bihw->bohw', block.keep.conv.weight[..., 0, 0], x)).clamp(0, 6)
    path = block.spatial.layer(path)
    if stride == 2:
        path = nn.functional.pad(path, (1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2).mean((-1, -2))
    path = block.spatial.norm(path).clamp(0, 6)
    path = block.project.bn(torch.einsum('oi,bihw->bohw', block.project.conv.weight[..., 0, 0], path))
    torch.testing.assert_close(block(x), path + x if stride == 1 and out_channels == 8 else path)


@pytest.mark.parametrize(
    ('argument', 'value', 'kwargs'),
    [
        ('scope', None, dict(lambda_cfg=dict(scope=None))),
        ('lambda_cfg', dict(r=5), dict(lambda_cfg=dict(r=5))),
        ('heads', 3, dict(lambda_cfg=dict(heads=3))),
    ],
)
def test_bad_combinations(argument, value, kwargs):
    """tests/test_bad_values.py has single bad values."""
    with torch.device('meta'), raises(ValueError, argument, value):
        LambdaMobileNetV2(**kwargs)
