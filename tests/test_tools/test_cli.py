"""The scripts, run as a user runs them or, where no process is needed, by their main function."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmkron
from conftest import free_ports
from support.tools import ROOT, load_tool, make_image_tree

TOOLS = ROOT / 'tools'
SCRIPTS = ('dist_train.sh', 'dist_test.sh', 'slurm_train.sh', 'slurm_test.sh')


def call(*command, cwd, **env) -> subprocess.CompletedProcess:
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **env}
    env['PATH'] = os.pathsep.join([env.pop('BIN', ''), str(Path(sys.executable).parent), env['PATH']])
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )


def test_train_and_test_kanet_on_an_image_tree(tmp_path, monkeypatch, capsys):
    """The shipped config trains and is tested outside of the checkout; without data, the script prints one error."""
    mmkron.allow_checkpoint_globals()
    config = str(ROOT / 'configs/kanet/kanet_kv_imagenet.py')
    done = call(sys.executable, TOOLS / 'train.py', config, cwd=tmp_path)
    assert (done.returncode, done.stderr.count('error: ')) == (1, 1)
    assert 'Traceback' not in done.stdout + done.stderr
    for part in (f'{tmp_path}/data/imagenet', config, 'train_dataloader.dataset.data_root=PATH'):
        assert part in done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing was started

    make_image_tree(tmp_path / 'data' / 'imagenet', with_meta=True)
    monkeypatch.chdir(tmp_path)
    small = ['--cfg-options', 'train_cfg.max_epochs=1', 'model.backbone.widen_factor=0.25']
    for split in ('train', 'val', 'test'):
        small += [f'{split}_dataloader.num_workers=0', f'{split}_dataloader.batch_size=3']
        small.append(f'{split}_dataloader.persistent_workers=False')
    load_tool('train').main([config, *small])
    checkpoint = tmp_path / 'work_dirs' / 'kanet_kv_imagenet' / 'epoch_1.pth'
    assert torch.load(checkpoint, weights_only=True)['meta']['iter'] == 2

    load_tool('test').main([config, str(checkpoint), '--tta', '--out', 'out.pkl', '--work-dir', 'tested', *small])
    predictions = pickle.loads((tmp_path / 'out.pkl').read_bytes())
    assert [prediction['pred_score'].shape for prediction in predictions] == [(1000,)] * 6
    assert [prediction['gt_label'].item() for prediction in predictions] == [0, 0, 0, 1, 1, 1]
    assert 'accuracy/top1' in capsys.readouterr().out
    assert list((tmp_path / 'tested').iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason='about gloo on machines without CUDA')
def test_two_processes_train_on_the_cpu(tmp_path):
    mmkron.allow_checkpoint_globals()
    config = ROOT / 'configs' / 'kanet' / 'kanet-kv_digits.py'
    few = ['train_dataloader.num_batch_per_epoch=2', 'train_cfg.max_epochs=1', 'val_dataloader.dataset.indices=9']
    few += [
        f'{split}_dataloader.{option}' for split in ('train', 'val') for option in ('num_workers=0', 'batch_size=8')
    ]
    few += [f'{split}_dataloader.persistent_workers=False' for split in ('train', 'val')]
    options = ['--work-dir', 'two processes', '--cfg-options', *few]
    done = call('bash', TOOLS / 'dist_train.sh', config, 2, *options, cwd=tmp_path, PORT=free_ports(1)[0])
    assert done.returncode == 0, done.stderr
    checkpoint = tmp_path / 'two processes' / 'epoch_1.pth'
    assert torch.load(checkpoint, weights_only=True)['meta']['iter'] == 2
    assert done.stdout.count('Saving checkpoint at 1 epochs') == 1  # only the first process prints
    assert 'accuracy/top1' in done.stdout


# ------------------------------------------------------------------------------------------------- shell scripts


@pytest.mark.parametrize('name', SCRIPTS)
def test_shell_scripts_print_their_usage(name, tmp_path):
    assert os.access(TOOLS / name, os.X_OK)
    done = call('bash', TOOLS / name, 'one', cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith('usage: ')


@pytest.fixture
def recorded(tmp_path):
    """Run a script with `srun` and `python` replaced by programs that print one argument per line."""
    for name in ('srun', 'python'):
        (tmp_path / 'bin').mkdir(exist_ok=True)
        (tmp_path / 'bin' / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        (tmp_path / 'bin' / name).chmod(0o755)

    def run(name, *argv, **env):
        done = call('bash', TOOLS / name, *argv, cwd=tmp_path, BIN=str(tmp_path / 'bin'), **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_slurm(recorded):
    """Sizes are set by variables; arguments with blanks and wildcards stay one argument each."""
    sizes = dict(GPUS='16', GPUS_PER_NODE='4', CPUS_PER_TASK='3', SRUN_ARGS='--quotatype auto -x node1')
    options = ['--cfg-options', 'a=[1, 2]', 'b=*']
    lines = recorded('slurm_train.sh', 'part', 'a job', 'my config.py', 'my dir', *options, **sizes)
    python = lines.index('python')
    wanted = {'srun', '-p', 'part', '--job-name=a job', '--gres=gpu:4', '--ntasks=16', '--ntasks-per-node=4'}
    assert {*lines[:python]} >= wanted | {'--cpus-per-task=3', '--quotatype', 'auto', '-x', 'node1'}
    script = ['-u', str(TOOLS / 'train.py'), 'my config.py', '--work-dir', 'my dir', '--launcher', 'slurm']
    assert lines[python + 1 :] == [*script, *options]
    lines = recorded('slurm_test.sh', 'part', 'job', 'c.py', 'k.pth', '--tta')
    assert {'--gres=gpu:8', '--ntasks=8', '--ntasks-per-node=8', '--cpus-per-task=5'} <= {*lines}
    script = ['python', '-u', str(TOOLS / 'test.py'), 'c.py', 'k.pth', '--launcher', 'slurm', '--tta']
    assert lines[-len(script) :] == script


def test_several_machines(recorded):
    """The options of torch.distributed.run come before the script, its arguments after it."""
    nodes = dict(NNODES='2', NODE_RANK='1', PORT='1234', MASTER_ADDR='10.0.0.1')
    lines = recorded('dist_train.sh', 'my config.py', '4', '--amp', **nodes)
    assert lines[:3] == ['python', '-m', 'torch.distributed.run']
    given = {'--nnodes=2', '--node_rank=1', '--master_addr=10.0.0.1', '--master_port=1234', '--nproc_per_node=4'}
    assert {*lines[3:8]} == given
    assert lines[8:] == [str(TOOLS / 'train.py'), 'my config.py', '--launcher', 'pytorch', '--amp']
    lines = recorded('dist_test.sh', 'c.py', 'k.pth', '1', '--out', 'a b.pkl')
    assert {'--nnodes=1', '--master_addr=127.0.0.1', '--nproc_per_node=1'} <= {*lines}
    assert lines[8:] == [str(TOOLS / 'test.py'), 'c.py', 'k.pth', '--launcher', 'pytorch', '--out', 'a b.pkl']
