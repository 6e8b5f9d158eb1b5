"""Which batches a resumed training gets, with which random numbers, and workers that a signal does not end."""

import itertools
import os
import random
import signal
import subprocess

import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.dataset.utils import pseudo_collate
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import BatchSampler, DataLoader

from mmkron.engine.hooks.batches import (
    AdvancedIterator,
    RestOfBatches,
    SeededBatches,
    WorkerStart,
    fresh_batches,
    sampler_of,
)


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


class Pairs(BatchSampler):
    """Batches of even or of odd numbers, which keeps what waits for a batch as MMDetection's samplers do."""

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


def test_waiting_samples_are_not_drawn_twice(monkeypatch):
    monkeypatch.setitem(DATA_SAMPLERS.module_dict, 'Pairs', Pairs)
    data = range(8)
    for sampler in (DefaultSampler(data, shuffle=False), InfiniteSampler(data, shuffle=False)):
        cfg = dict(sampler=dict(type=type(sampler).__name__, shuffle=False), batch_sampler=dict(type='Pairs'))
        used = DataLoader(data, batch_sampler=Pairs(sampler, 2))
        next(iter(used.batch_sampler))
        batches, infinite = fresh_batches(used, dict(cfg, batch_size=2))
        assert infinite is isinstance(sampler, InfiniteSampler)
        assert list(itertools.islice(batches, 4)) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_data_that_is_no_loader():
    assert sampler_of(range(3)) is None


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


class Sleepy(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


@pytest.mark.parametrize('start', ['fork', 'forkserver'])
def test_workers_outlive_the_signal_and_end_with_their_loader(start):
    loader = DataLoader(
        Sleepy(), num_workers=2, worker_init_fn=WorkerStart(None, (signal.SIGTERM,)), multiprocessing_context=start
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
