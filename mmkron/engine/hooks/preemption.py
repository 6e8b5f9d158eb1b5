"""Training that can be stopped at any iteration and resumed at the next one."""

from __future__ import annotations

import os
import os.path as osp
import re
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.dist import barrier, get_comm_device, get_world_size, is_main_process
from mmengine.fileio.backends import LocalBackend
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import DataLoader

from mmkron.engine.hooks.batches import (
    AdvancedIterator,
    RestOfBatches,
    WorkerStart,
    fresh_batches,
    sampler_of,
    with_batches,
)
from mmkron.engine.hooks.deterministic import DeterministicResumeHook
from mmkron.engine.storage import PARTIAL, AtomicLocalBackend, remove
from mmkron.registry import HOOKS

ATOMIC = dict(backend='atomic')
INTERRUPTED = 'interrupted_iter_{}.pth'
# What a killed process leaves of a file that it was writing.
_UNFINISHED = re.compile(r'((best_.+_|interrupted_)?(epoch|iter)_\d+\.pth|last_checkpoint)' + re.escape(PARTIAL))


class Interrupted(SystemExit):
    """Ends a training that a signal has stopped, with the exit code of a program that the signal ended."""


@HOOKS.register_module()
class PreemptionHook(Hook):
    """Writes a checkpoint when the process is told to end, and resumes from it in the middle of an epoch.

    On one of ``signals`` all processes complete the current iteration, and with gradient accumulation the step that it
    is part of, ``interrupted_iter_N.pth`` is written, and the program ends with exit code 128 + number of the signal,
    143 for SIGTERM. It is enough that one process gets the signal. A validation that runs is completed first; the
    checkpoint is written before it, except with an ``EMAHook``, whose averages are in the place of the weights then.
    The next regular checkpoint removes the interrupted one.

    A training that is resumed has the iteration count, the learning rates and the order of the samples of one that was
    never stopped. Augmentation and dropout draw other random numbers; :class:`DeterministicResumeHook` makes those
    equal, too. The hook draws no random number and leaves a training that is not stopped as it is. Not covered: an
    ``IterBasedTrainLoop`` whose sampler is not an ``InfiniteSampler``, after its first pass over the data, and training
    data that is not a ``DataLoader``.

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
        self._received = 0
        self._stop = 0  # number of the signal on which all processes have agreed
        self._pending: Any = None  # the agreement that is on its way
        self._state: dict = {}  # of this hook in the checkpoint that was loaded
        self._position: dict | None = None  # for the checkpoint that is being written, if this hook writes it
        self._training = self._saved = False
        self._last_regular: str | None = None  # path of the last checkpoint of CheckpointHook
        self._loader: DataLoader | None = None  # of an epoch-based loop
        self._own_functions: tuple = ()  # collate_fn and worker_init_fn of that loader, as the host built it
        self._skip = 0  # batches of the epoch that were trained before the stop

    # ------------------------------------------------------------------------------------------------ checkpoints

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        meta = checkpoint.setdefault('meta', {})
        state = meta.setdefault('mmkron', {})
        seed = getattr(sampler_of(runner.train_dataloader), 'seed', None)
        if seed is not None:
            state['sampler_seed'] = int(seed)
        if self._position is not None:
            meta.update(epoch=self._position['epoch'], iter=self._position['iter'])
            state.update(self._position['state'])

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        self._state = (checkpoint.get('meta') or {}).get('mmkron') or {}

    def _remove_interrupted(self, runner: Any) -> None:
        """Remove earlier checkpoints of this hook after a regular one."""
        last = getattr(_checkpoint_hook(runner), 'last_ckpt', None)
        if last != self._last_regular and is_main_process():
            _remove_matching(runner, re.compile(INTERRUPTED.format(r'\d+')))
        self._last_regular = last

    def _save(self, runner: Any, iteration: int, **state: int) -> None:
        """Write the checkpoint of a training after ``iteration`` iterations."""
        folder, name = _folder(runner), INTERRUPTED.format(iteration)
        self._position = dict(epoch=runner.epoch, iter=iteration, state=state)
        meta = dict(epoch=runner.epoch, iter=iteration)
        runner.save_checkpoint(folder, name, meta=meta, by_epoch=False, backend_args=ATOMIC)
        self._position = None
        self._saved = True
        if is_main_process():
            AtomicLocalBackend().put(osp.join(folder, name).encode(), osp.join(runner.work_dir, 'last_checkpoint'))
        runner.logger.info(f'Stopped by a signal: --resume continues from {osp.join(folder, name)}')

    # ---------------------------------------------------------------------------------------------------- signals

    def _receive(self, number: int, _: Any) -> None:
        self._received = number

    def restore_handlers(self) -> None:
        """Let signals do again what they did before the training."""
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, handler or signal.SIG_DFL)  # None is one that Python has not set

    def _agree(self, wait: bool = False) -> int:
        """Return the number of a signal that any process has received, 0 for none; the same in all of them.

        Without ``wait`` it is the answer of one iteration ago, so that no accelerator is waited for.
        """
        if get_world_size() == 1:
            return self._received
        number = torch.tensor(self._received, device=get_comm_device())
        work = torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, async_op=True)
        earlier, self._pending = self._pending, (work, number)
        answer = self._pending if wait else earlier
        if answer is None:
            return 0
        answer[0].wait()
        return int(answer[1])

    def _leave(self) -> None:
        barrier()
        self.restore_handlers()
        raise Interrupted(128 + self._stop)

    # --------------------------------------------------------------------------------------------------- training

    def before_train(self, runner: Any) -> None:
        self._training = True
        if runner.iter == 0:
            self._state = {}  # of load_from
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in self.signals}
        if is_main_process():
            _remove_matching(runner, _UNFINISHED)
        self._last_regular = getattr(_checkpoint_hook(runner), 'last_ckpt', None)
        loader = getattr(runner.val_loop, 'dataloader', None)
        if isinstance(loader, DataLoader):
            loader.worker_init_fn = WorkerStart(loader.worker_init_fn, self.signals)
        loop = runner.train_loop
        if not isinstance(loop.dataloader, DataLoader):
            return
        sampler = sampler_of(loop.dataloader)
        if 'sampler_seed' in self._state and hasattr(sampler, 'seed'):
            sampler.seed = self._state['sampler_seed']
        if isinstance(loop, IterBasedTrainLoop):
            self._restart(runner)
        else:
            self._start(runner)

    def _start(self, runner: Any) -> None:
        """Prepare the loader of an epoch-based loop and find the position in its first epoch."""
        self._loader = runner.train_loop.dataloader
        self._own_functions = self._loader.collate_fn, self._loader.worker_init_fn
        self._prepare(runner, self._loader, runner.iter, len(self._loader))
        self._skip, length = self._state.get('position', 0), self._state.get('epoch_length')
        if self._skip and length != len(self._loader):
            runner.logger.warning(
                f'The checkpoint is of batch {self._skip} in an epoch of {length}, which now has {len(self._loader)}: '
                'the epoch starts again'
            )
            self._skip = 0

    def _prepare(self, runner: Any, loader: DataLoader, first: int, length: float) -> None:
        """Let workers that have not started ignore the signals, and :class:`DeterministicResumeHook` seed them."""
        loader.worker_init_fn = WorkerStart(loader.worker_init_fn, self.signals)
        for hook in runner.hooks:
            if isinstance(hook, DeterministicResumeHook):
                hook.prepare(runner, loader, first, length)

    def _restart(self, runner: Any) -> None:
        """Restart the workers of an iteration-based loop, which start before any hook runs, at the right batch.

        MMEngine 0.10 reads and drops the batches that were trained before the stop; their indices are enough.
        """
        loop, old = runner.train_loop, runner.train_loop.dataloader
        batches, infinite = fresh_batches(old, runner.cfg.get('train_dataloader'))
        skip, length = (runner.iter, float('inf')) if infinite else (0, len(old))
        loop.dataloader = with_batches(old, RestOfBatches(batches, skip), old.persistent_workers)
        self._prepare(runner, loop.dataloader, skip, length)
        iterator = type(loop.dataloader_iterator)(loop.dataloader)
        drops = skip and not getattr(loop, 'fast_forward_on_resume', False)
        loop.dataloader_iterator = AdvancedIterator(iterator, skip) if drops else iterator

    def before_train_epoch(self, runner: Any) -> None:
        if self._skip:
            rest = with_batches(self._loader, RestOfBatches(self._loader.batch_sampler, self._skip), False)
            rest.collate_fn, rest.worker_init_fn = self._own_functions
            self._prepare(runner, rest, runner.iter, float('inf'))
            runner.train_loop.dataloader = rest
            runner.logger.info(f'Continue after batch {self._skip} of the epoch')

    def after_train_epoch(self, runner: Any) -> None:
        self._remove_interrupted(runner)
        if self._skip:
            runner.train_loop.dataloader = self._loader
            self._skip = 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self._remove_interrupted(runner)
        self._stop = self._stop or self._agree()
        if self._stop and _step_is_complete(runner):
            state = {}
            if self._loader is not None:
                state = dict(position=self._skip + batch_idx + 1, epoch_length=len(self._loader))
            self._save(runner, runner.iter + 1, **state)
            self._leave()

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        # The state does not change during validation, and one process alone can write it, unless it is in shards.
        alone = is_main_process() and (get_world_size() == 1 or not hasattr(runner, 'strategy'))
        due = self._training and self._received and not self._saved and alone and _step_is_complete(runner)
        if due and not any(isinstance(hook, EMAHook) for hook in runner.hooks):
            self._save(runner, runner.iter)

    def after_val_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        if not self._training:
            return
        self._stop = self._stop or self._agree(wait=True)
        if self._stop and _step_is_complete(runner):
            self._save(runner, runner.iter)
            self._leave()

    def after_train(self, runner: Any) -> None:
        self._training = False
        self.restore_handlers()


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
    """Remove checkpoints by their names; folders only of a runner that writes a file per process."""
    folder = _folder(runner)
    for name in os.listdir(folder) if osp.isdir(folder) else ():
        path = osp.join(folder, name)
        if names.fullmatch(name) and (osp.isfile(path) or hasattr(runner, 'strategy')):
            remove(path)
