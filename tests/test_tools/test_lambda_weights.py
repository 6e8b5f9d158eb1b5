"""The converter of lambda networks: what it writes, how hosts load it, what it refuses."""

import sys

import pytest
import timm
import torch
import torchvision
from lambda_networks import LambdaLayer as PeerLayer
from mmengine.runner import load_checkpoint
from mmpretrain.registry import MODELS
from safetensors.torch import save_file

from mmkron.converters.lambda_resnet import TIMM_NETWORKS
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


def assert_same_network(path, theirs, size=64):
    """Check that the network of the meta loads all keys strictly and gives equal logits."""
    checkpoint = torch.load(path, weights_only=True)
    ours = classifier(checkpoint['meta']['backbone'])
    assert set(checkpoint['state_dict']) == set(ours.state_dict())
    load_checkpoint(ours, str(path), map_location='cpu', strict=True)
    x = torch.randn(1, 3, size, size)
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


@pytest.mark.parametrize(
    ('source', 'name'), [('timm-26rpt', 'lambda_resnet26rpt_256'), ('timm-50ts', 'lambda_resnet50ts')]
)
def test_other_timm_networks(tool, source, name):
    args = tool.parse_args(['in.pth', 'out.pth', '--from', source])
    weights, meta = tool.convert(timm.create_model(name).state_dict(), args)
    assert meta['backbone'] == dict(type='mmkron.LambdaResNet', **TIMM_NETWORKS[name])
    assert set(weights) == set(classifier(meta['backbone']).state_dict())


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
        theirs = source.backbone.layer3(source.backbone.layer2(source.backbone.layer1(stem(source.backbone, x))))
        mine = x
        for part in (ours.backbone.stem, *ours.backbone.stages[:3]):
            mine = part(mine)
    assert (mine - theirs).abs().max() < 1e-5 * theirs.abs().max()


def stem(resnet, x):
    return resnet.maxpool(resnet.relu(resnet.norm1(resnet.conv1(x))))


def test_lambda_networks(tool, tmp_path):
    torch.manual_seed(0)
    theirs = PeerLayer(8, dim_k=4, r=3).eval()
    torch.save(theirs.state_dict(), tmp_path / 'source.pth')
    tool.main([str(tmp_path / 'source.pth'), str(tmp_path / 'out.pth'), '--from', 'lambda-networks'])
    ours = LambdaLayer(8, dim_key=4, scope=3, position_bias=True).eval()
    ours.load_state_dict(torch.load(tmp_path / 'out.pth', weights_only=True)['state_dict'])
    x = torch.randn(2, 8, 5, 6)
    torch.testing.assert_close(logits(ours, x), logits(theirs, x), rtol=1e-5, atol=1e-5)


class Payload:
    """Object that prints when it is unpickled."""

    def __reduce__(self):
        return print, ('ran',)


@pytest.mark.parametrize(
    ('name', 'content', 'argv', 'message'),
    [
        ('a.pth', None, [], 'SRC is not a file: .*a.pth'),
        ('a.onnx', b'', [], r'SRC must be a file .*\.pth.*\.safetensors, got .*a\.onnx'),
        ('a.pth', b'no weights', [], 'SRC .*a.pth is damaged'),
        ('a.pth', b'', [], 'SRC .*a.pth is damaged or cut off'),
        ('a.pth', Payload(), [], 'SRC .*a.pth is refused: it holds more than weights'),
        ('a.safetensors', b'no weights', [], 'is not a safetensors file: '),
        ('a.pth', [1, 2], [], 'must hold a state dict of names and tensors'),
        ('a.pth', {}, [], 'must hold a state dict of names and tensors'),
        ('a.pth', dict(state_dict=dict(a=1)), [], 'must hold a state dict of names and tensors'),
        ('a.pth', dict(a=torch.zeros(1)), [], r'SRC does not fit --from resnet: .*target, \(3, 4, 6, 3\).*got \(\)'),
        ('a.pth', dict(a=torch.zeros(1)), ['--from', 'timm-26t'], 'SRC does not fit --from timm-26t: no .* of a, '),
        (
            'a.pth',
            dict(a=torch.zeros(1)),
            ['--from', 'lambda-networks'],
            "does not fit.* got one without 'to_q.weight'",
        ),
        ('a.pth', dict(a=torch.zeros(1)), ['--stage-layers', 'CCX'], "stage_layers must be .*'CCX'"),
        ('a.pth', dict(a=torch.zeros(1)), ['--depth', '18'], 'depth must be one of .*18'),
    ],
)
def test_refusals(tool, tmp_path, capsys, name, content, argv, message):
    """The error is one line, no file is written, and no code of SRC runs."""
    source, out = tmp_path / name, tmp_path / 'out.pth'
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content is not None:
        torch.save(content, source)
    with pytest.raises(SystemExit, match=f'^error: .*{message}') as error:
        tool.main([str(source), str(out), '--from', 'resnet', *argv])
    assert '\n' not in str(error.value)
    assert not out.exists()
    assert 'ran' not in capsys.readouterr().out


def test_safetensors_is_optional(tool, tmp_path, monkeypatch):
    for name in ('safetensors', 'safetensors.torch'):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match='error: SRC .* needs the package safetensors, which is not installed'):
        tool.main([str(tmp_path / 'a.safetensors'), str(tmp_path / 'out.pth'), '--from', 'resnet'])


@pytest.mark.parametrize('dst', ['out.pt', 'made.pth'])
def test_bad_destination(tool, tmp_path, capsys, dst):
    (tmp_path / 'made.pth').touch()
    with pytest.raises(SystemExit):
        tool.main(['in.pth', str(tmp_path / dst), '--from', 'resnet'])
    assert f'DST must be a new file that ends in .pth, got {tmp_path / dst}' in capsys.readouterr().err
