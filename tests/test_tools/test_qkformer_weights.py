"""The converter of QKFormer's released checkpoints: its files in the hosts, and its errors."""

import argparse

import pytest
import torch
from mmengine.runner import load_checkpoint
from mmpretrain.registry import MODELS
from qkformer_layouts import in_our_order, official

from support.tools import Touch, load_tool


@pytest.fixture(scope='module')
def tool():
    return load_tool('model_converters/qkformer_weights')


def file_of(arch):
    """Return the content that the released scripts save: weights and the state of the run."""
    weights = official(arch)
    args = argparse.Namespace(model='QKFormer', batch_size=32, lr=6e-4, output_dir='out', resume=None, opt_betas=None)
    optimizer = dict(state={0: dict(exp_avg=torch.zeros(2))}, param_groups=[dict(lr=0.1, params=[0])])
    rest = dict(optimizer=optimizer, epoch=199, args=args)
    if arch == 'cifar':
        return dict(arch='QKFormer', state_dict=weights, version=2, metric=96.2, **rest)
    if arch.startswith('hst'):
        return dict(model=weights, scaler=dict(scale=65536.0), **rest)
    return dict(model=weights, lr_scheduler=dict(last_epoch=1), max_test_acc1=84.0, **rest)


@pytest.mark.parametrize('arch', ['hst-10-384', 'cifar', 'dvs-gesture'])
def test_conversion(tool, tmp_path, capsys, arch):
    content = file_of(arch)
    source = content.get('model') or content['state_dict']
    torch.save(content, tmp_path / 'source.pth')
    out = tmp_path / 'new' / 'out.pth'
    tool.main([str(tmp_path / 'source.pth'), str(out), '--arch', arch])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [['unused', '0'], ['missing', '0']]
    assert 'legacy_ssa_order=True' in lines[3]

    meta = torch.load(out, weights_only=True)['meta']
    assert meta['backbone'] == dict(type='mmkron.QKFormer', arch=arch)
    assert 'legacy_ssa_order=True' in meta['legacy_ssa_order']
    classes, channels = source['head.weight'].shape
    head = dict(type='LinearClsHead', num_classes=classes, in_channels=channels)
    neck = dict(type='GlobalAveragePooling')
    model = MODELS.build(dict(type='ImageClassifier', backbone=meta['backbone'], neck=neck, head=head))
    load_checkpoint(model, str(out), map_location='cpu', strict=True)
    for (name, ours), theirs in zip(model.backbone.state_dict().items(), in_our_order(source), strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(model.head.fc.weight, source['head.weight'])
    assert torch.equal(model.head.fc.bias, source['head.bias'])


def test_ratio_of_the_mlp(tool, tmp_path):
    """A Gesture network with the MLP ratio of CIFAR10-DVS has the layout of the latter."""
    torch.save(dict(model=official('cifar10-dvs', classes=11)), tmp_path / 'source.pth')
    argv = [str(tmp_path / 'source.pth'), str(tmp_path / 'out.pth'), '--arch', 'dvs-gesture', '--mlp-ratio', '1']
    tool.main(argv)
    meta = torch.load(tmp_path / 'out.pth', weights_only=True)['meta']
    assert meta['backbone'] == dict(type='mmkron.QKFormer', arch='dvs-gesture', mlp_ratio=1)


def test_namespace_is_allowed_within_this_load_only(tool, tmp_path):
    torch.save(file_of('cifar10-dvs'), tmp_path / 'source.pth')
    before = set(map(str, torch.serialization.get_safe_globals()))
    tool.main([str(tmp_path / 'source.pth'), str(tmp_path / 'out.pth'), '--arch', 'cifar10-dvs'])
    assert argparse.Namespace not in torch.serialization.get_safe_globals()
    assert before <= set(map(str, torch.serialization.get_safe_globals()))
    with pytest.raises(Exception, match='argparse.Namespace'):
        torch.load(tmp_path / 'source.pth', weights_only=True)


@pytest.mark.parametrize('place', ['args', 'alone', 'in the arguments'])
def test_malicious_file(tool, tmp_path, place):
    made, source, out = tmp_path / 'made', tmp_path / 'source.pth', tmp_path / 'out.pth'
    content = file_of('cifar10-dvs')
    if place == 'in the arguments':
        content['args'].resume = Touch(made)
    else:
        content['args'] = Touch(made)
    torch.save(Touch(made) if place == 'alone' else content, source)
    with pytest.raises(SystemExit, match='^error: SRC .*'):
        tool.main([str(source), str(out), '--arch', 'cifar10-dvs'])
    assert not made.exists()
    assert not out.exists()
    torch.load(source, weights_only=False)  # the trap works
    assert made.exists()


@pytest.mark.parametrize(
    ('change', 'named'),
    [
        (
            lambda w: w.pop('stage1.0.tssa.proj_bn.bias'),
            'none for 1 entries, as stages.0.0.attention.project.norm.bias',
        ),
        (lambda w: w.update(extra=torch.zeros(1)), 'no place for 1 entries, as extra$'),
        (lambda w: w.update({'head.weight': torch.zeros(10, 5)}), 'no place for 1 entries, as head.weight'),
        (lambda w: w.update({'stage1.0.mlp.fc1_conv.bias': torch.zeros(128)}), 'it has 104 entries instead of 103'),
    ],
)
def test_weights_that_do_not_fit(tool, tmp_path, change, named):
    weights = official('cifar10-dvs')
    change(weights)
    torch.save(weights, tmp_path / 'source.pth')
    with pytest.raises(SystemExit, match=f'^error: SRC does not fit --arch cifar10-dvs: .*{named}'):
        tool.main([str(tmp_path / 'source.pth'), str(tmp_path / 'out.pth'), '--arch', 'cifar10-dvs'])
    assert not (tmp_path / 'out.pth').exists()


@pytest.mark.parametrize(('argv', 'named'), [([], '--arch dvs-gesture'), (['--mlp-ratio', '0'], 'mlp_ratio')])
def test_another_arch(tool, tmp_path, argv, named):
    torch.save(official('cifar10-dvs'), tmp_path / 'source.pth')
    with pytest.raises(SystemExit, match=f'^error: .*{named}'):
        tool.main([str(tmp_path / 'source.pth'), str(tmp_path / 'out.pth'), '--arch', 'dvs-gesture', *argv])


def test_bad_destination(tool, capsys):
    with pytest.raises(SystemExit, match='2'):
        tool.main(['in.pth', 'out.pt', '--arch', 'cifar'])
    assert 'got out.pt' in capsys.readouterr().err
