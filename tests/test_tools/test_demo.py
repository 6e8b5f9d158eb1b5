"""The demo trains, then reports and draws the predictions of the best checkpoint."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import mmkron
from support.tools import ROOT


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    import demo

    return demo


def test_demo(tmp_path, demo, capsys, monkeypatch):
    monkeypatch.setattr(demo, 'GRID', (2, 2))
    options = ['train_cfg.max_epochs=2', 'train_dataloader.batch_size=64', 'param_scheduler=None']
    options += ['train_dataloader.num_batch_per_epoch=4', 'val_dataloader.dataset.indices=90']
    config = str(ROOT / 'configs/kanet/kanet-kv_digits.py')
    demo.main([config, '--work-dir', str(tmp_path), '--cfg-options', *options])
    report = dict(re.split(r' {2,}| (?=/)', line, maxsplit=1) for line in capsys.readouterr().out.splitlines()[-4:])
    assert set(report) == {'best top-1', 'checkpoint', 'log', 'picture'}

    log = Path(report['log']).read_text()
    scores = [float(score) for score in re.findall(r'accuracy/top1: ([\d.]+)', log)]
    assert report['best top-1'] == f'{max(scores):.2f} % on 90 validation images'
    mmkron.allow_checkpoint_globals()
    checkpoint = torch.load(report['checkpoint'], weights_only=True)
    assert checkpoint['meta']['epoch'] == 1 + int(np.argmax(scores))
    assert Path(report['picture']).is_file()


@pytest.mark.parametrize(
    ('option', 'name'),
    [
        ('default_scope=mmseg', 'default_scope'),
        ('default_hooks.checkpoint.save_best=None', 'save_best'),
        ('val_evaluator=None', 'val_evaluator'),
    ],
)
def test_refused_before_the_training(tmp_path, demo, option, name):
    config = str(ROOT / 'configs/kanet/kanet-kv_digits.py')
    with pytest.raises(SystemExit, match=f'^error: .*{name}'):
        demo.main([config, '--work-dir', str(tmp_path / 'work'), '--cfg-options', option])
    assert not (tmp_path / 'work').exists()
