"""A disk that is full while a checkpoint is written, and resuming after it."""

import multiprocessing
import os
import resource
import uuid

import pytest

from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import read_whole
from support.tools import run_training


@pytest.fixture
def train(tiny_config, train_args, tmp_path, monkeypatch):
    """Train the tiny image tree with changes of the config."""
    monkeypatch.setattr(os, 'fsync', lambda descriptor: None)  # for a power cut, which nothing here tests

    def run(changes):
        path = tmp_path / 'changed.py'
        # MMEngine keeps scores by the name of the experiment and the second.
        path.write_text(tiny_config.read_text() + f'experiment_name = {uuid.uuid4().hex!r}\n' + changes)
        return run_training(train_args(path, '--work-dir', tmp_path / 'work', '--no-validate'))

    return run


def test_disk_full_while_saving(train, tmp_path):
    """A limit on the size of files stands for the disk: the write of the second checkpoint stops in the middle."""
    own = "\ndefault_hooks['checkpoint'].update(type='mmkron.CheckpointHook', max_keep_ckpts=1)"
    own += "\ntrain_cfg['max_epochs'] = {}"
    train(own.format(1))
    work = tmp_path / 'work'
    first = (work / 'epoch_1.pth').read_bytes()
    said = tmp_path / 'said'

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(first) // 2, len(first) // 2))
        try:
            train(own.format(2) + '\nresume = True')
        except LaunchError as error:
            said.write_text(str(error))

    process = multiprocessing.get_context('fork').Process(target=fill)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    message = said.read_text()
    assert f'{work}/epoch_2.pth' in message
    assert 'File too large' in message
    assert [path.name for path in work.glob('*.pth*')] == ['epoch_1.pth']
    assert (work / 'epoch_1.pth').read_bytes() == first
    assert (work / 'last_checkpoint').read_text() == f'{work}/epoch_1.pth'
    assert train(own.format(2) + '\nresume = True').iter == 4


def test_truncated_checkpoint_of_mmengines_own_hook(train, tmp_path, capfd):
    """MMEngine writes in place, and names the file only afterwards."""
    train("\ntrain_cfg['max_epochs'] = 2")
    second = tmp_path / 'work/epoch_2.pth'
    second.write_bytes(second.read_bytes()[:1000])
    runner = train("\ntrain_cfg['max_epochs'] = 2\nresume = True")
    assert runner.iter == 4
    out = capfd.readouterr().out
    assert str(second) in out
    assert f'{tmp_path}/work/epoch_1.pth' in out
    assert read_whole(str(second), '')['meta']['iter'] == 4
