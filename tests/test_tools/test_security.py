"""No tool unpickles a checkpoint from outside."""

import shutil

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner

from mmkron.utils.errors import LaunchError
from support.tools import ROOT, Touch, load_tool, run_training


@pytest.fixture
def evil(tmp_path):
    """Write a checkpoint that creates a folder when it is unpickled, and that a training could resume from."""
    path = tmp_path / 'evil.pth'
    parts = dict(meta=dict(epoch=1, iter=2), state_dict={}, message_hub={}, optimizer={})
    torch.save({**parts, 'x': Touch(tmp_path / 'proof')}, path)
    yield path
    assert not (tmp_path / 'proof').exists()


def pretrained(tiny_config, path):
    """Let the backbone of a config start from a file."""
    text = tiny_config.read_text()
    part = "backbone=dict(type='MobileNetV2', "
    assert part in text
    tiny_config.write_text(text.replace(part, f"{part}init_cfg=dict(type='Pretrained', checkpoint={str(path)!r}), "))
    return tiny_config


@pytest.mark.parametrize('way', ['--resume PATH', '--resume', 'load_from', 'resume in the config', 'Pretrained'])
def test_train(way, evil, tiny_config, train_args, tmp_path):
    arguments = ['--work-dir', tmp_path / 'work']
    if way == 'Pretrained':
        pretrained(tiny_config, evil)
    elif way == '--resume':
        (tmp_path / 'work').mkdir()
        shutil.copy(evil, tmp_path / 'work')
        arguments += ['--resume']
    elif way == '--resume PATH':
        arguments += ['--resume', evil]
    else:
        arguments += ['--cfg-options', f'load_from={evil}', f'resume={way != "load_from"}']
    with pytest.raises(LaunchError, match=r'(?s)evil\.pth.*mkdir'):
        run_training(train_args(tiny_config, *arguments))


def test_test(evil, tiny_config, test_args, tmp_path):
    with pytest.raises(LaunchError, match=r'checkpoint .*evil\.pth.*mkdir'):
        load_tool('test').test(test_args(tiny_config, evil, '--work-dir', tmp_path / 'work'))


@pytest.mark.parametrize('missing', [False, True])
def test_test_reads_no_pretrained_weights(missing, evil, tiny_config, test_args, tmp_path, monkeypatch):
    """The weights come from the checkpoint, so the config's file is neither read nor required."""
    cfg = Config.fromfile(str(tiny_config))
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict()), tmp_path / 'a.pth')
    monkeypatch.setattr(Runner, 'test', lambda runner: runner.load_or_resume())
    config = pretrained(tiny_config, 'gone.pth' if missing else evil)
    load_tool('test').test(test_args(config, tmp_path / 'a.pth', '--work-dir', tmp_path / 'work'))


QKFORMER = """
default_scope = 'mmpretrain'
model = dict(type='ImageClassifier',
             backbone=dict(type='mmkron.QKFormer', arch='cifar', init_cfg={init}),
             neck=dict(type='GlobalAveragePooling'),
             head=dict(type='LinearClsHead', num_classes=10, in_channels=384))
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
"""


@pytest.mark.parametrize(
    ('tool', 'way'),
    [
        ('analysis_tools/energy', 'checkpoint'),
        ('analysis_tools/energy', 'Pretrained'),
        ('visualizations/kao_coefficients', 'checkpoint'),
        ('deployment/export', 'checkpoint'),
    ],
)
def test_tools_that_build_a_model(tool, way, evil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / 'tools' / tool.split('/')[0]))  # as for a script that is run
    config, init = tmp_path / 'a.py', dict(type='Pretrained', checkpoint=str(evil)) if way == 'Pretrained' else None
    text = QKFORMER.format(init=init)
    if 'coefficients' in tool:
        from PIL import Image

        Image.new('RGB', (64, 64)).save(tmp_path / 'a.png')
        text = text.replace("type='mmkron.QKFormer', arch='cifar'", "type='mmkron.KANet', widen_factor=0.25")
        arguments = ['a.png', '--pixel', '0', '0']
    else:
        arguments = ['--out', 'x.onnx', '--shape', '32', '32'] if 'export' in tool else ['--out', 'out']
        if 'energy' in tool:
            text += "val_dataloader = dict(batch_size=1, num_workers=0, dataset=dict(type='mmkron.Digits'))\n"
    config.write_text(text)
    weights = [str(evil)] if way == 'checkpoint' else [] if 'export' in tool else ['none']
    with pytest.raises(SystemExit, match=r'error: .*evil\.pth.*mkdir'):
        load_tool(tool).main([str(config), *weights, *arguments])


@pytest.mark.parametrize(
    'arguments', ['lambda_weights --from resnet', 'qkformer_weights --arch cifar10-dvs', 'publish_model']
)
def test_converters(arguments, evil, tmp_path):
    name, *options = arguments.split()
    with pytest.raises(SystemExit, match='^error: SRC .*evil'):
        load_tool(f'model_converters/{name}').main([str(evil), str(tmp_path / 'out.pth'), *options])
    assert not list(tmp_path.glob('out*'))
