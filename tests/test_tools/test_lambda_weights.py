"""The converter of lambda networks: its files in the hosts, and its errors."""

import sys

import pytest
import timm
import torch
import torchvision
from lambda_networks import LambdaLayer as PeerLayer
from mmengine.runner import load_checkpoint
from mmpretrain.registry import MODELS
from safetensors.torch import save_file

from mmkron.layers import LambdaLayer
from support.tools import load_tool


@pytest.fixture(scope='module')
def tool():
    return load_tool('model_converters/lambda_weights')


def classifier(backbone):
    """Return the MMPretrain classifier with the backbone of a checkpoint's meta."""
    head = dict(type='LinearClsHead', num_classes=1000, in_channels=2048)
    neck = dict(type='GlobalAveragePooling')
    return MODELS.build(dict(type='ImageClassifier', backbone=backbone, neck=neck, head=head)).eval()


def logits(model, x):
    with torch.no_grad():
        return model(x)


def assert_same_network(path, theirs):
    """Check that the network of the meta loads all keys strictly and gives equal logits."""
    checkpoint = torch.load(path, weights_only=True)
    ours = classifier(checkpoint['meta']['backbone'])
    assert set(checkpoint['state_dict']) == set(ours.state_dict())
    load_checkpoint(ours, str(path), map_location='cpu', strict=True)
    x = torch.randn(1, 3, 64, 64)
    expected = logits(theirs.eval(), x)
    assert (logits(ours, x) - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


def test_timm(tool, tmp_path, capsys):
    torch.manual_seed(0)
    theirs = timm.create_model('lambda_resnet26t')
    save_file(theirs.state_dict(), tmp_path / 'source.safetensors')
    out = tmp_path / 'new' / 'out.pth'
    tool.main([str(tmp_path / 'source.safetensors'), str(out), '--from', 'timm-26t'])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [['unused', '0'], ['missing', '0']]
    assert_same_network(out, theirs)


def test_resnet(tool, tmp_path):
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50()
    torch.save(dict(model={f'module.{k}': v for k, v in theirs.state_dict().items()}), tmp_path / 'source.pth')
    argv = [str(tmp_path / 'source.pth'), str(tmp_path / 'out.pth'), '--from', 'resnet', '--stage-layers', 'CCCC']
    tool.main(argv)
    assert_same_network(tmp_path / 'out.pth', theirs)


def test_mmpretrain_for_a_hybrid(tool, tmp_path, capsys):
    """The layers that MMPretrain's ResNet and a hybrid share are loaded, the others are listed."""
    source = classifier(dict(type='ResNet', depth=50))
    content = dict(state_dict=source.state_dict(), meta=dict(epoch=1), optimizer=dict(lr=0.1))
    torch.save(content, tmp_path / 'source.pth')
    out = str(tmp_path / 'out.pth')
    tool.main([str(tmp_path / 'source.pth'), out, '--from', 'resnet', '--stage-layers', 'CCCL'])
    report = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    meta = torch.load(out, weights_only=True)['meta']
    ours = classifier(meta['backbone'])
    loaded = ours.load_state_dict(torch.load(out, weights_only=True)['state_dict'], strict=False)
    assert loaded.unexpected_keys == []
    assert sorted(loaded.missing_keys) == sorted(f'backbone.{name}' for name in meta['missing'])
    assert meta['unused'][0] == 'layer4.0.conv2.weight'
    assert report[0][:2] == ['unused', str(len(meta['unused']))]
    assert [line[0] for line in report if len(line) == 1] == meta['unused'] + meta['missing']
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        resnet, mine = source.backbone, x
        stem = resnet.maxpool(resnet.relu(resnet.norm1(resnet.conv1(x))))
        theirs = resnet.layer3(resnet.layer2(resnet.layer1(stem)))
        for part in (ours.backbone.stem, *ours.backbone.stages[:3]):
            mine = part(mine)
    assert (mine - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_lambda_networks(tool, tmp_path):
    torch.manual_seed(0)
    theirs = PeerLayer(8, dim_k=4, r=3).eval()
    torch.save(theirs.state_dict(), tmp_path / 'source.pth')
    tool.main([str(tmp_path / 'source.pth'), str(tmp_path / 'out.pth'), '--from', 'lambda-networks'])
    ours = LambdaLayer(8, dim_key=4, scope=3, position_bias=True).eval()
    ours.load_state_dict(torch.load(tmp_path / 'out.pth', weights_only=True)['state_dict'])
    x = torch.randn(2, 8, 5, 6)
    torch.testing.assert_close(logits(ours, x), logits(theirs, x), rtol=1e-5, atol=1e-5)


WEIGHTS = dict(a=torch.zeros(1))


@pytest.mark.parametrize(
    ('name', 'content', 'argv', 'named'),
    [
        ('a.pth', None, 'resnet', 'a.pth'),
        ('a.onnx', b'', 'resnet', 'a.onnx'),
        ('a.pth', b'no weights', 'resnet', 'a.pth'),
        ('a.safetensors', b'no weights', 'resnet', 'a.safetensors'),
        ('a.pth', [1, 2], 'resnet', 'state dict'),
        ('a.pth', dict(state_dict=dict(a=1)), 'resnet', 'state dict'),
        ('a.pth', WEIGHTS, 'timm-26t', '--from timm-26t'),
        ('a.pth', WEIGHTS, 'lambda-networks', 'to_q.weight'),
        ('a.pth', WEIGHTS, 'resnet --stage-layers CCX', "stage_layers must be .*'CCX'"),
        ('a.pth', WEIGHTS, 'resnet --depth 18', 'depth must be one of .*18'),
    ],
)
def test_refusals(tool, tmp_path, name, content, argv, named):
    """The error is one line, and no file is written."""
    source, out = tmp_path / name, tmp_path / 'out.pth'
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content is not None:
        torch.save(content, source)
    with pytest.raises(SystemExit, match=f'^error: .*{named}') as error:
        tool.main([str(source), str(out), '--from', *argv.split()])
    assert '\n' not in str(error.value)
    assert not out.exists()


def test_safetensors_is_optional(tool, tmp_path, monkeypatch):
    for name in ('safetensors', 'safetensors.torch'):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match='error: .*safetensors'):
        tool.main([str(tmp_path / 'a.safetensors'), str(tmp_path / 'out.pth'), '--from', 'resnet'])


@pytest.mark.parametrize('dst', ['out.pt', 'made.pth'])
def test_bad_destination(tool, tmp_path, capsys, dst):
    (tmp_path / 'made.pth').touch()
    with pytest.raises(SystemExit, match='2'):
        tool.main(['in.pth', str(tmp_path / dst), '--from', 'resnet'])
    assert f'got {tmp_path / dst}' in capsys.readouterr().err
