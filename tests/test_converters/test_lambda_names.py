"""Converted weights of other libraries give the same outputs; entries without a counterpart are named."""

from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torchvision
from lambda_networks import LambdaLayer as PeerLayer
from mmpretrain.models import ResNet as MMResNet

from mmkron.converters import convert_lambda_networks, convert_resnet, convert_timm
from mmkron.converters.lambda_resnet import TIMM_NETWORKS
from mmkron.layers import LambdaLayer
from mmkron.models import LambdaResNet
from support.errors import raises


def randomize(model):
    """Return the model in float64 and evaluation mode, with weights and statistics that all affect the output."""
    generator = torch.Generator().manual_seed(0)
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.weight.data.uniform_(0.5, 1.5, generator=generator)
            m.bias.data.uniform_(-0.5, 0.5, generator=generator)
            m.running_mean.uniform_(-0.5, 0.5, generator=generator)
            m.running_var.uniform_(0.5, 1.5, generator=generator)
    model.double().eval()  # MMPretrain's ResNet.eval returns None
    return model


def image(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize('name', TIMM_NETWORKS)
def test_timm(name):
    """Maps of every stage agree; timm's global network has one input size."""
    theirs = randomize(timm.create_model(name))
    ours = LambdaResNet(**TIMM_NETWORKS[name], out_indices=(0, 1, 2, 3)).double().eval()
    converted = convert_timm(theirs.state_dict(), ours.state_dict())
    assert converted.unused == converted.missing == []
    ours.load_state_dict(converted.state_dict)
    x = image(1, 3, 256, 256) if 'img_size' in TIMM_NETWORKS[name] else image(2, 3, 64, 96)
    with torch.no_grad():
        outs, expected = ours(x), theirs.forward_intermediates(x, indices=4, intermediates_only=True)
        for out, other in zip(outs, expected):
            assert (out - other).abs().max() < 1e-9 * other.abs().max()
        logits = nn.functional.linear(outs[-1].mean((2, 3)), converted.head['weight'], converted.head['bias'])
        torch.testing.assert_close(logits, theirs(x))


def test_timm_of_another_network():
    """Entries without a counterpart are named, nothing raises."""
    theirs = timm.create_model('lambda_resnet26t', width_factor=0.125)
    ours = LambdaResNet(**{**TIMM_NETWORKS['lambda_resnet26rpt_256'], 'base_channels': 8})
    converted = convert_timm({**theirs.state_dict(), 'extra': torch.zeros(1)}, ours.state_dict())
    layers = [f'stages.{block}.self_attn.conv_lambda' for block in ('2.1', '3.0', '3.1')]
    expected = [f'{layer}.{part}' for layer in layers for part in ('weight', 'bias')]
    assert converted.unused == [*expected, 'extra']
    assert converted.missing == [f'stages.{block}.spatial.layer.position_table' for block in ('2.1', '3.0', '3.1')]
    names = ['stages.2.1.self_attn.conv_lambda.weight', 'stages.3.0.self_attn.pos_emb']
    converted = convert_timm(dict.fromkeys(names, torch.zeros(3)), LambdaResNet(stage_layers='CCLL').state_dict())
    assert converted == ({}, {}, names, converted.missing)


@pytest.mark.parametrize('intra_depth', [1, 3])
@pytest.mark.parametrize('scope', [5, None])
def test_lambda_networks(scope, intra_depth):
    torch.manual_seed(0)
    extent = dict(r=scope) if scope else dict(n=6)
    theirs = randomize(PeerLayer(12, dim_k=4, heads=2, dim_out=8, dim_u=intra_depth, **extent))
    extent = dict(scope=scope, feat_size=None if scope else 6, position_bias=bool(scope))
    ours = LambdaLayer(12, 8, dim_key=4, heads=2, intra_depth=intra_depth, **extent)
    ours.double().eval().load_state_dict(convert_lambda_networks(theirs.state_dict()))
    x = image(2, 12, 6, 6)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ('change', 'shown'),
    [
        (lambda s: s.pop('to_k.weight'), 'to_k.weight'),
        (lambda s: s.pop('pos_conv.bias'), 'pos_conv.bias'),
        (lambda s: s.update(other=torch.zeros(1)), 'other'),
        (lambda s: s.update({'to_k.weight': torch.zeros(4, 7, 1, 1)}), 'shapes'),
        (lambda s: s.update({'pos_conv.weight': torch.zeros(4)}), 'shapes'),
        (lambda s: s.update(rel_pos_emb=torch.zeros(4)), 'shapes'),
    ],
)
def test_lambda_networks_of_another_layer(change, shown):
    state_dict = dict(PeerLayer(8, dim_k=4, r=3).state_dict())
    change(state_dict)
    with raises(ValueError, 'state_dict', shown):
        convert_lambda_networks(state_dict)


class Classifier(nn.Module):
    """Network with the parameter names of an MMPretrain classifier."""

    def __init__(self):
        super().__init__()
        self.backbone = MMResNet(50)
        self.head = nn.Module()
        self.head.fc = nn.Linear(2048, 3)

    def forward(self, x):
        return self.head.fc(self.backbone(x)[-1].mean((2, 3)))


@pytest.mark.parametrize('build', [torchvision.models.resnet50, Classifier, partial(MMResNet, 50)])
def test_resnet(build):
    """Without lambda layers every entry has a counterpart, and the outputs agree."""
    torch.manual_seed(0)
    theirs = randomize(build())
    ours = LambdaResNet(stage_layers='CCCC', skeleton='v1.5').double().eval()
    converted = convert_resnet(theirs.state_dict(), ours.state_dict())
    assert converted.unused == converted.missing == []
    ours.load_state_dict(converted.state_dict)
    x = image(1, 3, 40, 64)
    with torch.no_grad():
        out, expected = ours(x)[0], theirs(x)
        if isinstance(expected, tuple):
            assert converted.head == {}
            expected = expected[-1]
        else:
            out = nn.functional.linear(out.mean((2, 3)), converted.head['weight'], converted.head['bias'])
        torch.testing.assert_close(out, expected)


def test_resnet_with_lambda_layers():
    """All entries of c5 are converted, except the 3 x 3 convolutions and their norms."""
    with torch.device('meta'):
        theirs = torchvision.models.resnet50().state_dict()
        ours = LambdaResNet(stage_layers='CCCL', skeleton='v1.5').state_dict()
    converted = convert_resnet(theirs, ours)
    norm = ['weight', 'bias', 'running_mean', 'running_var']
    assert converted.unused == [
        f'layer4.{block}.{part}' for block in range(3) for part in ['conv2.weight', *(f'bn2.{n}' for n in norm)]
    ]
    parts = ['position_table', 'qkv_map.weight', *(f'{of}_norm.{n}' for of in ('query', 'value') for n in norm)]
    parts = [f'layer.{part}' for part in parts] + [f'norm.{n}' for n in norm]
    assert converted.missing == [f'stages.3.{block}.spatial.{part}' for block in range(3) for part in parts]
    counters = 3 * 3  # of batch norm, in the lambda layer and after it
    assert len(converted.state_dict) + len(converted.missing) + counters == len(ours)


@pytest.mark.parametrize(('depth', 'blocks'), [(18, (2, 2, 2, 2)), (34, (3, 4, 6, 3)), (101, (3, 4, 23, 3))])
def test_resnet_of_other_blocks(depth, blocks):
    with torch.device('meta'):
        theirs = getattr(torchvision.models, f'resnet{depth}')().state_dict()
        ours = LambdaResNet(stage_layers='CCLL', skeleton='v1.5').state_dict()
    with raises(ValueError, 'state_dict', blocks):
        convert_resnet(theirs, ours)
