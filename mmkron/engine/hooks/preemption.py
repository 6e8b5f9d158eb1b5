"""Training that can be stopped at any iteration and resumed at the next one."""

from __future__ import annotations

import os
import os.path as osp
import re
import signal
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from mmengine.dataset import InfiniteSampler
from mmengine.dist import all_reduce, barrier, is_main_process
from mmengine.fileio.backends import LocalBackend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import DataLoader, IterableDataset

from mmkron.engine.hooks.batches import LazyIterator, RestOfBatches, rebuild, sampler_of, start_worker
from mmkron.engine.storage import ATOMIC, PARTIAL, AtomicLocalBackend, remove
from mmkron.registry import HOOKS

_INTERRUPTED = re.compile(r'interrupted_iter_\d+\.pth')
# What a killed process leaves of a file that it was writing.
_UNFINISHED = re.compile(r'((best_.+_|interrupted_)?(epoch|iter)_\d+\.pth|last_checkpoint)' + re.escape(PARTIAL))


@HOOKS.register_module()
class PreemptionHook(Hook):
    """Writes a checkpoint when the process is told to end, and resumes from it in the middle of an epoch.

    On one of ``signals`` all processes complete the current iteration, and with gradient accumulation the step that it
    is part of, ``interrupted_iter_N.pth`` is written, and the program ends with exit code 128 + number of the signal,
    143 for SIGTERM. It is enough that one process gets the signal. A validation that runs is completed first, and one
    more iteration. The next regular checkpoint removes the interrupted one.

    A training that is resumed has the iteration count, the learning rates and the order of the samples of one that was
    never stopped. Augmentation and dropout draw other random numbers; :class:`DeterministicResumeHook` makes those
    equal, too. The hook draws no random number and leaves a training that is not stopped as it is. Not covered: an
    ``IterBasedTrainLoop`` whose sampler is not an ``InfiniteSampler``, after its first pass over the data, or whose
    loader is not from the runner's config, and training data that is not a ``DataLoader`` with batches of indices.

    Args:
        signals: Names of signals; an empty sequence for none. Slurm sends SIGTERM, and with ``--signal=USR1@60``
            SIGUSR1 a minute before.

    Raises:
        ValueError: If ``signals`` is not a sequence of names of signals that can be handled.
    """

    priority = 'LOWEST'  # after the schedules have stepped and the regular checkpoint is written

    def __init__(self, signals: Sequence[str] = ('SIGTERM', 'SIGUSR1')) -> None:
        names = {number.name for number in signal.Signals} - {'SIGKILL', 'SIGSTOP'}  # nobody can handle those
        if not isinstance(signals, (list, tuple)) or any(name not in names for name in map(str, signals)):
            raise ValueError(f"signals must be a sequence of names such as 'SIGTERM', got {signals!r}")
        self.signals = tuple(signal.Signals[name] for name in signals)
        self._handlers: dict = {}  # of the signals, before the training
        self._received = 0  # number of the signal
        self._state: dict = {}  # of this hook in the checkpoint that was loaded
        self._position: dict = {}  # in the epoch, for the checkpoint that this hook writes
        self._rest: RestOfBatches | None = None  # of the epoch that is resumed
        self._last_regular: str | None = None  # path of the last checkpoint of CheckpointHook

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        state = checkpoint.setdefault('meta', {}).setdefault('mmkron', {})
        state.update(self._position)
        seed = getattr(sampler_of(runner.train_dataloader), 'seed', None)
        if seed is not None:
            state['sampler_seed'] = int(seed)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        self._state = (checkpoint.get('meta') or {}).get('mmkron') or {}

    def _save(self, runner: Any) -> None:
        path = osp.join(_folder(runner), f'interrupted_iter_{runner.iter + 1}.pth')
        runner.save_checkpoint(*osp.split(path), by_epoch=False, backend_args=ATOMIC)
        if is_main_process():
            AtomicLocalBackend().put(path.encode(), osp.join(runner.work_dir, 'last_checkpoint'))
        runner.logger.info(f'Stopped by a signal: --resume continues from {path}')

    def _remove_interrupted(self, runner: Any) -> None:
        """Remove earlier checkpoints of this hook after a regular one."""
        last = getattr(_checkpoint_hook(runner), 'last_ckpt', None)
        if last != self._last_regular:
            _remove_matching(runner, _INTERRUPTED)
        self._last_regular = last

    def _receive(self, number: int, _: Any) -> None:
        self._received = number

    def restore_handlers(self) -> None:
        """Let signals do again what they did before the training."""
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, handler or signal.SIG_DFL)  # None is one that Python has not set

    def _agreed_signal(self) -> int:
        """Return the number of a signal that any process has received, 0 for none; the same in all of them."""
        number = torch.tensor(self._received)
        all_reduce(number, 'max')  # MMEngine's log of the losses waits for the accelerator in each iteration as well
        return int(number)

    def before_train(self, runner: Any) -> None:
        if runner.iter == 0:
            self._state = {}  # of load_from
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in self.signals}
        _remove_matching(runner, _UNFINISHED)
        self._last_regular = getattr(_checkpoint_hook(runner), 'last_ckpt', None)
        self._advance(runner)
        for loop in (runner.train_loop, runner.val_loop):
            loader = getattr(loop, 'dataloader', None)
            if isinstance(loader, DataLoader):
                loader.worker_init_fn = partial(start_worker, self.signals, loader.worker_init_fn)

    def _advance(self, runner: Any) -> None:
        """Let the training data start after the last batch of the checkpoint, in the order of its sampler."""
        loop, cfg = runner.train_loop, runner.cfg.get('train_dataloader')
        by_iteration = isinstance(loop, IterBasedTrainLoop)
        if not _has_batches(loop.dataloader) or (by_iteration and not isinstance(cfg, dict)):
            if runner.iter:
                runner.logger.warning('The training data cannot be advanced and starts from its beginning')
            return
        if by_iteration:  # MMEngine 0.10 has started its workers, which would read and drop the batches
            loop.dataloader = rebuild(runner, loop.dataloader)
        sampler = sampler_of(loop.dataloader)
        if 'sampler_seed' in self._state and hasattr(sampler, 'seed'):
            sampler.seed = self._state['sampler_seed']
        if by_iteration:
            skip = runner.iter if isinstance(sampler, InfiniteSampler) else 0
            RestOfBatches.install(loop.dataloader, skip)
            drops = 0 if getattr(loop, 'fast_forward_on_resume', False) else skip
            loop.dataloader_iterator = LazyIterator(loop.dataloader, drops)
        else:
            self._rest = RestOfBatches.install(loop.dataloader, self._batches_to_skip(runner))

    def _batches_to_skip(self, runner: Any) -> int:
        skip, length = self._state.get('position', 0), len(runner.train_dataloader)
        if skip and self._state.get('epoch_length') != length:
            runner.logger.warning(
                f'The checkpoint is of batch {skip} in an epoch of {self._state.get("epoch_length")}, which now has '
                f'{length}: the epoch starts again'
            )
            return 0
        if skip:
            runner.logger.info(f'Continue after batch {skip} of the epoch')
        return skip

    def after_train_epoch(self, runner: Any) -> None:
        self._remove_interrupted(runner)
        if self._rest is not None:
            self._rest.skip = 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self._remove_interrupted(runner)
        number = self._agreed_signal()
        if number and _step_is_complete(runner):
            if self._rest is not None:
                position = self._rest.skip + batch_idx + 1
                self._position = dict(position=position, epoch_length=len(self._rest.batches))
            self._save(runner)
            barrier()
            self.restore_handlers()
            raise SystemExit(128 + number)

    def after_train(self, runner: Any) -> None:
        self.restore_handlers()


def _has_batches(loader: Any) -> bool:
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return indexed and loader.batch_sampler is not None


def _step_is_complete(runner: Any) -> bool:
    """Return whether no gradient waits for the iterations that accumulate with it; no checkpoint holds gradients."""
    wrappers = getattr(runner.optim_wrapper, 'optim_wrappers', {'': runner.optim_wrapper})  # of an OptimWrapperDict
    return all(getattr(wrapper, 'should_update', lambda: True)() for wrapper in wrappers.values())


def _checkpoint_hook(runner: Any) -> CheckpointHook | None:
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)


def _folder(runner: Any) -> str:
    """Return the folder of the checkpoints, or the work dir if they are not local files."""
    hook = _checkpoint_hook(runner)
    return hook.out_dir if isinstance(getattr(hook, 'file_backend', None), LocalBackend) else runner.work_dir


def _remove_matching(runner: Any, names: re.Pattern) -> None:
    folder = _folder(runner)
    for name in os.listdir(folder) if is_main_process() and osp.isdir(folder) else ():
        if names.fullmatch(name):
            remove(osp.join(folder, name))
