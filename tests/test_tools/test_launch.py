"""Whole runs in this process: training, resuming, testing; missing things; safe loading."""

import itertools
import os
import pickle
import re
import uuid
import warnings
from argparse import Namespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.logging import HistoryBuffer, MMLogger
from mmengine.registry import DefaultScope

import mmkron
from mmkron.engine import runner as launch
from mmkron.engine.console import quiet
from mmkron.engine.runner import LaunchError
from support.errors import raises
from support.tools import CLASSES, make_image_tree


@pytest.fixture
def trained(tiny_config, tmp_path, train_args):
    """The work dir of one epoch on the tiny config."""
    launch.train(train_args(tiny_config, '--work-dir', tmp_path / 'work'))
    return tmp_path / 'work'


def load(path):
    mmkron.allow_checkpoint_globals()
    return torch.load(path, weights_only=True)


# ----------------------------------------------------------------------------------------------- missing things


def test_config_missing(tmp_path):
    with pytest.raises(LaunchError, match=r"config is not a file: 'configs/nowhere\.py'"):
        launch.load_config('configs/nowhere.py')
    (tmp_path / 'a.py').write_text("_base_ = './gone.py'")
    with pytest.raises(LaunchError, match=r'a\.py.* cannot be read: .*gone\.py'):
        launch.load_config(str(tmp_path / 'a.py'))
    (tmp_path / 'a.py').write_text("custom_imports = dict(imports=['no_such_module'])")
    with pytest.raises(LaunchError, match=r'cannot be read: .*no_such_module'):
        launch.load_config(str(tmp_path / 'a.py'))
    (tmp_path / 'a.txt').touch()
    with pytest.raises(LaunchError, match=r'cannot be read: Only py/yml/yaml/json'):
        launch.load_config(str(tmp_path / 'a.txt'))


BASE = "_base_ = './base{}'\n"


@pytest.mark.parametrize(
    ('files', 'place', 'reason'),
    [
        ({'a.py': 'x = 1\n\ny = (\n'}, ('a.py', 3), 'SyntaxError'),
        ({'a.py': 'x = 1\nreturn x\n'}, ('a.py', 2), 'SyntaxError'),
        ({'a.py': 'x = 1\ny = z\n'}, ('a.py', 2), "NameError: name 'z'"),
        ({'a.py': 'def f():\n    return 1 / 0\n\n\nx = f()\n'}, ('a.py', 2), 'ZeroDivisionError'),
        ({'a.py': "x = dict(y=1)\nz = x['z']\n"}, ('a.py', 2), "KeyError: 'z'"),
        ({'a.py': "x = 1\nopen('/nowhere')\n"}, ('a.py', 2), 'FileNotFoundError'),
        ({'a.py': b'x = 1\n# gr\xfcn\n'}, ('a.py', 2), 'UnicodeDecodeError'),
        ({'a.py': BASE.format('.py'), 'base.py': 'x = 1\ny = [1,\n'}, ('base.py', 2), 'SyntaxError'),
        ({'a.py': BASE.format('.py'), 'base.py': 'x = 1\ny = z\n'}, ('base.py', 2), "NameError: name 'z'"),
        ({'a.py': BASE.format('.py'), 'base.py': b'\n\n# gr\xfcn\n'}, ('base.py', 3), 'UnicodeDecodeError'),
        ({'a.py': BASE.format('.py') + 'x = _base_.y.z\n', 'base.py': 'x = 1\n'}, ('a.py', 2), 'AttributeError'),
        (
            {'a.py': BASE.format('.py') + 'x = dict(y=dict(z=1))', 'base.py': 'x = dict(y=1)'},
            ('a.py', None),
            'TypeError',
        ),
        ({'a.py': BASE.format('.yaml'), 'base.yaml': 'x: 1\ny: [1\nz: 3\n'}, ('base.yaml', 3), 'ParserError'),
        ({'a.yaml': 'x: 1\ny: {z: 1\n'}, ('a.yaml', 3), 'ParserError'),
        ({'a.yaml': ''}, ('a.yaml', None), 'it must hold a mapping'),
        ({'a.json': '{"x": 1,\n "y": }\n'}, ('a.json', 2), 'JSONDecodeError'),
        ({'a.json': '[1]'}, ('a.json', None), 'it must hold a mapping'),
        (
            {
                'a.py': 'from mmengine.config import read_base\n\nwith read_base():\n    from .base import *\n',
                'base.py': 'x = y',
            },
            ('base.py', 1),
            "NameError: name 'y'",
        ),
        (
            {'a.py': "custom_imports = dict(imports=['broken_by_test'])", 'broken_by_test.py': '\nx = y'},
            ('broken_by_test.py', 2),
            'NameError',
        ),
        (
            {'a.py': "custom_imports = dict(imports=['cut_by_test'])", 'cut_by_test.py': '\nx = ('},
            ('cut_by_test.py', 2),
            'SyntaxError',
        ),
    ],
)
def test_config_faults_name_file_and_line(tmp_path, monkeypatch, files, place, reason):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    top = str(tmp_path / next(iter(files)))
    file, line = place
    with raises(LaunchError, 'config', top) as caught:
        launch.load_config(top)
    found = re.search(r'cannot be read: (\S+?)(?:, line (\d+))?: (.*)', str(caught.value))
    assert os.path.samefile(found[1], tmp_path / file)
    assert found[2] == (line and str(line))
    assert found[3].startswith(reason)


def test_import_that_fails_in_a_module_of_the_config(tmp_path, monkeypatch):
    """The reason, and not only the module that the config names."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'importing_by_test.py').write_text('import no_such_module\n')
    (tmp_path / 'a.py').write_text("custom_imports = dict(imports=['importing_by_test'])")
    with raises(LaunchError, 'importing_by_test') as caught:
        launch.load_config(str(tmp_path / 'a.py'))
    assert "No module named 'no_such_module'" in str(caught.value)


@pytest.mark.parametrize('model', [None, 3, {}, dict(backbone=dict(type='KANet'))])
def test_config_without_a_model(tmp_path, train_args, model):
    path = tmp_path / 'a.py'
    path.write_text('' if model is None else f'model = {model!r}')
    with raises(LaunchError, 'model', str(path)):
        launch.train(train_args(path))


def test_hosts_missing(monkeypatch):

    def no_module(name):
        imported.append(name)
        if name.startswith('mmdet'):
            raise ModuleNotFoundError(reason)

    monkeypatch.setattr(launch, 'import_module', no_module)
    cfg = Config(dict(default_scope='mmseg', model=dict(backbone=dict(type='mmdet.ResNet'), neck=[dict(type='FPN')])))
    imported, reason = [], "No module named 'mmdet'"
    with pytest.raises(LaunchError, match=r"needs mmdet, .*No module named 'mmdet'\n.*docs/install\.md .*make test"):
        launch.check_hosts(cfg)
    reason = "No module named 'mmcv._ext'"
    with pytest.raises(LaunchError, match='mmcv-lite has no compiled operators'):
        launch.check_hosts(cfg)
    imported.clear()
    launch.check_hosts(Config(dict(default_scope='mmseg', model=dict(type='mmkron.KANet'))))
    assert imported == ['mmseg.models']


def test_main_speaks_once(capsys, monkeypatch):

    def fail(args):
        print('a line')
        warnings.warn('a warning', stacklevel=1)
        raise LaunchError('what is wrong')

    monkeypatch.setattr(launch.time, 'sleep', lambda seconds: None)
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    with pytest.raises(SystemExit) as stop, pytest.warns(UserWarning, match='a warning'):
        launch.main(fail, Namespace(launcher='none', local_rank=0))
    assert stop.value.code == 'error: what is wrong'
    assert capsys.readouterr() == ('a line\n', '')
    for launcher, name in (
        ('pytorch', 'LOCAL_RANK'),
        ('slurm', 'SLURM_LOCALID'),
        ('mpi', 'OMPI_COMM_WORLD_LOCAL_RANK'),
    ):
        monkeypatch.setenv(name, '1')
        with pytest.raises(SystemExit) as stop, warnings.catch_warnings(record=True) as caught:
            launch.main(fail, Namespace(launcher=launcher, local_rank=0))
        assert caught == []
        assert stop.value.code == 1
    assert capsys.readouterr() == ('', '')


@pytest.mark.parametrize('error', [ValueError('a'), KeyboardInterrupt()])
def test_main_hides_no_other_error(error):

    def fail(args):
        raise error

    with pytest.raises(type(error)):
        launch.main(fail, Namespace(launcher='none', local_rank=0))


# -------------------------------------------------------------------------------------------------- distributed


def test_launcher_without_its_environment(tiny_config, train_args, monkeypatch):
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'):
        monkeypatch.setenv(name, '0')  # so that what the code sets is undone
        monkeypatch.delenv(name)
    with pytest.raises(LaunchError, match='RANK is not set.*dist_train.sh'):
        launch.train(train_args(tiny_config, '--launcher', 'pytorch'))


@pytest.mark.skipif(torch.cuda.is_available(), reason='about machines without CUDA')
def test_cpu_group(monkeypatch):
    opened = []
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda *args, **kwargs: opened.append((args, kwargs)))
    cfg = Config(dict(launcher='pytorch', find_unused_parameters=True, env_cfg=dict(dist_cfg=dict(backend='nccl'))))
    assert launch.init_cpu_group(cfg) is True
    assert opened == [(('gloo',), {})]
    assert cfg.env_cfg.dist_cfg.backend == 'gloo'
    assert cfg.model_wrapper_cfg == dict(
        type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False, find_unused_parameters=True
    )
    cfg = Config(dict(launcher='pytorch', model_wrapper_cfg=dict(type='Own')))
    assert launch.init_cpu_group(cfg) is True
    assert cfg.model_wrapper_cfg == dict(type='Own')
    norm = dict(type='SyncBN', requires_grad=True)
    model = dict(backbone=dict(norm_cfg=norm), heads=[dict(norm_cfg=norm), dict(norm_cfg=dict(type='GN'))])
    cfg = Config(dict(launcher='pytorch', model=model))
    assert launch.init_cpu_group(cfg) is True
    assert cfg.model.backbone.norm_cfg == cfg.model.heads[0].norm_cfg == dict(type='BN', requires_grad=True)
    assert cfg.model.heads[1].norm_cfg.type == 'GN'
    cfg = Config(dict(launcher='pytorch', sync_bn='torch'))
    assert launch.init_cpu_group(cfg) is True
    assert 'sync_bn' not in cfg
    assert launch.init_cpu_group(Config(dict(launcher='none'))) is False
    with pytest.raises(LaunchError, match='--launcher slurm needs an accelerator'):
        launch.init_cpu_group(Config(dict(launcher='slurm')))


@pytest.mark.skipif(torch.cuda.is_available(), reason='about machines without CUDA')
def test_cpu_group_of_a_flexible_runner(monkeypatch):
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda *args, **kwargs: None)

    def prepare(strategy):
        cfg = Config(dict(launcher='pytorch', runner_type='FlexibleRunner', strategy=strategy))
        assert launch.init_cpu_group(cfg) is True
        assert 'model_wrapper_cfg' not in cfg
        return cfg.strategy

    for given in (None, dict(type='DDPStrategy', sync_bn='torch')):
        strategy = prepare(given)
        assert set(strategy) == {'type', 'model_wrapper'}
        assert strategy.type == 'DDPStrategy'
        assert (strategy.model_wrapper.type, strategy.model_wrapper.device_ids) == ('MMDistributedDataParallel', None)
    assert prepare(dict(type='mmkron.FSDPStrategy')).model_wrapper == dict(device_id='cpu')
    own = prepare(dict(type='FSDPStrategy', model_wrapper=dict(device_id=0, use_orig_params=False))).model_wrapper
    assert own == dict(device_id=0, use_orig_params=False)
    with pytest.raises(LaunchError, match="strategy.type 'DeepSpeedStrategy' needs an accelerator"):
        prepare(dict(type='DeepSpeedStrategy'))


# ------------------------------------------------------------------------------------------------ whole runs


def test_train_then_resume(trained, tiny_config, train_args):
    first = load(trained / 'epoch_1.pth')
    assert first['meta']['epoch'] == 1
    log = next(trained.rglob('scalars.json')).read_text()
    assert 'accuracy/top1' in log

    # No learning rate: what the second epoch ends with is what it started from.
    runner = launch.train(
        train_args(
            tiny_config,
            '--work-dir',
            trained,
            '--resume',
            '--cfg-options',
            'train_cfg.max_epochs=2',
            'model.backbone.norm_eval=True',
        )
    )
    assert (runner.epoch, runner.iter) == (2, 4)
    assert not (trained / 'epoch_0.pth').exists()
    second = load(trained / 'epoch_2.pth')
    assert (second['meta']['epoch'], second['meta']['iter']) == (2, 4)


def test_resume_has_the_same_weights(trained, tiny_config, train_args, monkeypatch):
    seen = {}

    def run(loop):
        seen.update(
            epoch=loop.epoch,
            weights={k: v.clone() for k, v in loop.runner.model.state_dict().items()},
            momentum=loop.runner.optim_wrapper.state_dict()['state'],
        )

    monkeypatch.setattr('mmengine.runner.EpochBasedTrainLoop.run', run)
    launch.train(
        train_args(
            tiny_config,
            '--work-dir',
            trained,
            '--resume',
            trained / 'epoch_1.pth',
            '--cfg-options',
            'train_cfg.max_epochs=2',
            'randomness.seed=7',
        )
    )
    saved = load(trained / 'epoch_1.pth')
    assert seen['epoch'] == 1  # of 0, 1: the next one to run is the second
    assert seen['weights'].keys() == saved['state_dict'].keys()
    assert all(torch.equal(value, saved['state_dict'][key]) for key, value in seen['weights'].items())
    assert all(
        torch.equal(seen['momentum'][i]['momentum_buffer'], state['momentum_buffer'])
        for i, state in saved['optimizer']['state'].items()
    )


def test_test_run_with_out_and_show_dir(trained, tiny_config, test_args, tmp_path, capsys):
    metrics = launch.test(
        test_args(
            tiny_config,
            trained / 'epoch_1.pth',
            '--work-dir',
            tmp_path / 'test',
            '--out',
            tmp_path / 'out.pkl',
            '--show-dir',
            tmp_path / 'vis',
        )
    )
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.rsplit(maxsplit=1)[1] for line in last] == [str(tmp_path / 'out.pkl'), str(tmp_path / 'vis')]
    predictions = pickle.loads((tmp_path / 'out.pkl').read_bytes())
    assert len(predictions) == 6
    for prediction in predictions:
        assert prediction['pred_score'].shape == (2,)
        assert prediction['pred_score'].sum().item() == pytest.approx(1, abs=1e-5)
    right = sum(p['pred_label'].item() == p['gt_label'].item() for p in predictions)
    assert metrics['accuracy/top1'] == pytest.approx(100 * right / 6)
    assert sorted(path.name for path in (tmp_path / 'vis').iterdir()) == sorted(
        f'{name}_{i}.JPEG_0.png' for name in CLASSES for i in range(3)
    )


@pytest.mark.parametrize(
    ('option', 'path'),
    [
        ('--work-dir', 'file/work'),
        ('--show-dir', 'file/vis'),
        ('--out', 'file/out.pkl'),
        ('--out', 'folder.pkl'),
        ('--show-dir', '/proc/no/folder'),
        ('--out', '/proc/out.pkl'),
    ],
)
def test_results_that_cannot_be_written(tiny_config, test_args, tmp_path, monkeypatch, option, path):
    """This is said before anything is built."""
    (tmp_path / 'file').touch()
    (tmp_path / 'folder.pkl').mkdir()
    torch.save({'state_dict': {}, 'meta': {}}, tmp_path / 'a.pth')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, 'build_runner', lambda cfg: pytest.fail('a runner was built'))
    with raises(LaunchError, option, path):
        launch.test(test_args(tiny_config, 'a.pth', option, path))


def test_results_are_written_over(tmp_path):
    path = tmp_path / 'new' / 'a.pkl'
    launch.check_writable(str(path), '--out', is_file=True)
    assert list(path.parent.iterdir()) == []  # nothing is left behind
    path.write_bytes(b'old')
    launch.check_writable(str(path), '--out', is_file=True)
    assert path.read_bytes() == b'old'
    launch.check_writable('s3://bucket/a.pkl', '--out', is_file=True)
    assert not os.path.exists('s3:')


# ------------------------------------------------------------------------------------------------------- console


def console_and_file(capsys, work):
    """The lines of the console, and the text of the log file."""
    return capsys.readouterr().out.splitlines(), next(work.rglob('*.log')).read_text()


def summary_of(lines):
    """The rows of the summary, which ends where the next record of the log begins."""
    start = next(i for i, line in enumerate(lines) if line.endswith(' starts'))
    rows = itertools.takewhile(lambda line: line.startswith('  '), lines[start + 1 :])
    return start, dict(line.strip().split(maxsplit=1) for line in rows)


@pytest.mark.parametrize('flexible', [False, True])
def test_console_of_a_training(tiny_config, train_args, tmp_path, capsys, monkeypatch, flexible):
    """At most twelve lines before the first of the training, and nothing of it is lacking in the file."""
    monkeypatch.setattr(Config, 'pretty_text', 'model = dict()')  # formatting takes seconds
    config, work = tmp_path / 'own.py', tmp_path / 'work'
    config.write_text(
        tiny_config.read_text()
        + f'experiment_name = {uuid.uuid4().hex!r}\n'
        + "default_hooks['logger'] = dict(type='LoggerHook', interval=1)\n"
        + "runner_type = 'FlexibleRunner'\n" * flexible
    )
    runner = launch.train(train_args(config, '--work-dir', work))
    lines, log = console_and_file(capsys, work)
    first = next(i for i, line in enumerate(lines) if 'Epoch(train)' in line)
    start, rows = summary_of(lines)
    assert first <= 12
    for text in ('System environment', 'Config:', 'Hooks will be executed', 'will be deprecated'):
        assert text in log
        assert not any(text in line for line in lines), text
    count = sum(weight.numel() for weight in runner.model.parameters())
    assert rows['config'] == str(config)
    assert rows['model'].startswith('ImageClassifier of MobileNetV2, GlobalAveragePooling, LinearClsHead: ')
    assert f' {count:,} parameters, on {next(runner.model.parameters()).device}' in rows['model']
    assert rows['train'] == 'ImageNet of 6 samples, 4 per batch'
    assert rows['val'] == 'ImageNet of 6 samples, 4 per batch'
    assert rows['classes'] == '2: a, b'
    assert rows['length'] == '1 epochs of 2 iterations'
    assert rows['weights'] == 'initialized at random'
    assert rows['results'] == str(work)
    assert os.path.isfile(rows['log'])
    assert os.path.samefile(rows['log'], next(work.rglob('*.log')))
    assert all(line in log for line in lines[start + 1 : first])
    assert any('Saving checkpoint' in line for line in lines[first:])  # the console stays open


def test_console_of_a_resumed_training_and_a_test(trained, tiny_config, train_args, test_args, capsys, monkeypatch):
    monkeypatch.setattr(Config, 'pretty_text', 'model = dict()')
    capsys.readouterr()
    checkpoint = str(trained / 'epoch_1.pth')
    own = ['--cfg-options', f'experiment_name={uuid.uuid4().hex}', 'train_cfg.max_epochs=2']
    launch.train(train_args(tiny_config, '--work-dir', trained, '--resume', *own))
    lines = capsys.readouterr().out.splitlines()
    rows = summary_of(lines)[1]
    assert rows['weights'] == f'resumed from {checkpoint}, after epoch 1, iteration 2'
    assert rows['length'] == '2 epochs of 2 iterations'
    own = ['--cfg-options', f'experiment_name={uuid.uuid4().hex}']
    launch.test(test_args(tiny_config, checkpoint, '--work-dir', trained / 'test', *own))
    lines, _ = console_and_file(capsys, trained / 'test')
    start, rows = summary_of(lines)
    assert start <= 3
    assert rows.keys() == {'config', 'model', 'test', 'classes', 'weights', 'results', 'log'}
    assert rows['weights'] == f'from {checkpoint}'
    assert rows['test'] == 'ImageNet of 6 samples, 4 per batch'
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
        launch.test(args)
        predictions = pickle.loads((tmp_path / f'{name}.pkl').read_bytes())
        scores[name] = torch.stack([prediction['pred_score'] for prediction in predictions])
    torch.testing.assert_close(scores['tta'], (scores['plain'] + scores['flipped']) / 2)
    assert not torch.equal(scores['tta'], scores['plain'])


def test_meta_file_decides_the_labels(tmp_path, tiny_config, train_args):
    root = make_image_tree(tmp_path / 'with_meta', with_meta=True)
    (root / 'meta' / 'train.txt').write_text(f'{CLASSES[1]}/{CLASSES[1]}_2.JPEG 0\n' * 2)
    runner = launch.train(
        train_args(
            tiny_config,
            '--work-dir',
            tmp_path / 'work',
            '--no-validate',
            '--cfg-options',
            f'train_dataloader.dataset.data_root={root}',
        )
    )
    info = runner.train_dataloader.dataset.get_data_info(0)
    assert len(runner.train_dataloader.dataset) == 2
    assert (info['gt_label'], info['img_path']) == (0, f'{root}/train/{CLASSES[1]}/{CLASSES[1]}_2.JPEG')


@pytest.mark.parametrize('workers', [0, 1])
def test_truncated_image_is_named(tmp_path, tiny_config, train_args, workers):
    path = tmp_path / 'imagenet' / 'train' / CLASSES[1] / f'{CLASSES[1]}_1.JPEG'
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match=f'{path}.*truncated'):
        launch.train(
            train_args(
                tiny_config, '--work-dir', tmp_path / 'work', '--cfg-options', f'train_dataloader.num_workers={workers}'
            )
        )


def test_runs_leave_no_scope_behind(trained, tiny_config, train_args, tmp_path):
    before = DefaultScope.get_current_instance()
    with DefaultScope.overwrite_default_scope('mmdet'):  # as after a detector in the same process
        launch.train(train_args(tiny_config, '--work-dir', tmp_path / 'again'))
        assert DefaultScope.get_current_instance().scope_name == 'mmdet'
    assert getattr(DefaultScope.get_current_instance(), 'name', None) == getattr(before, 'name', None)


def test_runner_type(monkeypatch):
    from mmengine.registry import RUNNERS
    from mmengine.runner import Runner

    class OtherRunner(Runner):
        @classmethod
        def from_cfg(cls, cfg):
            return cls, cfg

    monkeypatch.setitem(RUNNERS.module_dict, 'OtherRunner', OtherRunner)
    assert launch.build_runner(Config(dict(runner_type='OtherRunner', x=1)))[0] is OtherRunner


@pytest.mark.parametrize(
    'hooks',
    [
        dict(custom_hooks=[dict(type='mmpretrain.EMAHook')]),
        dict(default_hooks=dict(timer=None, ema=dict(type='EMAHook'))),
    ],
)
def test_averages_of_sharded_weights(hooks):
    cfg = dict(runner_type='FlexibleRunner', launcher='pytorch', strategy=dict(type='mmkron.FSDPStrategy'))
    with pytest.raises(LaunchError, match='EMAHook averages whole parameters, and FSDPStrategy leaves each'):
        launch.build_runner(Config(dict(cfg, **hooks)))


def test_flexible_runner(trained, tiny_config, train_args, tmp_path):
    """One process trains the config of a sharded run on its one device, compiles, and resumes at the right epoch."""
    config = tmp_path / 'flexible.py'
    extra = "runner_type = 'FlexibleRunner'\nstrategy = dict(type='mmkron.FSDPStrategy')\n"
    config.write_text(tiny_config.read_text() + extra + 'compile = dict(disable=True)\n')
    runner = launch.train(train_args(config, '--work-dir', tmp_path / 'w', '--auto-scale-lr'))
    assert type(runner.strategy).__name__ == 'SingleDeviceStrategy'
    assert runner._compile == dict(disable=True)
    assert runner.optim_wrapper.optimizer.param_groups[0]['initial_lr'] == pytest.approx(0.01 * 4 / 8)
    saved = torch.load(tmp_path / 'w' / 'epoch_1.pth', weights_only=True)
    theirs = torch.load(next(trained.rglob('epoch_1.pth')), weights_only=True)
    assert saved['state_dict'].keys() == theirs['state_dict'].keys()
    assert (saved['meta']['epoch'], saved['meta']['iter']) == (theirs['meta']['epoch'], theirs['meta']['iter'])
    resumed = launch.train(
        train_args(config, '--work-dir', tmp_path / 'w', '--resume', '--cfg-options', 'train_cfg.max_epochs=2')
    )
    assert (resumed.epoch, resumed.iter) == (2, 2 * runner.iter)


# --------------------------------------------------------------------------------------------------- checkpoints


class Touch:
    """Pickles into a call that makes a file, as a malicious checkpoint would run any other code."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Attribute:
    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_malicious_checkpoint_is_refused(tiny_config, test_args, train_args, tmp_path):
    checkpoint, proof = tmp_path / 'evil.pth', tmp_path / 'proof'
    torch.save({'meta': {}, 'state_dict': {}, 'x': Touch(proof)}, checkpoint)
    with pytest.raises(LaunchError, match=r'evil\.pth is refused.*mkdir'):
        launch.test(test_args(tiny_config, checkpoint, '--work-dir', tmp_path / 'work'))
    with pytest.raises(LaunchError, match=r'evil\.pth is refused.*mkdir'):
        launch.train(train_args(tiny_config, '--work-dir', tmp_path / 'work', '--resume', checkpoint))
    assert not proof.exists()
    torch.load(checkpoint, weights_only=False)
    assert proof.exists()  # it would have worked


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
