"""Whole runs in this process: configs and packages that are missing, training, resuming, testing, safe loading."""

import itertools
import os
import pickle
import uuid
import warnings
from argparse import Namespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.logging import HistoryBuffer, MMLogger
from mmengine.registry import DefaultScope
from torch import nn

import mmkron
from mmkron.engine import runner as launch
from mmkron.engine.console import quiet
from mmkron.utils import cli
from mmkron.utils.errors import LaunchError
from support.errors import raises
from support.tools import CLASSES, load_tool, run_training

tool = load_tool('test')


def load(path):
    mmkron.allow_checkpoint_globals()
    return torch.load(path, weights_only=True)


# ------------------------------------------------------------------------------------------------ missing and damaged


def test_missing_config(tmp_path):
    with raises(LaunchError, 'config', str(tmp_path / 'nowhere.py')):
        cli.load_config(Namespace(config=str(tmp_path / 'nowhere.py')))


def test_faults_of_a_config_name_file_and_line(tmp_path):
    """As Python does."""
    (tmp_path / 'a.py').write_text("_base_ = './base.py'")
    (tmp_path / 'base.py').write_text('x = 1\ny = z\n')
    with pytest.raises(NameError) as caught:
        cli.load_config(Namespace(config=str(tmp_path / 'a.py')))
    last = caught.traceback[-1]
    assert os.path.samefile(last.path, tmp_path / 'base.py')
    assert last.lineno + 1 == 2


def test_only_the_first_process_speaks(capsys, monkeypatch):
    def fail(args):
        print('a line')
        warnings.warn('a warning', stacklevel=1)
        raise LaunchError('the reason')

    monkeypatch.setattr(cli.time, 'sleep', lambda seconds: None)
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    with pytest.raises(SystemExit) as stop, pytest.warns(UserWarning, match='a warning'):
        cli.main(fail, Namespace())
    assert stop.value.code == 'error: the reason'
    assert capsys.readouterr().out == 'a line\n'
    for name in ('LOCAL_RANK', 'SLURM_LOCALID', 'OMPI_COMM_WORLD_LOCAL_RANK'):
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            patch.setenv(name, '1')
            with pytest.raises(SystemExit) as stop:
                cli.main(fail, Namespace())
        assert (caught, stop.value.code) == ([], 1)
    assert capsys.readouterr() == ('', '')


# -------------------------------------------------------------------------------------------------------- processes


@pytest.mark.skipif(torch.cuda.is_available(), reason='about machines without CUDA')
def test_cpu_group(monkeypatch, tmp_path):
    """Gloo, with DDP that takes no device; SyncBN, which torch has for accelerators only, becomes BN."""
    for name, value in dict(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_ADDR='127.0.0.1').items():
        monkeypatch.setenv(name, value)
    assert launch.open_cpu_group(Config(dict(launcher='none'))) is False
    with raises(LaunchError, '--launcher', 'slurm'):
        launch.open_cpu_group(Config(dict(launcher='slurm')))
    monkeypatch.setattr(
        torch.distributed,
        'init_process_group',
        lambda backend, init=torch.distributed.init_process_group: init(
            backend, init_method=f'file://{tmp_path}/store', rank=0, world_size=1
        ),
    )
    assert launch.open_cpu_group(Config(dict(launcher='pytorch'))) is True
    try:
        assert torch.distributed.get_backend() == 'gloo'
        runner = object.__new__(launch.LaunchRunner)
        runner._distributed, runner.cfg = True, Config(dict(find_unused_parameters=True))
        model = runner.wrap_model(None, nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4)))
        assert (model.device_ids, model.broadcast_buffers, model.find_unused_parameters) == (None, False, True)
        assert model(torch.rand(2, 3, 4, 4)).shape == (2, 4, 4, 4)
        own = runner.wrap_model(dict(device_ids=None, broadcast_buffers=True), nn.Linear(2, 2))
        assert own.broadcast_buffers
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason='about machines without CUDA')
def test_cpu_group_of_a_flexible_runner(monkeypatch):
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda backend: None)

    def prepare(strategy):
        cfg = Config(dict(launcher='pytorch', runner_type='mmkron.FlexibleRunner', strategy=strategy))
        assert launch.open_cpu_group(cfg) is True
        return cfg.strategy

    strategy = prepare(None)
    assert (strategy.type, strategy.model_wrapper.device_ids) == ('DDPStrategy', None)
    assert prepare(dict(type='mmkron.FSDPStrategy')).model_wrapper == dict(device_id='cpu')
    own = dict(device_id=0, use_orig_params=False)
    assert prepare(dict(type='FSDPStrategy', model_wrapper=own)).model_wrapper == own
    with raises(LaunchError, 'strategy.type', 'DeepSpeedStrategy'):
        prepare(dict(type='DeepSpeedStrategy'))


# -------------------------------------------------------------------------------------------------------- whole runs


def test_resume_has_the_same_weights(trained, tiny_config, train_args, monkeypatch):
    seen = {}

    def run(loop):
        seen.update(
            epoch=loop.epoch,
            weights={k: v.clone() for k, v in loop.runner.model.state_dict().items()},
            momentum=loop.runner.optim_wrapper.state_dict()['state'],
        )

    saved = load(trained / 'epoch_1.pth')
    assert (saved['meta']['epoch'], saved['meta']['iter']) == (1, 2)
    monkeypatch.setattr('mmengine.runner.EpochBasedTrainLoop.run', run)
    options = ['--cfg-options', 'train_cfg.max_epochs=2', 'randomness.seed=7']
    run_training(train_args(tiny_config, '--work-dir', trained, '--resume', trained / 'epoch_1.pth', *options))
    assert seen['epoch'] == 1  # of 0, 1: the next one to run is the second
    assert seen['weights'].keys() == saved['state_dict'].keys()
    assert all(torch.equal(value, saved['state_dict'][key]) for key, value in seen['weights'].items())
    for i, state in saved['optimizer']['state'].items():
        assert torch.equal(seen['momentum'][i]['momentum_buffer'], state['momentum_buffer'])


def test_out_and_show_dir(trained, tiny_config, test_args, tmp_path, capsys):
    out, folder = tmp_path / 'out.pkl', tmp_path / 'vis'
    options = ['--work-dir', tmp_path / 'test', '--out', out, '--show-dir', folder]
    options += ['--cfg-options', f'experiment_name={uuid.uuid4().hex}']  # MMEngine keeps loggers by name and second
    metrics = tool.test(test_args(tiny_config, trained / 'epoch_1.pth', *options))
    printed = capsys.readouterr().out
    assert str(out) in printed
    assert str(folder) in printed
    predictions = pickle.loads(out.read_bytes())
    assert len(predictions) == 6
    for prediction in predictions:
        assert prediction['pred_score'].shape == (2,)
        assert prediction['pred_score'].sum().item() == pytest.approx(1, abs=1e-5)
    right = sum(p['pred_label'].item() == p['gt_label'].item() for p in predictions)
    assert metrics['accuracy/top1'] == pytest.approx(100 * right / 6)
    names = sorted(f'{name}_{i}.JPEG_0.png' for name in CLASSES for i in range(3))
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.parametrize(
    ('option', 'path'),
    [('--work-dir', 'file/work'), ('--show-dir', 'file/vis'), ('--out', 'file/out.pkl'), ('--out', 'folder.pkl')],
)
def test_results_that_cannot_be_written(tiny_config, test_args, tmp_path, monkeypatch, option, path):
    """The error comes before anything is built."""
    (tmp_path / 'file').touch()
    (tmp_path / 'folder.pkl').mkdir()
    torch.save({'state_dict': {}, 'meta': {}}, tmp_path / 'a.pth')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, 'build_runner', lambda cfg: pytest.fail('a runner was built'))
    with raises(LaunchError, option, path):
        tool.test(test_args(tiny_config, 'a.pth', option, path))


def test_results_are_overwritten_only_later(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'new' / 'a.pkl'
    cli.check_writable(str(path), '--out', is_file=True)
    assert list(path.parent.iterdir()) == []
    path.write_bytes(b'old')
    cli.check_writable(str(path), '--out', is_file=True)
    assert path.read_bytes() == b'old'
    cli.check_writable('s3://bucket/a.pkl', '--out', is_file=True)
    assert not os.path.exists('s3:')


def test_tta_run_averages_both_flips(trained, tiny_config, test_args, tmp_path):
    scores = {}
    flip = (
        "[dict(type='mmkron.LoadImageFromFile'),dict(type='Resize',scale=(32,32)),"
        "dict(type='RandomFlip',prob={}),dict(type='PackInputs')]"
    )
    for name, extra in (
        ('plain', []),
        ('flipped', ['--cfg-options', 'test_dataloader.dataset.pipeline=FLIPPED']),
        ('tta', ['--tta']),
    ):
        args = test_args(
            tiny_config,
            trained / 'epoch_1.pth',
            '--work-dir',
            tmp_path / name,
            '--out',
            tmp_path / f'{name}.pkl',
            *extra,
        )
        if name == 'flipped':
            args.cfg_options = {'test_dataloader.dataset.pipeline': eval(flip.format(1.0))}
        tool.test(args)
        predictions = pickle.loads((tmp_path / f'{name}.pkl').read_bytes())
        scores[name] = torch.stack([prediction['pred_score'] for prediction in predictions])
    torch.testing.assert_close(scores['tta'], (scores['plain'] + scores['flipped']) / 2)
    assert not torch.equal(scores['tta'], scores['plain'])


def test_runs_restore_the_default_scope(tiny_config, train_args, tmp_path):
    before = DefaultScope.get_current_instance()
    with DefaultScope.overwrite_default_scope('mmdet'):  # as after a detector in the same process
        run_training(train_args(tiny_config, '--work-dir', tmp_path / 'again'))
        assert DefaultScope.get_current_instance().scope_name == 'mmdet'
    assert getattr(DefaultScope.get_current_instance(), 'name', None) == getattr(before, 'name', None)


@pytest.mark.parametrize('key', ['custom_hooks', 'default_hooks'])
def test_averages_of_sharded_weights(key):
    hook = dict(type='mmpretrain.EMAHook')
    hooks = {key: [hook] if key == 'custom_hooks' else dict(timer=None, ema=hook)}
    cfg = dict(
        runner_type='mmkron.FlexibleRunner', launcher='pytorch', strategy=dict(type='mmkron.FSDPStrategy'), **hooks
    )
    with raises(LaunchError, 'EMAHook', 'FSDPStrategy'):
        launch.build_runner(Config(cfg))


def test_flexible_runner(trained, tiny_config, train_args, tmp_path):
    """One process trains the config of a sharded run on its one device, compiles, and resumes at the right epoch."""
    config = tmp_path / 'flexible.py'
    extra = "runner_type = 'mmkron.FlexibleRunner'\nstrategy = dict(type='mmkron.FSDPStrategy')\n"
    config.write_text(tiny_config.read_text() + extra + 'compile = dict(disable=True)\n')
    runner = run_training(train_args(config, '--work-dir', tmp_path / 'w', '--auto-scale-lr'))
    assert type(runner.strategy).__name__ == 'SingleDeviceStrategy'
    assert runner._compile == dict(disable=True)
    assert runner.optim_wrapper.optimizer.param_groups[0]['initial_lr'] == pytest.approx(0.01 * 4 / 8)
    saved = torch.load(tmp_path / 'w' / 'epoch_1.pth', weights_only=True)
    theirs = torch.load(next(trained.rglob('epoch_1.pth')), weights_only=True)
    assert saved['state_dict'].keys() == theirs['state_dict'].keys()
    assert (saved['meta']['epoch'], saved['meta']['iter']) == (theirs['meta']['epoch'], theirs['meta']['iter'])
    resumed = run_training(
        train_args(config, '--work-dir', tmp_path / 'w', '--resume', '--cfg-options', 'train_cfg.max_epochs=2')
    )
    assert (resumed.epoch, resumed.iter) == (2, 2 * runner.iter)


# ----------------------------------------------------------------------------------------------------------- console


def summary_of(lines):
    """Return the line on which the summary starts, and its rows."""
    start = next(i for i, line in enumerate(lines) if line.endswith(' starts'))
    rows = itertools.takewhile(lambda line: line.startswith('  '), lines[start + 1 :])
    return start, dict(line.strip().split(maxsplit=1) for line in rows)


@pytest.mark.parametrize('flexible', [False, True])
def test_console(tiny_config, train_args, test_args, tmp_path, capsys, flexible):
    """A short summary comes before the first line of a training or a test; the log file has everything."""
    config, work = tmp_path / 'own.py', tmp_path / 'work'
    own = "default_hooks['logger'] = dict(type='LoggerHook', interval=1)\n"
    own += "runner_type = 'mmkron.FlexibleRunner'\n" * flexible
    config.write_text(tiny_config.read_text() + own)

    def run(call, args):
        args.cfg_options = dict(args.cfg_options or {}, experiment_name=uuid.uuid4().hex)
        capsys.readouterr()
        result = call(args)
        lines = capsys.readouterr().out.splitlines()
        return result, lines, *summary_of(lines)

    runner, lines, start, rows = run(run_training, train_args(config, '--work-dir', work))
    first = next(i for i, line in enumerate(lines) if 'Epoch(train)' in line)
    log = next(work.rglob('*.log')).read_text()
    assert start + len(rows) < first <= 12
    for text in ('System environment', 'Config:', 'Hooks will be executed', 'will be deprecated'):
        assert text in log
        assert not any(text in line for line in lines), text
    assert f'{sum(weight.numel() for weight in runner.model.parameters()):,} parameters' in rows['model']
    assert '6 samples' in rows['train']
    assert '6 samples' in rows['val']
    assert (rows['config'], rows['results']) == (str(config), str(work))
    assert all(line in log for line in lines[start + 1 : first])
    assert any('Saving checkpoint' in line for line in lines[first:])  # the console stays open
    if flexible:
        return
    checkpoint = str(work / 'epoch_1.pth')
    args = train_args(config, '--work-dir', work, '--resume', '--cfg-options', 'train_cfg.max_epochs=2')
    runner, *_, rows = run(run_training, args)
    assert (runner.epoch, runner.iter) == (2, 4)
    assert checkpoint in rows['weights']
    _, lines, start, rows = run(tool.test, test_args(config, checkpoint, '--work-dir', tmp_path / 'test'))
    assert start <= 3
    assert rows.keys() == {'config', 'model', 'test', 'weights', 'results'}
    assert any('accuracy/top1' in line for line in lines[start:])


def test_warnings_and_what_comes_before_a_failure_reach_the_console(capsys, tmp_path):
    logger = MMLogger(uuid.uuid4().hex, log_file=str(tmp_path / 'a.log'))
    assert quiet(logger) is logger
    logger.info('a dump')
    logger.warning('a warning')
    logger.warning('a warning')
    logger.warning('"FileClient" will be deprecated in future')
    logger.error('an error')
    said = [line.rsplit(' - ', 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ['a warning', 'an error']
    assert 'a dump' in (tmp_path / 'a.log').read_text()


# ------------------------------------------------------------------------------------------------------ safe loading


class Attribute:
    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_allowed_globals_are_enough_and_no_more(tmp_path):
    mmkron.allow_checkpoint_globals()
    mmkron.allow_checkpoint_globals()  # twice does no harm
    history = HistoryBuffer()
    history.update(1.5)
    content = dict(
        history=history,
        best=np.float64(0.5),
        count=np.int64(3),
        flag=np.bool_(True),
        text=np.str_('a'),
        array=np.arange(6, dtype=np.float32).reshape(2, 3),
        names=np.array(['a', 'bc']),
    )
    torch.save(content, tmp_path / 'a.pth')
    loaded = torch.load(tmp_path / 'a.pth', weights_only=True)
    assert loaded['history'].current() == 1.5
    for name in ('best', 'count', 'flag', 'text'):
        assert type(loaded[name]) is type(content[name])
        assert loaded[name] == content[name]
    for name in ('array', 'names'):
        np.testing.assert_array_equal(loaded[name], content[name])

    for owner, name in ((HistoryBuffer, '__init__'), (HistoryBuffer, 'update'), (np.ndarray, 'min')):
        torch.save({'x': Attribute(owner, name)}, tmp_path / 'a.pth')
        with pytest.raises(pickle.UnpicklingError, match=f"attribute '{name}'"):
            torch.load(tmp_path / 'a.pth', weights_only=True)


def test_numpy_1_names_load(tmp_path):
    mmkron.allow_checkpoint_globals()
    torch.save({'x': np.float64(0.5), 'y': np.arange(3)}, tmp_path / 'a.pth', _use_new_zipfile_serialization=False)
    data = (tmp_path / 'a.pth').read_bytes()
    if b'numpy._core' in data:  # same length does not matter: pickle's GLOBAL is a line of text
        (tmp_path / 'a.pth').write_bytes(data.replace(b'numpy._core.multiarray', b'numpy.core.multiarray'))
    loaded = torch.load(tmp_path / 'a.pth', weights_only=True)
    assert loaded['x'] == 0.5
    np.testing.assert_array_equal(loaded['y'], np.arange(3))
