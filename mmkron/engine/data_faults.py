"""Says at which sample loading failed, whatever the dataset, the transform and the process that loads."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmengine.dataset import Compose
from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop, Runner
from torch.utils.data import DataLoader, get_worker_info

from mmkron.engine.errors import LaunchError
from mmkron.engine.hooks import ResumeHook
from mmkron.engine.hooks.batches import fresh_batches, with_batches

_KEYS = ('img_path', 'seg_map_path', 'file_name', 'sample_idx')  # what names a sample in the hosts' datasets
_SLOT = 2048  # bytes for what a worker reads
_WORKERS = 256


class DataError(RuntimeError):
    """A sample cannot be loaded; the message names it."""


class _NamedPipeline(Compose):
    """The transforms of a dataset; an error in them gets the name of the sample.

    Args:
        pipeline: The dataset's own.
        slots: Memory that is shared with the data workers, where each keeps what it reads.
    """

    def __init__(self, pipeline: Compose, slots: mmap.mmap) -> None:
        self.transforms = pipeline.transforms
        self.slots: mmap.mmap | None = slots

    def __getstate__(self) -> dict:  # for workers that are spawned, which share no memory
        return dict(self.__dict__, slots=None)

    def __call__(self, data: dict) -> Any:
        name = _describe(data)
        worker = get_worker_info()
        if worker is not None and self.slots is not None and worker.id < _WORKERS:
            note = f'{os.getpid()} {name}'.encode()[: _SLOT - 1] + b'\0'
            self.slots[worker.id * _SLOT : worker.id * _SLOT + len(note)] = note
        try:
            return super().__call__(data)
        except Exception as error:
            if any(part in str(error) for part in name.split(' and ')):
                raise
            raise DataError(f'{name}: {type(error).__name__}: {error}') from error


class _NameSamples(Hook):
    """Puts a :class:`_NamedPipeline` into every dataset before its workers start."""

    priority = 'HIGHEST'

    def __init__(self) -> None:
        self.slots: list[mmap.mmap] = []

    def before_train(self, runner: Runner) -> None:
        loop = runner.train_loop
        self._name(loop.dataloader.dataset)
        if (
            isinstance(loop, IterBasedTrainLoop)
            and isinstance(loop.dataloader, DataLoader)
            and loop.dataloader.num_workers
            and not any(isinstance(hook, ResumeHook) for hook in runner.hooks)
        ):
            # The workers of an iteration-based loop run already. ResumeHook starts them again, else that is done here.
            old = loop.dataloader
            batches, _ = fresh_batches(old, runner.cfg.get('train_dataloader'))
            loop.dataloader = with_batches(old, batches, old.persistent_workers)
            loop.dataloader_iterator = type(loop.dataloader_iterator)(loop.dataloader)

    def before_val(self, runner: Runner) -> None:
        self._name(runner.val_dataloader.dataset)

    def before_test(self, runner: Runner) -> None:
        self._name(runner.test_dataloader.dataset)

    def _name(self, dataset: Any) -> None:
        for leaf in _datasets(dataset):
            if type(getattr(leaf, 'pipeline', None)) is Compose:
                self.slots.append(mmap.mmap(-1, _SLOT * _WORKERS))
                leaf.pipeline = _NamedPipeline(leaf.pipeline, self.slots[-1])

    def reading(self, pid: str) -> str:
        """What the worker of this process id read last; empty if that is not known."""
        for slots in self.slots:
            for start in range(0, len(slots), _SLOT):
                owner, _, name = slots[start : start + _SLOT].split(b'\0', 1)[0].partition(b' ')
                if owner == pid.encode():
                    return name.decode(errors='replace')
        return ''


def _datasets(dataset: Any) -> Iterator[Any]:
    """A dataset and those that it wraps."""
    yield dataset
    inner = getattr(dataset, 'datasets', None)
    for child in inner if isinstance(inner, (list, tuple)) else [getattr(dataset, 'dataset', None)]:
        if child is not None:
            yield from _datasets(child)


def _describe(data: Any) -> str:
    """The files of a sample, or what else its dataset calls it by."""
    found = [(key, data[key]) for key in _KEYS if data.get(key) is not None] if isinstance(data, dict) else []
    files = [str(value) for key, value in found if key != 'sample_idx']
    return ' and '.join(files) or ', '.join(f'sample {value}' for _, value in found) or 'a sample without a name'


@contextmanager
def data_faults(runner: Runner) -> Iterator[None]:
    """A run in which an error of a transform, and the end of a data worker, name the sample.

    Raises:
        LaunchError: A data worker ended, for instance since its memory did not suffice.
    """
    hook = _NameSamples()
    runner.register_hook(hook)
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith('DataLoader worker'):
            raise
        names = [
            f'{pid}: {hook.reading(pid)}' for pid in re.findall(r'\d+', re.split('exited|is killed', str(error))[0])
        ]
        raise LaunchError(
            f'{str(error).strip()}\nwhat it read last, by process: {"; ".join(names)}\n'
            'a killed worker often means that memory ran out: take fewer num_workers, or look at this sample'
        ) from error
