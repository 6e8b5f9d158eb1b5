"""Stopping at any moment and going on: exact parameters, signals, kills, and which checkpoint --resume takes."""

import multiprocessing
import os
import random
import signal
import socket
import uuid

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.dataset.utils import pseudo_collate
from mmengine.fileio.backends import LocalBackend
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch.utils.data import BatchSampler, DataLoader

from mmkron.engine import checkpoints, launch
from mmkron.engine.hooks import ResumeHook
from mmkron.engine.hooks.batches import AdvancedIterator, RestOfBatches, SeededBatches, WorkerStart, fresh_batches

from .conftest import ROOT

# 4 batches an epoch, and random numbers in the pipeline and, by mixup, in the step.
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
train_dataloader = dict(loader, persistent_workers={workers} > 0)
"""
ITERATIONS = """
train_cfg = dict(_delete_=True, by_epoch=False, max_iters=6, val_interval=3)
train_dataloader = dict(loader, sampler=dict(_delete_=True, type='InfiniteSampler', shuffle=True))
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=3))
"""
NARROW = {'kanet/kanet-kv': 'widen_factor=0.1', 'qkformer/qkformer': ''}


class SignalHook(Hook):
    """Sends this process a signal after an iteration, as Slurm does from outside."""

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
    monkeypatch.setattr(Config, 'pretty_text', '')  # which every checkpoint gets; half of the time of these trainings
    Recorder.seen.clear()
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def train(tmp_path, train_args):
    """Trains digits in a work dir; the arguments after the first two are those of the command line."""

    def run(work, options='', *argv, base='kanet/kanet-kv', workers=0, iterations=False):
        text = (CONFIG + (ITERATIONS if iterations else EPOCHS)).format(
            root=ROOT, base=base, backbone=NARROW[base], workers=workers
        )
        path = tmp_path / 'digits.py'
        # MMEngine keeps scores by the name of the experiment and the second.
        path.write_text(f'experiment_name = {uuid.uuid4().hex!r}\n' + text + options)
        return launch.train(train_args(path, '--work-dir', tmp_path / work, *argv))

    return run


_STRAIGHT = {}


@pytest.fixture
def straight(train, tmp_path_factory):
    """The state after a training that nothing stops, by the arguments of ``train``."""

    def run(options='', **kwargs):
        key = (options, *sorted(kwargs.items()))
        if key not in _STRAIGHT:
            _STRAIGHT[key] = state(train(tmp_path_factory.mktemp('straight'), options, **kwargs))
        return _STRAIGHT[key]

    return run


def apart(target):
    """Runs a function in a forked process, which may be killed, and returns its exit code."""
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
    """As ``--resume`` after a first training that was meant to be shorter."""
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
    assert f'{path} is written, --resume goes on from it' in ''.join(capfd.readouterr())
    meta = checkpoints.read_whole(path, '')['meta']
    assert (meta['epoch'], meta['iter']) == ((0, 4) if iterations else (1, 6))
    resumed = train('parts', '', '--resume', iterations=iterations, workers=workers)
    assert_equal(resumed, straight(iterations=iterations, workers=workers))
    assert not path.exists()  # a regular one has come after it


def test_without_seeds_the_samples_keep_their_order(train, tmp_path):
    """And a seed that nobody set is that of the checkpoint, for the sampler too, which MMEngine builds before."""
    own = """
randomness = dict(_delete_=True, seed={seed})
default_hooks = dict(resume=dict(seed_iterations=False))
custom_hooks = [dict(type='Recorder')]
"""
    stop = "custom_hooks += [dict(type='SignalHook', after=6)]"
    with pytest.raises(SystemExit):
        train('parts', own.format(seed=None) + stop)
    meta = checkpoints.read_whole(tmp_path / 'parts/interrupted_iter_6.pth', '')['meta']
    assert meta['mmkron'] == dict(position=2, epoch_length=4, seed=meta['seed'], sampler_seed=meta['seed'])
    train('parts', own.format(seed=None), '--resume')
    parts = list(Recorder.seen)
    Recorder.seen.clear()
    train('straight', own.format(seed=meta['seed']))
    assert parts == Recorder.seen
    assert len(parts) == 12


def test_another_number_of_batches_starts_the_epoch_again(train, tmp_path, capfd):
    with pytest.raises(SystemExit):
        train('parts', "custom_hooks = [dict(type='SignalHook', after=6)]")
    runner = train('parts', '', '--resume', '--cfg-options', 'train_dataloader.batch_size=32', 'train_cfg.max_epochs=2')
    assert runner.iter == 6 + 2
    assert 'batch 2 in an epoch of 4, which now has 2: the epoch starts again' in ''.join(capfd.readouterr())


# ------------------------------------------------------------------------------------------------------------ signals


def test_signal_during_validation(train, straight, tmp_path):
    """The validation is completed and may leave the best checkpoint; the state is written before."""
    stop = "custom_hooks = [dict(type='SignalHook', after=5, stage='before_val_iter')]"
    with pytest.raises(SystemExit) as ended:
        train('parts', stop)
    assert ended.value.code == 143
    meta = checkpoints.read_whole(tmp_path / 'parts/interrupted_iter_4.pth', '')['meta']
    assert (meta['epoch'], meta['iter']) == (1, 4)
    assert list((tmp_path / 'parts').glob('best_*_epoch_1.pth'))
    assert_equal(train('parts', '', '--resume'), straight())


def test_signal_within_a_step_of_several_iterations(train, straight, tmp_path):
    options = 'optim_wrapper = dict(accumulative_counts=3)\n'
    with pytest.raises(SystemExit):
        train('parts', options + "custom_hooks = [dict(type='SignalHook', after=4)]")
    assert (tmp_path / 'parts/interrupted_iter_6.pth').is_file()
    assert_equal(train('parts', options, '--resume'), straight(options))


@pytest.mark.skipif(torch.cuda.is_available(), reason='about gloo on machines without CUDA')
def test_one_of_two_processes_gets_the_signal(train, tmp_path):
    """Both stop after the same iteration, and go on as if they had not."""

    def processes(work, *arguments):
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = free.getsockname()[1]

        def run(rank):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1')
            os.environ['MASTER_PORT'] = str(port)
            train(work, *arguments)

        context = multiprocessing.get_context('fork')
        started = [context.Process(target=run, args=(rank,)) for rank in (0, 1)]
        for process in started:
            process.start()
        for process in started:
            process.join(120)
        return [process.exitcode for process in started]

    distributed = ('--launcher', 'pytorch')
    assert processes('straight', '', *distributed) == [0, 0]
    stop = "custom_hooks = [dict(type='SignalHook', after=3, rank=1)]"
    assert processes('parts', stop, *distributed) == [143, 143]
    # Two batches an epoch; the processes have agreed one iteration later.
    assert (tmp_path / 'parts/interrupted_iter_4.pth').is_file()
    assert processes('parts', '', '--resume', *distributed) == [0, 0]
    first, second = (checkpoints.read_whole(tmp_path / work / 'epoch_3.pth', '') for work in ('straight', 'parts'))
    torch.testing.assert_close(first['state_dict'], second['state_dict'], rtol=0, atol=0)
    assert first['meta']['iter'] == second['meta']['iter'] == 6


def test_hook_arguments():
    for wrong in ('SIGTERM', ['SIGNONE'], [15]):
        with pytest.raises(ValueError, match="signals must be a sequence of names such as 'SIGTERM', got "):
            ResumeHook(signals=wrong)
    assert ResumeHook(signals=['SIGUSR1', 'SIGTERM']).signals == (signal.SIGUSR1, signal.SIGTERM)


class Sleepy(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


def test_workers_outlive_the_signal_and_end_with_their_loader():
    loader = DataLoader(Sleepy(), num_workers=2, worker_init_fn=WorkerStart(None, (signal.SIGTERM,)))
    batches = iter(loader)
    pids = {int(next(batches)) for _ in range(2)}
    assert len(pids) == 2
    # From another process, as Slurm does: the parent's own signal would end them.
    assert apart(lambda: [os.kill(pid, signal.SIGTERM) for pid in pids]) == 0
    assert len([int(batch) for batch in batches]) == 2
    workers = batches._workers
    for worker in workers:
        worker.terminate()
        worker.join(20)
    assert [worker.exitcode for worker in workers] == [0, 0]


# -------------------------------------------------------------------------------------------------------------- kills


def test_killed_while_a_checkpoint_is_written(train, straight, tmp_path, monkeypatch):
    def put(self, content, path):
        if 'epoch_2.pth' not in str(path):
            return write(self, content, path)
        with open(path, 'wb') as file:
            file.write(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    write = LocalBackend.put
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, 'put', put)
        assert apart(lambda: train('parts')) == -signal.SIGKILL
    # With MMEngine's hook epoch_1.pth would be gone: max_keep_ckpts is 1.
    names = sorted(path.name for path in (tmp_path / 'parts').glob('*.p*') if 'best' not in path.name)
    assert names == ['digits.py', 'epoch_1.pth', 'epoch_2.pth.partial']
    assert (tmp_path / 'parts/last_checkpoint').read_text().endswith('epoch_1.pth')
    assert_equal(train('parts', '', '--resume'), straight())
    assert [path.name for path in (tmp_path / 'parts').glob('epoch*')] == ['epoch_3.pth']


def test_killed_in_the_middle_of_an_epoch(train, straight, tmp_path):
    kill = "custom_hooks = [dict(type='SignalHook', after=7, number=9)]"
    assert apart(lambda: train('parts', kill, workers=2)) == -signal.SIGKILL
    assert_equal(train('parts', '', '--resume', workers=2), straight(workers=2))


def test_regular_hook_keeps_the_best(train, tmp_path, monkeypatch):
    """The previous best goes after the new one is there; MMEngine removes it before."""
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


# -------------------------------------------------------------------------------------------------------------- parts


def test_infinite_sampler_is_skipped_as_if_read():
    def loader():
        data = range(10)
        return DataLoader(data, batch_size=4, sampler=InfiniteSampler(data, seed=3), collate_fn=pseudo_collate)

    cfg = dict(sampler=dict(type='InfiniteSampler', shuffle=True), batch_size=4)
    straight = iter(loader().batch_sampler)
    expected = [next(straight) for _ in range(9)]
    used = loader()
    next(iter(used))  # what the loop has read before any hook runs
    batches, infinite = fresh_batches(used, cfg)
    assert infinite
    assert [batch for batch, _ in zip(RestOfBatches(batches, 6), range(3))] == expected[6:]
    finite = DataLoader(range(10), batch_size=4, sampler=DefaultSampler(range(10), seed=3))
    batches, infinite = fresh_batches(finite, cfg)
    assert batches is finite.batch_sampler
    assert not infinite
    assert len(RestOfBatches(batches, 1)) == 2
    assert RestOfBatches(batches, 1).sampler is finite.sampler


def test_advanced_iterator_on_both_stacks():
    assert [next(it) for it in [AdvancedIterator(iter('abc'), 2)] for _ in range(4)] == [None, None, 'a', 'b']
    newer = AdvancedIterator(iter('abc'), 2)
    newer.skip_iter(2)
    assert next(newer) == 'a'


class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return [random.random(), np.random.rand(), torch.rand(()).item()]


@pytest.mark.parametrize('persistent', [True, False])
def test_workers_draw_by_iteration(persistent):
    """Whatever their number and age; 5 batches an epoch."""

    def epochs(workers, first=0, skip=0):
        batches = RestOfBatches(BatchSampler(range(10), 2, False), skip)
        seeds = SeededBatches(list, WorkerStart(None, ()), 7, 0, first, 5 - skip)
        loader = DataLoader(
            Draws(),
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=seeds,
            worker_init_fn=seeds.start,
            persistent_workers=persistent,
        )
        drawn = list(loader)
        seeds.first = first + 5 - skip
        return drawn, list(loader)

    first, second = epochs(2)
    assert epochs(3) == (first, second)
    assert epochs(2, first=3, skip=3)[0] == first[3:]
    assert epochs(1, first=5)[0] == second
    assert len({str(sample) for batch in first + second for sample in batch}) == 20
