"""Batch augments of images in a config that trains on frames of events."""

import pytest
from mmengine.config import Config

from mmkron.data_checks.mixing import check_mixing
from mmkron.engine import runner as launch
from mmkron.utils.errors import LaunchError
from support.errors import raises
from support.tools import ROOT

CUTMIX, MIXUP = dict(type='CutMix', alpha=1.0), dict(type='Mixup', alpha=0.5)


def config(model=None, step='mmkron.PackEventInputs', hooks=(), **preprocessor):
    nested = dict(type='RandomApply', transforms=[dict(type=step)], prob=1.0)
    dataset = dict(type='RepeatDataset', times=2, dataset=dict(type='mmkron.EventFolder', pipeline=[nested]))
    loader = dict(dataset=dataset)
    return Config(
        dict(model=model or {}, data_preprocessor=preprocessor, train_dataloader=loader, custom_hooks=list(hooks))
    )


AUGMENTS = dict(augments=CUTMIX)
SWITCH = dict(type='SwitchRecipeHook', schedule=[dict(action_epoch=1), dict(action_epoch=2, batch_augments=AUGMENTS)])
NESTED = dict(data_preprocessor=dict(type='mmpretrain.ClsDataPreprocessor', batch_augments=AUGMENTS))


@pytest.mark.parametrize(
    ('cfg', 'key', 'name'),
    [
        (config(dict(train_cfg=AUGMENTS)), 'model.train_cfg', 'CutMix'),
        (config(dict(train_cfg=dict(augments=[MIXUP, dict(type='ResizeMix', alpha=1.0)]))), 'train_cfg', 'ResizeMix'),
        (config(batch_augments=dict(augments=[CUTMIX])), 'batch_augments', 'CutMix'),
        (config(NESTED), 'batch_augments', 'CutMix'),
        (config(hooks=[dict(type='EMAHook'), SWITCH]), 'custom_hooks.1.schedule.1', 'CutMix'),
    ],
)
def test_faults(cfg, key, name):
    (problem,) = check_mixing(cfg, ('train',))
    assert key in problem.where
    assert name in problem.text
    assert not problem.warning
    assert list(check_mixing(cfg, ('val', 'test'))) == []


@pytest.mark.parametrize(
    'cfg',
    [
        config(dict(train_cfg=dict(augments=MIXUP, probs=0.5))),
        config(dict(train_cfg=dict(augments=CUTMIX)), type='mmkron.EventDataPreprocessor'),
        config(dict(train_cfg=dict(augments=CUTMIX)), step='PackInputs'),
        config(),
        Config(dict()),
    ],
)
def test_no_faults(cfg):
    assert list(check_mixing(cfg, ('train',))) == []


def test_launcher_says_it():
    """The shipped config mixes frames rightly, also with CutMix; with the host's preprocessor it is stopped."""
    cfg = Config.fromfile(ROOT / 'configs/qkformer/qkformer_cifar10-dvs_t16.py')
    cfg.model.train_cfg.augments = CUTMIX
    assert list(check_mixing(cfg, ('train',))) == []
    cfg.data_preprocessor.type = 'ClsDataPreprocessor'
    cfg.train_dataloader.dataset.update(type='mmkron.EventFolder', data_root='')
    with raises(LaunchError, 'model.train_cfg', 'CutMix'):
        launch.check_data(cfg, 'some.py', ('train',))
