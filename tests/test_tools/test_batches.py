"""Which batches a resumed training gets, with which random numbers, and workers that a signal does not end."""

import itertools
import os
import random
import signal
import subprocess
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.registry import DATA_SAMPLERS
from mmengine.runner import Runner
from torch.utils.data import BatchSampler, DataLoader

from mmkron.engine.hooks import PreemptionHook
from mmkron.engine.hooks.batches import LazyIterator, RestOfBatches, SeededBatches, rebuild, sampler_of, start_worker


def runner_of(dataset, **loader):
    """Return a runner with a loader that has read a batch, as an iteration-based loop has before any hook runs."""
    cfg = dict(dataset=dict(type='Unknown'), num_workers=0, batch_size=4, **loader)
    runner = SimpleNamespace(cfg=Config(dict(train_dataloader=cfg)), seed=3, build_dataloader=Runner.build_dataloader)
    runner.loader = runner.build_dataloader(dict(cfg, dataset=dataset), seed=3)
    runner.reading = iter(runner.loader)
    next(runner.reading)
    return runner


def test_infinite_sampler_is_skipped_as_if_read():
    data = range(10)
    straight = iter(BatchSampler(InfiniteSampler(data, seed=3), 4, False))
    expected = [next(straight) for _ in range(16)]
    runner = runner_of(data, sampler=dict(type='InfiniteSampler', shuffle=True))
    torch.manual_seed(0)
    loader = rebuild(runner, runner.loader)
    assert loader.dataset is data
    RestOfBatches.install(loader, 6)
    iterator = LazyIterator(loader, 6)
    assert [next(iterator) for _ in range(6)] == [None] * 6
    assert [next(iterator) for _ in range(3)] == expected[6:9]
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))  # nothing was drawn
    newer = LazyIterator(loader, 6)
    newer.skip_iter(6)
    assert next(newer) == expected[9 + 6]


def test_rest_of_batches_is_a_batch_sampler():
    loader = DataLoader(range(10), batch_size=4, sampler=DefaultSampler(range(10), seed=3))
    rest = RestOfBatches.install(loader, 1)
    assert len(loader) == len(list(loader)) == 2
    rest.skip = 0
    assert len(loader) == len(list(loader)) == 3
    assert rest.sampler is loader.sampler is sampler_of(loader)


class Pairs(BatchSampler):
    """Batches of even or of odd numbers; incomplete ones are kept, as in MMDetection's samplers."""

    def __init__(self, sampler, batch_size):
        super().__init__(sampler, batch_size, False)
        self.waiting = [], []

    def __iter__(self):
        for index in self.sampler:
            group = self.waiting[index % 2]
            group.append(index)
            if len(group) == self.batch_size:
                yield group[:]
                group.clear()


@pytest.mark.parametrize('sampler', ['DefaultSampler', 'InfiniteSampler'])
def test_waiting_samples_are_not_drawn_twice(monkeypatch, sampler):
    monkeypatch.setitem(DATA_SAMPLERS.module_dict, 'Pairs', Pairs)
    cfg = dict(sampler=dict(type=sampler, shuffle=False), batch_sampler=dict(type='Pairs'))
    runner = runner_of(range(16), **cfg)
    loader = rebuild(runner, runner.loader)
    assert list(itertools.islice(loader.batch_sampler, 2)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize('loader', [DataLoader(range(4), batch_size=None), DataLoader(Stream(), 1), range(4)])
def test_data_without_batches_of_indices(loader):
    """It is left as it is, with a warning on resuming."""
    warned = []
    runner = SimpleNamespace(train_loop=SimpleNamespace(dataloader=loader), cfg=Config(), iter=2)
    runner.logger = SimpleNamespace(warning=warned.append)
    PreemptionHook()._advance(runner)
    assert [int(item) for item in loader] == [0, 1, 2, 3]
    assert len(warned) == 1
    assert getattr(sampler_of(loader), 'seed', None) is None


class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return [random.random(), np.random.rand(), torch.rand(()).item()]


def test_no_global_random_number_is_drawn():
    """As by a loader without workers that starts again in the middle of an epoch."""
    loader = DataLoader(Draws(), 2, collate_fn=list)
    SeededBatches(loader, 7, 0, 0)
    torch.manual_seed(0)
    batch = next(iter(loader))
    torch.manual_seed(0)
    assert batch[0][2] == torch.rand(()).item()


@pytest.mark.parametrize('persistent', [True, False])
def test_workers_draw_by_iteration(persistent):
    """The numbers do not depend on the number of workers; an epoch has 5 batches."""

    def epochs(workers, first=0, skip=0):
        loader = DataLoader(
            Draws(), 2, num_workers=workers, collate_fn=list, persistent_workers=persistent, shuffle=False
        )
        rest = RestOfBatches.install(loader, skip)
        seeds = SeededBatches(loader, 7, 0, first)
        drawn = list(loader)
        rest.skip, seeds.first = 0, first + 5 - skip
        return drawn, list(loader)

    first, second = epochs(2)
    assert epochs(3) == (first, second)
    assert epochs(2, first=3, skip=3) == (first[3:], second)
    assert epochs(1, first=5)[0] == second
    assert len({str(sample) for batch in first + second for sample in batch}) == 20


class Sleepy(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


@pytest.mark.parametrize('start', ['fork', 'forkserver'])
def test_workers_outlive_the_signal_and_end_with_their_loader(start):
    loader = DataLoader(
        Sleepy(),
        num_workers=2,
        worker_init_fn=partial(start_worker, (signal.SIGTERM,), None),
        multiprocessing_context=start,
    )
    batches = iter(loader)
    pids = {int(next(batches)) for _ in range(2)}
    assert len(pids) == 2
    # From another process, as Slurm does: the parent's own signal would end them.
    assert subprocess.call(['kill', *map(str, pids)]) == 0
    assert {int(next(batches)) for _ in range(2)} == pids  # and no more, at which they would end by themselves
    workers = batches._workers
    for _ in range(20):  # a signal that comes while another one is pending is none
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
                worker.join(1)
    assert [worker.exitcode for worker in workers] == [0, 0]
