"""Parts of a data loader that resume at any batch with the random numbers of that batch."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.runner.loops import _InfiniteDataloaderIterator
from torch.utils.data import DataLoader, get_worker_info

LOADING, STEP, WORKER = 0, 1, 2  # the streams of random numbers of an iteration


def seed_all(base: int, iteration: int, rank: int, stream: int) -> None:
    """Seed Python, NumPy and PyTorch from these numbers only."""
    first, second, third = np.random.SeedSequence([base, iteration, rank, stream]).generate_state(3)
    random.seed(int(first))
    np.random.seed(int(second))
    torch.manual_seed(int(third))


def sampler_of(loader: Any) -> Any:
    """Return the sampler of single samples, also from within a batch sampler."""
    return getattr(getattr(loader, 'batch_sampler', None), 'sampler', getattr(loader, 'sampler', None))


def start_worker(signals: Sequence[signal.Signals], init: Callable[[int], None] | None, worker_id: int) -> None:
    """Start a data worker that ends by ``signals`` from its parent only.

    Slurm signals every process of a job, whose training still needs its workers. PyTorch ends hung ones by SIGTERM.
    """
    if init is not None:
        init(worker_id)
    if signals and hasattr(signal, 'sigwaitinfo'):  # macOS has no sigwaitinfo
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        parent = multiprocessing.parent_process().pid  # os.getppid() may be a fork server
        threading.Thread(target=_end_with_parent, args=(signals, parent), daemon=True).start()


def _end_with_parent(signals: Sequence[signal.Signals], parent: int) -> None:
    while signal.sigwaitinfo(signals).si_pid != parent:
        pass
    os._exit(0)


class RestOfBatches:
    """Batch sampler that skips its first ``skip`` batches by drawing their indices without reading data."""

    def __init__(self, batches: Any, skip: int) -> None:
        self.batches = batches
        self.skip = skip

    @classmethod
    def install(cls, loader: DataLoader, skip: int) -> RestOfBatches:
        """Let a loader that has read nothing yet skip batches."""
        rest = cls(loader.batch_sampler, skip)
        loader.__dict__['batch_sampler'] = rest  # DataLoader refuses to set it, because it may have workers
        return rest

    def __getattr__(self, name: str) -> Any:  # sampler, batch_size, drop_last
        if name == 'batches':
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator:
        return itertools.islice(iter(self.batches), self.skip, None)

    def __len__(self) -> int:
        return max(len(self.batches) - self.skip, 0)


class LazyIterator(_InfiniteDataloaderIterator):
    """Iterator of an iteration-based loop that starts workers with the first batch after ``drops`` that the loop drops.

    The batch sampler of the loader skips these.
    """

    def __init__(self, loader: DataLoader, drops: int) -> None:
        self._dataloader = loader
        self._iterator: Any = None
        self._epoch = 0
        self._drops = drops

    def __next__(self) -> Any:
        if self._drops:
            self._drops -= 1
            return None
        if self._iterator is None:
            self._iterator = iter(self._dataloader)
        return super().__next__()

    def skip_iter(self, count: int) -> None:  # OneDL's MMEngine 0.10.12 and later call this instead of next
        for _ in range(count):
            next(self)


class _Shared:
    """Stands for a dataset in the config of a loader, which MMEngine copies before it builds the loader."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __deepcopy__(self, memo: dict) -> Any:
        return self.dataset


def rebuild(runner: Any, loader: DataLoader) -> DataLoader:
    """Build a loader of the same dataset that has not read anything.

    Infinite samplers keep their position, and batch samplers keep incomplete batches.
    """
    cfg = {**runner.cfg.train_dataloader, 'dataset': _Shared(loader.dataset)}
    cfg.pop('num_batch_per_epoch', None)  # the dataset is cut already
    fresh = runner.build_dataloader(cfg, seed=runner.seed)
    fresh.generator = torch.Generator()  # a loader without one draws a number from the global generator
    if hasattr(sampler_of(loader), 'seed'):
        sampler_of(fresh).seed = sampler_of(loader).seed
    return fresh


class SeededBatches:
    """``collate_fn`` and ``worker_init_fn`` that seed each batch of a worker by its iteration.

    A worker knows no iterations, but gets every n-th batch in order. In the main process this only collates.

    Args:
        loader: The loader, which is changed; its workers start again in each epoch.
        base: The seed of the training.
        rank: The process of a distributed training.
        first: The iteration of the first batch of workers that start now. The hook updates it.
    """

    def __init__(self, loader: DataLoader, base: int, rank: int, first: int) -> None:
        self.collate, self.init = loader.collate_fn, loader.worker_init_fn
        self.base = base
        self.rank = rank
        self.first = first
        loader.collate_fn, loader.worker_init_fn = self, self.start
        loader.__dict__['persistent_workers'] = False  # these would not see a change of `first`
        loader.generator = loader.generator or torch.Generator()  # without one, each start draws a global random number

    def start(self, worker_id: int) -> None:
        if self.init is not None:
            self.init(worker_id)
        self._iteration = self.first + worker_id
        seed_all(self.base, self._iteration, self.rank, WORKER)

    def __call__(self, samples: list) -> Any:
        batch = self.collate(samples)
        worker = get_worker_info()
        if worker is not None:
            self._iteration += worker.num_workers
            seed_all(self.base, self._iteration, self.rank, WORKER)
        return batch
