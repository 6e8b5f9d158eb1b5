"""Stopping and resuming at any moment: exact parameters, signals, kills and leftovers."""

import multiprocessing
import os
import signal
import uuid
from types import SimpleNamespace

import pytest
import torch
from mmengine.fileio.backends import LocalBackend
from mmengine.hooks import EMAHook, Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS

from conftest import free_ports
from mmkron.engine.hooks import PreemptionHook, preemption
from mmkron.engine.hooks.preemption import _step_is_complete
from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import read_whole
from support.errors import raises
from support.tools import ROOT, run_training

# 4 batches per epoch, with random numbers in the pipeline and, for mixup, in the step.
CONFIG = """
_base_ = '{root}/configs/{base}_digits.py'
loader = dict(batch_size=16, num_workers={workers}, dataset=dict(indices=64, serialize_data=False))
val_dataloader = dict(batch_size=16, dataset=dict(indices=16, serialize_data=False))
loss = dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')
model = dict(backbone=dict({backbone}), train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8)]),
             head=dict(loss=dict(loss, _delete_=True)))
"""
EPOCHS = """
train_cfg = dict(max_epochs=3)
default_hooks = dict(exact=dict(type='mmkron.DeterministicResumeHook'))
train_dataloader = dict(loader, persistent_workers={workers} > 0)
"""
ITERATIONS = """
train_cfg = dict(_delete_=True, by_epoch=False, max_iters=6, val_interval=3)
train_dataloader = dict(loader, sampler=dict(_delete_=True, type='InfiniteSampler', shuffle=True))
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=3), exact=dict(type='mmkron.DeterministicResumeHook'))
"""
NARROW = {'kanet/kanet-kv': 'widen_factor=0.1', 'qkformer/qkformer': ''}


class SignalHook(Hook):
    """Hook that sends this process a signal after an iteration, as Slurm does from outside."""

    def __init__(self, after, rank=0, number=signal.SIGTERM, stage='after_train_iter'):
        self.after, self.rank, self.number = after, rank, number
        setattr(self, stage, self.send)

    def send(self, runner, **_):
        if runner.iter == self.after - 1 and int(os.environ.get('RANK', 0)) == self.rank:
            os.kill(os.getpid(), self.number)


class Recorder(Hook):
    seen = []

    def before_train_iter(self, runner, batch_idx, data_batch):
        self.seen.append([sample.sample_idx for sample in data_batch['data_samples']])


@pytest.fixture(autouse=True)
def signal_hook(monkeypatch):
    monkeypatch.setitem(HOOKS.module_dict, 'SignalHook', SignalHook)
    monkeypatch.setitem(HOOKS.module_dict, 'Recorder', Recorder)
    monkeypatch.setattr(os, 'fsync', lambda descriptor: None)  # for a power cut, which nothing here tests
    Recorder.seen.clear()
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def train(tmp_path, train_args):
    """Return a function that trains on digits in a work dir with options of the config and of the command line."""

    def run(work, options='', *argv, base='kanet/kanet-kv', workers=0, iterations=False):
        text = (CONFIG + (ITERATIONS if iterations else EPOCHS)).format(
            root=ROOT, base=base, backbone=NARROW[base], workers=workers
        )
        path = tmp_path / 'digits.py'
        # MMEngine keeps scores by the name of the experiment and the second.
        path.write_text(f'experiment_name = {uuid.uuid4().hex!r}\n' + text + options)
        return run_training(train_args(path, '--work-dir', tmp_path / work, *argv))

    return run


_STRAIGHT = {}


@pytest.fixture
def straight(train, tmp_path_factory):
    """Return a function that gives the state after an uninterrupted training with the same arguments."""

    def run(options='', **kwargs):
        key = (options, *sorted(kwargs.items()))
        if key not in _STRAIGHT:
            _STRAIGHT[key] = state(train(tmp_path_factory.mktemp('straight'), options, **kwargs))
        return _STRAIGHT[key]

    return run


def apart(target):
    """Run a function in a forked process, which may be killed, and return its exit code."""
    process = multiprocessing.get_context('fork').Process(target=target)
    process.start()
    process.join(120)
    return process.exitcode


def state(runner):
    return {**runner.model.state_dict(), **{str(k): v for k, v in runner.optim_wrapper.state_dict()['state'].items()}}


def assert_equal(runner, expected):
    torch.testing.assert_close(state(runner), expected, rtol=0, atol=0)


# --------------------------------------------------------------------------------------------------- equal to straight


@pytest.mark.parametrize(('base', 'workers', 'half'), [('kanet/kanet-kv', 2, 2), ('qkformer/qkformer', 0, 1)])
def test_two_halves_are_the_whole(train, tmp_path, base, workers, half):
    """The first training has a shorter schedule."""
    runs = dict(base=base, workers=workers)
    whole = train('whole', f'train_cfg = dict(max_epochs={2 * half})', **runs)
    train('parts', f'train_cfg = dict(max_epochs={half})', **runs)
    resumed = train('parts', f'train_cfg = dict(max_epochs={2 * half})', '--resume', **runs)
    assert resumed.iter == 8 * half
    assert_equal(resumed, state(whole))


@pytest.mark.parametrize(('iterations', 'workers', 'after'), [(False, 2, 6), (False, 0, 6), (True, 2, 4), (True, 0, 4)])
def test_sigterm_then_resume_is_straight(train, straight, tmp_path, iterations, workers, after, capfd):
    stop = f"custom_hooks = [dict(type='SignalHook', after={after})]"
    with pytest.raises(SystemExit) as ended:
        train('parts', stop, iterations=iterations, workers=workers)
    assert ended.value.code == 128 + signal.SIGTERM
    path = tmp_path / f'parts/interrupted_iter_{after}.pth'
    assert (tmp_path / 'parts/last_checkpoint').read_text() == str(path)
    assert str(path) in ''.join(capfd.readouterr())
    meta = read_whole(path, '')['meta']
    assert (meta['epoch'], meta['iter']) == ((0, 4) if iterations else (1, 6))
    resumed = train('parts', '', '--resume', iterations=iterations, workers=workers)
    assert_equal(resumed, straight(iterations=iterations, workers=workers))
    assert not path.exists()  # a regular one has come after it


def test_without_seeds_the_samples_keep_their_order(train, tmp_path):
    """A random seed is restored in the sampler as well, which MMEngine builds before it loads the checkpoint."""
    own = """
randomness = dict(_delete_=True, seed={seed})
default_hooks = dict()
custom_hooks = [dict(type='Recorder')]
"""
    stop = "custom_hooks += [dict(type='SignalHook', after=6)]"
    with pytest.raises(SystemExit):
        train('parts', own.format(seed=None) + stop)
    meta = read_whole(tmp_path / 'parts/interrupted_iter_6.pth', '')['meta']
    assert meta['mmkron'] == dict(position=2, epoch_length=4, sampler_seed=meta['seed'])
    train('parts', own.format(seed=None), '--resume')
    parts = list(Recorder.seen)
    Recorder.seen.clear()
    train('straight', own.format(seed=meta['seed']))
    assert parts == Recorder.seen
    assert len(parts) == 12


def test_iterations_with_a_finite_sampler(train):
    """MMEngine reads the batches before the stop again; the workers' random numbers are those of the batches."""
    options = "train_dataloader = dict(loader, sampler=dict(_delete_=True, type='DefaultSampler', shuffle=True))\n"
    options += "default_hooks['checkpoint'] = dict(by_epoch=False, interval=2)\ntrain_cfg['max_iters'] = 4\n"
    whole = train('whole', options, iterations=True, workers=1)
    with pytest.raises(SystemExit):
        train('parts', options + "custom_hooks = [dict(type='SignalHook', after=2)]", iterations=True, workers=1)
    assert_equal(train('parts', options, '--resume', iterations=True, workers=1), state(whole))


def test_another_number_of_batches_starts_the_epoch_again(train, tmp_path, capfd):
    with pytest.raises(SystemExit):
        train('parts', "custom_hooks = [dict(type='SignalHook', after=6)]")
    runner = train('parts', '', '--resume', '--cfg-options', 'train_dataloader.batch_size=32', 'train_cfg.max_epochs=2')
    assert runner.iter == 6 + 2
    assert 'batch 2 in an epoch of 4, which now has 2: the epoch starts again' in ''.join(capfd.readouterr())


# ------------------------------------------------------------------------------------------------------------ signals


def test_signal_during_validation(train, straight, tmp_path):
    """The validation, which may leave the best checkpoint, and one more iteration are completed."""
    stop = "custom_hooks = [dict(type='SignalHook', after=5, stage='before_val_iter')]"
    with pytest.raises(SystemExit) as ended:
        train('parts', stop)
    assert ended.value.code == 143
    meta = read_whole(tmp_path / 'parts/interrupted_iter_5.pth', '')['meta']
    assert (meta['epoch'], meta['iter'], meta['mmkron']['position']) == (1, 5, 1)
    assert list((tmp_path / 'parts').glob('best_*_epoch_1.pth'))
    assert_equal(train('parts', '', '--resume'), straight())


def with_averages(runner):
    hook = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
    return {**state(runner), **{f'ema {key}': value for key, value in hook.ema_model.state_dict().items()}}


def test_averaged_weights(train, tmp_path):
    """With EMAHook in both runners, whose FlexibleRunner loads before it calls ``before_run``."""
    options = "custom_hooks = [dict(type='EMAHook', momentum=0.3)]\n"
    expected = with_averages(train('straight', options))
    for work, runner in (('parts', ''), ('flexible', "runner_type = 'mmkron.FlexibleRunner'\n")):
        with pytest.raises(SystemExit):
            train(work, runner + options + "custom_hooks += [dict(type='SignalHook', after=6)]")
        torch.testing.assert_close(with_averages(train(work, runner + options, '--resume')), expected, rtol=0, atol=0)


def test_signal_within_a_step_of_several_iterations(train, straight, tmp_path):
    options = 'optim_wrapper = dict(accumulative_counts=3)\n'
    with pytest.raises(SystemExit):
        train('parts', options + "custom_hooks = [dict(type='SignalHook', after=4)]")
    assert (tmp_path / 'parts/interrupted_iter_6.pth').is_file()
    assert_equal(train('parts', options, '--resume'), straight(options))


@pytest.mark.skipif(torch.cuda.is_available(), reason='about gloo on machines without CUDA')
def test_one_of_two_processes_gets_the_signal(train, tmp_path):
    """Both stop after the same iteration, and a resumed training equals a straight one."""

    def processes(work, *arguments):
        (port,) = free_ports(1)

        def run(rank):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1')
            os.environ['MASTER_PORT'] = port
            train(work, *arguments)

        context = multiprocessing.get_context('fork')
        started = [context.Process(target=run, args=(rank,)) for rank in (0, 1)]
        for process in started:
            process.start()
        for process in started:
            process.join(300)
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
        return codes

    distributed = ('--launcher', 'pytorch')
    assert processes('straight', '', *distributed) == [0, 0]
    stop = "custom_hooks = [dict(type='SignalHook', after=3, rank=1)]"
    assert processes('parts', stop, *distributed) == [143, 143]
    assert (tmp_path / 'parts/interrupted_iter_3.pth').is_file()
    assert processes('parts', '', '--resume', *distributed) == [0, 0]
    first, second = (read_whole(tmp_path / work / 'epoch_3.pth', '') for work in ('straight', 'parts'))
    torch.testing.assert_close(first['state_dict'], second['state_dict'], rtol=0, atol=0)
    assert first['meta']['iter'] == second['meta']['iter'] == 6


def test_hook_arguments():
    for wrong in ('SIGTERM', ['SIGNONE'], [15], None, ['SIGKILL']):
        with raises(ValueError, 'signals', wrong):
            PreemptionHook(signals=wrong)
    assert PreemptionHook(signals=['SIGUSR1', 'SIGTERM']).signals == (signal.SIGUSR1, signal.SIGTERM)


def test_handler_that_python_has_not_set(monkeypatch):
    """``signal.signal`` returns None for a handler of a program that embeds Python."""
    hook = PreemptionHook()
    hook._handlers = {signal.SIGTERM: None}
    hook.restore_handlers()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_step_of_several_optimizers():
    weight = torch.nn.Parameter(torch.ones(()))
    wrappers = [OptimWrapper(torch.optim.SGD([weight], 0.1), accumulative_counts=count) for count in (1, 2)]
    runner = SimpleNamespace(optim_wrapper=OptimWrapperDict(a=wrappers[0], b=wrappers[1]))
    for complete in (True, False, True):
        assert _step_is_complete(runner) is complete
        for wrapper in wrappers:
            wrapper.update_params(weight.square())


# -------------------------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize('runner', ['', "runner_type = 'mmkron.FlexibleRunner'\n"], ids=['Runner', 'FlexibleRunner'])
def test_killed_while_a_checkpoint_is_written(train, straight, tmp_path, monkeypatch, runner):
    def put(self, content, path):
        if 'epoch_2.pth' not in str(path):
            return write(self, content, path)
        with open(path, 'wb') as file:
            file.write(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    write = LocalBackend.put
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, 'put', put)
        assert apart(lambda: train('parts', runner)) == -signal.SIGKILL
    # With MMEngine's hook epoch_1.pth would be gone: max_keep_ckpts is 1.
    names = sorted(path.name for path in (tmp_path / 'parts').glob('*.p*') if 'best' not in path.name)
    assert names == ['digits.py', 'epoch_1.pth', 'epoch_2.pth.partial']
    assert (tmp_path / 'parts/last_checkpoint').read_text().endswith('epoch_1.pth')
    assert_equal(train('parts', runner, '--resume'), straight())
    assert [path.name for path in (tmp_path / 'parts').glob('epoch*')] == ['epoch_3.pth']


def test_killed_in_the_middle_of_an_epoch(train, straight, tmp_path):
    kill = "custom_hooks = [dict(type='SignalHook', after=7, number=9)]"
    assert apart(lambda: train('parts', kill, workers=2)) == -signal.SIGKILL
    assert_equal(train('parts', '', '--resume', workers=2), straight(workers=2))


def test_regular_hook_keeps_the_best(train, tmp_path, monkeypatch):
    """The previous best is removed after the new one is written; MMEngine removes it before."""
    scores = iter([0.5, 0.6, 0.4])
    monkeypatch.setattr('mmengine.evaluator.Evaluator.evaluate', lambda self, size: {'accuracy/top1': next(scores)})
    there = []

    def put(self, content, path):
        there.append({name for name in os.listdir(tmp_path / 'work') if name.startswith('best')})
        write(self, content, path)

    write = LocalBackend.put
    monkeypatch.setattr(LocalBackend, 'put', put)
    train('work')
    best = {n: f'best_accuracy_top1_epoch_{n}.pth' for n in (1, 2)}
    # Written: epoch 1, best, epoch 1 with the score; the same of epoch 2; epoch 3.
    assert [{name for name in names if not name.endswith('.partial')} for names in there] == [
        set(),
        set(),
        {best[1]},
        {best[1]},
        {best[1]},
        {best[2]} | ({best[1]} & there[5]),
        {best[2]},
    ]
    assert sorted(path.name for path in (tmp_path / 'work').glob('*.pth')) == [best[2], 'epoch_3.pth']


def test_the_best_of_another_folder_stays(train, tmp_path, monkeypatch):
    """MMEngine removes the file named in the checkpoint from any folder."""
    scores = iter([0.5, 0.6, 0.7])
    monkeypatch.setattr('mmengine.evaluator.Evaluator.evaluate', lambda self, size: {'accuracy/top1': next(scores)})
    train('first', 'train_cfg = dict(max_epochs=1)')
    train('second', 'train_cfg = dict(max_epochs=2)', '--resume', tmp_path / 'first/epoch_1.pth')
    os.rename(tmp_path / 'second', tmp_path / 'third')
    train('third', '', '--resume')
    best = {work: sorted(path.name[-11:] for path in (tmp_path / work).glob('best*')) for work in ('first', 'third')}
    assert best == {'first': ['epoch_1.pth'], 'third': ['epoch_2.pth', 'epoch_3.pth']}


def test_only_its_own_leftovers_are_removed(tmp_path):
    """A user's files and folders with the same suffix stay."""
    own = ['epoch_3.pth', 'iter_40.pth', 'best_accuracy_top1_epoch_2.pth', 'interrupted_iter_7.pth', 'last_checkpoint']
    users = ['notes', 'data', 'weights.pth', 'epoch_3', 'epoch_x.pth', 'best.pth', 'my_epoch_3.pth']
    for name in own + users:
        (tmp_path / f'{name}.partial').write_text(name)
    for name in ('photos', 'epoch_4.pth'):  # a runner may write one file per process
        (tmp_path / f'{name}.partial').mkdir()
        (tmp_path / f'{name}.partial/a').touch()
    preemption._remove_matching(SimpleNamespace(work_dir=str(tmp_path), hooks=[]), preemption._UNFINISHED)
    assert {path.name.removesuffix('.partial') for path in tmp_path.iterdir()} == {*users, 'photos'}


def test_deterministic_resume_needs_the_other_hook(train):
    with raises(LaunchError, 'mmkron.PreemptionHook'):
        train('alone', "default_hooks = dict(_delete_=True, exact=dict(type='mmkron.DeterministicResumeHook'))")


def test_the_old_names_still_work(train, tmp_path):
    """A config of version 0.1 that is stopped and resumed gives the parameters of the new hooks."""
    old = "default_hooks = dict(_delete_=True, checkpoint=dict(type='mmkron.CheckpointHook', max_keep_ckpts=1),\n"
    old += "                     resume=dict(type='mmkron.ResumeHook'))\n"
    expected = state(train('new'))
    with pytest.warns(DeprecationWarning, match='ResumeHook'), pytest.raises(SystemExit):
        train('old', old + "custom_hooks = [dict(type='SignalHook', after=6)]")
    assert_equal(train('old', old, '--resume'), expected)
