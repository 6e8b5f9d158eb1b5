"""Settings of a training that would silently go wrong are refused before anything is built."""

import math

import pytest
from mmengine.config import Config

from mmkron import data_checks
from mmkron.data_checks import DataError
from support.data_checks import problems
from support.errors import raises
from support.tools import ROOT

CUTMIX, MIXUP = dict(type='CutMix', alpha=1.0), dict(type='Mixup', alpha=0.5)
AUGMENTS = dict(augments=CUTMIX)


def schedule(splits=('train',), **train_cfg):
    return [(item.where, item.text) for item in problems(Config(dict(train_cfg=train_cfg)), 'schedule', splits)]


@pytest.mark.parametrize('value', [-1, 0, 1.5, math.nan, math.inf, '3', True, None, [1]])
@pytest.mark.parametrize('name', ['max_epochs', 'max_iters', 'val_interval'])
def test_bad_numbers_of_a_schedule(name, value):
    ((where, text),) = schedule(**{name: value})
    assert where == f'train_cfg.{name}'
    assert text.endswith(f'got {value!r}')


def test_numbers_that_mmengine_accepts():
    assert not schedule(by_epoch=True, max_epochs=1, val_begin=0, val_interval=9999)
    assert not schedule(type='IterBasedTrainLoop', max_iters=8e4)
    assert schedule(val_begin=-1)
    assert not schedule()
    assert not schedule(('val', 'test'), max_epochs=-1)
    assert not problems(Config(dict(train_cfg=None)), 'schedule')


def test_start_is_refused():
    """Such a training would end at once, with exit code 0 and nothing trained."""
    cfg = Config(dict(train_cfg=dict(by_epoch=True, max_epochs=-1)))
    with raises(DataError, 'train_cfg.max_epochs', -1):
        data_checks.run(cfg, 'some.py', ('train', 'val'))


def events(model=None, step='mmkron.PackEventInputs', hooks=(), **preprocessor):
    nested = dict(type='RandomApply', transforms=[dict(type=step)], prob=1.0)
    dataset = dict(type='RepeatDataset', times=2, dataset=dict(type='mmkron.EventFolder', pipeline=[nested]))
    return Config(
        dict(
            model=model or {},
            data_preprocessor=preprocessor,
            train_dataloader=dict(dataset=dataset),
            custom_hooks=list(hooks),
        )
    )


SWITCH = dict(type='SwitchRecipeHook', schedule=[dict(action_epoch=1), dict(action_epoch=2, batch_augments=AUGMENTS)])
NESTED = dict(data_preprocessor=dict(type='mmpretrain.ClsDataPreprocessor', batch_augments=AUGMENTS))


@pytest.mark.parametrize(
    ('cfg', 'key', 'name'),
    [
        (events(dict(train_cfg=AUGMENTS)), 'model.train_cfg', 'CutMix'),
        (events(dict(train_cfg=dict(augments=[MIXUP, dict(type='ResizeMix', alpha=1.0)]))), 'train_cfg', 'ResizeMix'),
        (events(batch_augments=dict(augments=[CUTMIX])), 'batch_augments', 'CutMix'),
        (events(NESTED), 'batch_augments', 'CutMix'),
        (events(hooks=[dict(type='EMAHook'), SWITCH]), 'custom_hooks.1.schedule.1', 'CutMix'),
    ],
)
def test_augments_that_cut_events(cfg, key, name):
    (problem,) = problems(cfg, 'mixing of events', ('train',))
    assert key in problem.where
    assert name in problem.text
    assert not problem.warning
    assert problems(cfg, 'mixing of events', ('val', 'test')) == []


@pytest.mark.parametrize(
    'cfg',
    [
        events(dict(train_cfg=dict(augments=MIXUP, probs=0.5))),
        events(dict(train_cfg=AUGMENTS), type='mmkron.EventDataPreprocessor'),
        events(dict(train_cfg=AUGMENTS), step='PackInputs'),
        events(),
        Config(dict()),
    ],
)
def test_augments_that_do_not_cut_events(cfg):
    assert problems(cfg, 'mixing of events', ('train',)) == []


def test_events_of_a_shipped_config():
    """It mixes frames correctly, also with CutMix; with the host's preprocessor the training is refused."""
    cfg = Config.fromfile(ROOT / 'configs/qkformer/qkformer_cifar10-dvs_t16.py')
    cfg.model.train_cfg.augments = CUTMIX
    assert problems(cfg, 'mixing of events', ('train',)) == []
    cfg.data_preprocessor.type = 'ClsDataPreprocessor'
    with raises(DataError, 'model.train_cfg', 'CutMix'):
        data_checks.run(cfg, 'some.py', ('train',))
