"""A training that version 0.1 started is resumed by this version."""

import os
import shutil

import pytest
import torch

from mmkron.utils.weights import read_whole
from support.tools import ROOT, make_image_tree, run_training

# Config, checkpoint and last_checkpoint as commit 8237692 wrote them after the first epoch, with mmkron.CheckpointHook
# and mmkron.ResumeHook.
WORK_DIR = ROOT / 'tests/data/work_dir_0.1'


def test_resume(tmp_path, monkeypatch, train_args):
    monkeypatch.chdir(tmp_path)
    make_image_tree(tmp_path / 'imagenet', with_meta=False)
    shutil.copytree(WORK_DIR, tmp_path / 'work')
    before = read_whole('work/epoch_1.pth', 'checkpoint')
    with pytest.warns(DeprecationWarning, match='ResumeHook'):
        runner = run_training(
            train_args('work/kanet.py', '--work-dir', 'work', '--resume', '--cfg-options', 'train_cfg.max_epochs=2')
        )
    assert (runner.epoch, runner.iter) == (2, 4)
    after = read_whole('work/epoch_2.pth', 'checkpoint')
    assert after['meta']['mmkron']['sampler_seed'] == before['meta']['mmkron']['sampler_seed']
    assert after['state_dict'].keys() == before['state_dict'].keys()
    assert after['message_hub']['log_scalars']['train/loss']._log_history[:1].tolist() == pytest.approx(
        before['message_hub']['log_scalars']['train/loss']._log_history[:1].tolist()
    )
    weights = [name for name in before['state_dict'] if name.endswith('weight')]
    assert any(not torch.equal(after['state_dict'][name], before['state_dict'][name]) for name in weights)
    assert sorted(name for name in os.listdir('work') if name.endswith('.pth')) == ['epoch_1.pth', 'epoch_2.pth']
