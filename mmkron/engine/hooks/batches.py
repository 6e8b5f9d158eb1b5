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
from mmengine.dataset import InfiniteSampler
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import BatchSampler, DataLoader, get_worker_info

LOADING, STEP, WORKER = 0, 1, 2  # the streams of random numbers of an iteration


def seed_all(base: int, iteration: int, rank: int, stream: int) -> None:
    """Seed Python, NumPy and PyTorch from these numbers only."""
    first, second, third = np.random.SeedSequence([base, iteration, rank, stream]).generate_state(3)
    random.seed(int(first))
    np.random.seed(int(second))
    torch.manual_seed(int(third))


def sampler_of(loader: DataLoader) -> Any:
    """Return the sampler of single samples, also from within a batch sampler."""
    return getattr(getattr(loader, 'batch_sampler', None), 'sampler', getattr(loader, 'sampler', None))


class WorkerStart:
    """``worker_init_fn`` that keeps workers alive when a signal stops the training, which still needs them.

    Slurm signals every process of a job. Workers end only by signals from the process that started them, which PyTorch
    sends to workers that do not end by themselves.
    """

    def __init__(self, init: Callable[[int], None] | None, signals: Sequence[signal.Signals]) -> None:
        self.init = init
        self.signals = tuple(signals)

    def __call__(self, worker_id: int) -> None:
        if self.init is not None:
            self.init(worker_id)
        if self.signals and hasattr(signal, 'sigwaitinfo'):  # macOS has no sigwaitinfo
            signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
            parent = multiprocessing.parent_process().pid  # os.getppid() may be that of a fork server
            threading.Thread(target=_end_with_parent, args=(self.signals, parent), daemon=True).start()


def _end_with_parent(signals: tuple, parent: int) -> None:
    while signal.sigwaitinfo(signals).si_pid != parent:
        pass
    os._exit(0)


class SeededBatches:
    """``collate_fn`` and ``worker_init_fn`` that seed each batch of a worker by its iteration.

    A worker knows neither iterations nor epochs, but gets every n-th batch in order. In the main process this only
    collates.

    Args:
        collate: The loader's own ``collate_fn``.
        init: The loader's own ``worker_init_fn``.
        base: The seed of the training.
        rank: The process of a distributed training.
        first: The iteration of the first batch of workers that start now. The hook updates it.
        length: Number of batches after which persistent workers start again at the first one.
    """

    def __init__(
        self, collate: Callable, init: Callable[[int], None], base: int, rank: int, first: int, length: float
    ) -> None:
        self.collate = collate
        self.init = init
        self.base = base
        self.rank = rank
        self.first = first
        self.length = length

    def start(self, worker_id: int) -> None:
        self.init(worker_id)
        self._iteration = self.first + worker_id
        seed_all(self.base, self._iteration, self.rank, WORKER)

    def __call__(self, samples: list) -> Any:
        batch = self.collate(samples)
        worker = get_worker_info()
        if worker is not None:
            self._iteration += worker.num_workers
            if self._iteration >= self.first + self.length:
                self.first += self.length
                self._iteration = self.first + worker.id
            seed_all(self.base, self._iteration, self.rank, WORKER)
        return batch


class RestOfBatches:
    """Batch sampler that skips its first ``skip`` batches by drawing their indices without reading data."""

    def __init__(self, batches: Any, skip: int) -> None:
        self.batches = batches
        self.skip = skip

    def __getattr__(self, name: str) -> Any:  # sampler, batch_size, drop_last
        if name == 'batches':
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator:
        return itertools.islice(iter(self.batches), self.skip, None)

    def __len__(self) -> int:
        return max(len(self.batches) - self.skip, 0)


class AdvancedIterator:
    """Iterator of an iteration-based loop that returns None for the first ``count`` batches, which the loop drops."""

    def __init__(self, iterator: Iterator, count: int) -> None:
        self._iterator = iterator
        self._count = count

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if self._count:
            self._count -= 1
            return None
        return next(self._iterator)

    def skip_iter(self, _: int) -> None:  # OneDL's MMEngine 0.10.12 and later call this instead of next
        self._count = 0


def fresh_batches(loader: DataLoader, cfg: dict | None) -> tuple[Any, bool]:
    """Return the loader's batch sampler, reset to its first batch, and whether it is infinite.

    Infinite samplers keep their position and batch samplers keep incomplete batches, so they are rebuilt.

    Args:
        loader: Data loader of an iteration-based loop, whose iterator may already have drawn batches.
        cfg: The loader's config, or None.
    """
    sampler, cfg = sampler_of(loader), cfg if isinstance(cfg, dict) else {}
    infinite = isinstance(sampler, InfiniteSampler) and isinstance(cfg.get('sampler'), dict)
    if infinite:
        default = dict(dataset=loader.dataset, seed=sampler.seed)
        sampler = DATA_SAMPLERS.build(dict(cfg['sampler']), default_args=default)
    if isinstance(cfg.get('batch_sampler'), dict):
        default = dict(sampler=sampler, batch_size=cfg['batch_size'])
        return DATA_SAMPLERS.build(dict(cfg['batch_sampler']), default_args=default), infinite
    batches = BatchSampler(sampler, loader.batch_size, loader.drop_last) if infinite else loader.batch_sampler
    return batches, infinite


def with_batches(loader: DataLoader, batches: Any, persistent: bool) -> DataLoader:
    """Return a copy of ``loader`` with another batch sampler that leaves the process's random state unchanged."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=persistent,
    )
