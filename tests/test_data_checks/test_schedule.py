"""Bad lengths of a training are refused before anything is built."""

import math

import pytest
from mmengine.config import Config

from mmkron.data_checks.schedule import check_schedule
from mmkron.engine import runner as launch
from mmkron.utils.errors import LaunchError
from support.errors import raises


def problems(**train_cfg):
    return [(item.where, item.text) for item in check_schedule(Config(dict(train_cfg=train_cfg)), ['train'])]


@pytest.mark.parametrize('value', [-1, 0, 1.5, math.nan, math.inf, '3', True, None, [1]])
@pytest.mark.parametrize('name', ['max_epochs', 'max_iters', 'val_interval'])
def test_bad_numbers(name, value):
    ((where, text),) = problems(**{name: value})
    assert where == f'train_cfg.{name}'
    assert text.endswith(f'got {value!r}')


def test_numbers_that_mmengine_accepts():
    assert not problems(by_epoch=True, max_epochs=1, val_begin=0, val_interval=9999)
    assert not problems(type='IterBasedTrainLoop', max_iters=8e4)
    assert problems(val_begin=-1)
    assert not problems()


def test_only_where_it_trains():
    cfg = Config(dict(train_cfg=dict(max_epochs=-1)))
    assert not list(check_schedule(cfg, ['val', 'test']))
    assert not list(check_schedule(Config(dict(train_cfg=None)), ['train']))


def test_start_is_refused():
    """Such a training used to end at once, with exit code 0 and nothing trained."""
    cfg = Config(dict(train_cfg=dict(by_epoch=True, max_epochs=-1)))
    with raises(LaunchError, 'train_cfg.max_epochs', -1):
        launch.check_data(cfg, 'some.py', ('train', 'val'))
