"""The demo: trains, then reports and draws what the best checkpoint predicts."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mmkron
from support.tools import ROOT


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    import demo

    return demo


def test_demo(tmp_path, demo, capsys):
    options = ['train_cfg.max_epochs=2', 'train_dataloader.batch_size=128', 'param_scheduler=None']
    config = str(ROOT / 'configs/kanet/kanet-kv_digits.py')
    demo.main([config, '--work-dir', str(tmp_path), '--cfg-options', *options])
    report = dict(re.split(r' {2,}| (?=/)', line, maxsplit=1) for line in capsys.readouterr().out.splitlines()[-4:])
    assert set(report) == {'best top-1', 'checkpoint', 'log', 'picture'}

    log = Path(report['log']).read_text()
    scores = [float(score) for score in re.findall(r'accuracy/top1: ([\d.]+)', log)]
    assert report['best top-1'] == f'{max(scores):.2f} % on 450 validation images'
    assert 'eta: ' in log
    mmkron.allow_checkpoint_globals()
    checkpoint = torch.load(report['checkpoint'], weights_only=True)
    assert checkpoint['meta']['epoch'] == 1 + int(np.argmax(scores))
    picture = np.asarray(Image.open(report['picture']).convert('RGB'))
    red = (picture[..., 0] > 200) & (picture[..., 1:] < 80).all(-1)
    assert red.any()  # after two epochs some predictions are wrong


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['default_scope=mmseg'], r"default_scope must be one of \('mmpretrain', 'mmdet'\) for a demo, got 'mmseg'"),
        (['default_hooks.checkpoint.save_best=None'], 'needs val_evaluator and default_hooks.checkpoint.save_best'),
        (['val_evaluator=None'], 'needs val_evaluator and default_hooks.checkpoint.save_best'),
    ],
)
def test_refused_before_the_training(tmp_path, demo, options, message):
    config = str(ROOT / 'configs/kanet/kanet-kv_digits.py')
    with pytest.raises(SystemExit, match=f'^error: .*{message}'):
        demo.main([config, '--work-dir', str(tmp_path / 'work'), '--cfg-options', *options])
    assert not (tmp_path / 'work').exists()
