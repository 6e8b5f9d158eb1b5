"""Training that can be stopped at any iteration and goes on as if it had not been."""

from __future__ import annotations

import os.path as osp
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.dist import barrier, get_comm_device, get_rank, get_world_size, is_main_process
from mmengine.fileio.backends import LocalBackend
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import DataLoader

from mmkron.engine.hooks.batches import (
    LOADING,
    STEP,
    AdvancedIterator,
    RestOfBatches,
    SeededBatches,
    WorkerStart,
    fresh_batches,
    sampler_of,
    seed_all,
    with_batches,
)
from mmkron.engine.hooks.checkpoint import INTERRUPTED, save_whole, write_last
from mmkron.registry import HOOKS
from mmkron.utils.checks import check_flags


class Interrupted(SystemExit):
    """Ends a training that a signal has stopped, with the exit code of a program that the signal ended."""


@HOOKS.register_module()
class ResumeHook(Hook):
    """Writes a checkpoint when the process is told to end, and lets a resumed training equal an uninterrupted one.

    On one of ``signals`` the iteration that runs, and with gradient accumulation the step that it is part of, is
    completed in all processes, ``interrupted_iter_N.pth`` is written, and the program ends with exit code 128 + number
    of the signal, 143 for SIGTERM. It is enough that one process gets the signal. A validation that runs is completed
    first; should there be no time for that, the checkpoint is there already, except with an ``EMAHook``, which has its
    averages in the place of the weights then. ``--resume`` goes on at iteration N, in the middle of an epoch too.
    MMEngine without this hook would start that epoch again with N as its first iteration.

    A training with this hook that is resumed has, with the same number of processes and workers and the same batch
    size, the parameters of one that was never stopped, bit by bit where the operators are deterministic. MMEngine
    restores the parameters, the optimizer, the schedules and the seed, but no state of a random number generator, and
    it builds the samplers before it reads the seed. Hence with ``seed_iterations`` the random numbers of each
    iteration follow from the seed, its number and the process alone, in the data workers as well, and samplers get
    their seed from the checkpoint. Not covered: an ``IterBasedTrainLoop`` whose sampler is no ``InfiniteSampler``,
    beyond its first pass over the data; an epoch that ends amid a step of gradient accumulation; training data that is
    no ``DataLoader``; and what a dataset keeps from earlier samples, such as MMDetection's cached mosaic.

    Args:
        signals: names of signals; an empty sequence for none. Slurm sends SIGTERM, and with ``--signal=USR1@60``
            SIGUSR1 a minute before.
        seed_iterations: False leaves the random numbers to MMEngine. What is resumed then still has the samples in
            the same order, with other augmentation and dropout.

    Raises:
        ValueError: ``signals`` is no sequence of names of signals, or ``seed_iterations`` neither True nor False.
    """

    priority = 'LOWEST'  # after the schedules have stepped and the regular checkpoint is written

    def __init__(self, signals: Sequence[str] = ('SIGTERM',), seed_iterations: bool = True) -> None:
        names = {number.name for number in signal.Signals} - {'SIGKILL', 'SIGSTOP'}  # which nobody can handle
        if not isinstance(signals, (list, tuple)) or any(name not in names for name in map(str, signals)):
            raise ValueError(f"signals must be a sequence of names such as 'SIGTERM', got {signals!r}")
        self.signals = tuple(signal.Signals[name] for name in signals)
        check_flags(seed_iterations=seed_iterations)
        self.seed_iterations = seed_iterations
        self._handlers: dict = {}  # of the signals, as they were before
        self._received = 0
        self._stop = 0  # the number of the signal on which all processes have agreed
        self._pending: Any = None  # the agreement that is on its way
        self._state: dict = {}  # what the checkpoint that was loaded holds of this hook
        self._writing: dict = {}  # what the checkpoint that is being written gets
        self._training = self._saved = False
        self._loader: DataLoader | None = None  # of an epoch-based loop
        self._plain: tuple = ()  # its own collate_fn and worker_init_fn
        self._skip = 0  # batches of the epoch that a resumed training has behind it
        self._seeds: SeededBatches | None = None

    # ------------------------------------------------------------------------------------------------ checkpoints

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        meta = checkpoint.setdefault('meta', {})
        meta.update(self._writing)
        state = meta.setdefault('mmkron', {})
        state['seed'] = self._base(runner)
        seed = getattr(sampler_of(runner.train_dataloader), 'seed', None)
        if seed is not None:
            state['sampler_seed'] = int(seed)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        self._state = (checkpoint.get('meta') or {}).get('mmkron') or {}

    def _base(self, runner: Any) -> int:
        return int(self._state.get('seed', runner.seed))

    def _save(self, runner: Any, iteration: int, **state: int) -> None:
        """Writes the checkpoint of a training that has ``iteration`` iterations behind it."""
        hook = next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
        local = isinstance(getattr(hook, 'file_backend', None), LocalBackend)
        folder, name = hook.out_dir if local else runner.work_dir, INTERRUPTED.format(iteration)
        self._writing = dict(epoch=runner.epoch, iter=iteration, mmkron=state)
        save_whole(runner, folder, name, meta=dict(self._writing), by_epoch=False)
        self._writing = {}
        self._saved = True
        if is_main_process():
            write_last(runner.work_dir, osp.join(folder, name))
        runner.logger.info(f'Stopped by a signal: {osp.join(folder, name)} is written, --resume goes on from it')

    # ---------------------------------------------------------------------------------------------------- signals

    def _receive(self, number: int, _: Any) -> None:
        self._received = number

    def restore_handlers(self) -> None:
        """Signals do again what they did before the training."""
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, handler or signal.SIG_DFL)  # None is one that Python has not set

    def _agree(self, at_once: bool = False) -> int:
        """The number of a signal that any of the processes has got, 0 for none; the same in all of them.

        Unless ``at_once``, it is the answer of one iteration ago, so that no accelerator is waited for.
        """
        if get_world_size() == 1:
            return self._received
        number = torch.tensor(self._received, device=get_comm_device())
        work = torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, async_op=True)
        asked, self._pending = (work, number) if at_once else self._pending, (work, number)
        if asked is None:
            return 0
        asked[0].wait()
        return int(asked[1])

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
            return
        self._loader = loop.dataloader
        self._plain = (self._loader.collate_fn, self._loader.worker_init_fn)
        self._seeds = self._prepare(runner, self._loader, runner.iter, len(self._loader))
        done, length = self._state.get('position', 0), self._state.get('epoch_length')
        if done and length != len(self._loader):
            runner.logger.warning(
                f'The checkpoint is of batch {done} in an epoch of {length}, which now has {len(self._loader)}: the '
                'epoch starts again'
            )
            done = 0
        self._skip = done

    def _prepare(self, runner: Any, loader: DataLoader, first: int, length: float) -> SeededBatches | None:
        """Lets the workers of a loader, which have not started yet, ignore the signals and seed each batch."""
        start = WorkerStart(loader.worker_init_fn, self.signals)
        if not self.seed_iterations:
            loader.worker_init_fn = start
            return None
        seeds = SeededBatches(loader.collate_fn, start, self._base(runner), get_rank(), first, length)
        loader.collate_fn, loader.worker_init_fn = seeds, seeds.start
        return seeds

    def _restart(self, runner: Any) -> None:
        """An iteration-based loop starts its workers before any hook runs; here they start again, at the right batch.

        MMEngine 0.10 reads and drops the batches that a resumed training has behind it; their indices are enough.
        """
        loop, old = runner.train_loop, runner.train_loop.dataloader
        batches, infinite = fresh_batches(old, runner.cfg.get('train_dataloader'))
        skip, length = (runner.iter, float('inf')) if infinite else (0, len(old))
        loop.dataloader = with_batches(old, RestOfBatches(batches, skip), old.persistent_workers)
        self._seeds = self._prepare(runner, loop.dataloader, skip, length)
        iterator = type(loop.dataloader_iterator)(loop.dataloader)
        drops = skip and not getattr(loop, 'fast_forward_on_resume', False)
        loop.dataloader_iterator = AdvancedIterator(iterator, skip) if drops else iterator

    def before_train_epoch(self, runner: Any) -> None:
        if self._skip:
            rest = with_batches(self._loader, RestOfBatches(self._loader.batch_sampler, self._skip), False)
            rest.collate_fn, rest.worker_init_fn = self._plain
            self._prepare(runner, rest, runner.iter, float('inf'))
            runner.train_loop.dataloader = rest
            runner.logger.info(f'Goes on after batch {self._skip} of the epoch')
        self._seed(runner, LOADING)

    def after_train_epoch(self, runner: Any) -> None:
        if self._skip:
            runner.train_loop.dataloader = self._loader
            self._skip = 0

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._seed(runner, STEP)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self._stop = self._stop or self._agree()
        if self._stop and _step_is_complete(runner):
            state = {}
            if self._loader is not None:
                state = dict(position=self._skip + batch_idx + 1, epoch_length=len(self._loader))
            self._save(runner, runner.iter + 1, **state)
            self._leave()
        if self._seeds is not None:
            self._seeds.first = runner.iter + 1
        self._seed(runner, LOADING, ahead=1)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        # The state does not change during validation, and one process alone can write it, unless it is in shards.
        alone = is_main_process() and (get_world_size() == 1 or not hasattr(runner, 'strategy'))
        due = self._training and self._received and not self._saved and alone and _step_is_complete(runner)
        if due and not any(isinstance(hook, EMAHook) for hook in runner.hooks):
            self._save(runner, runner.iter)

    def after_val_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        if not self._training:
            return
        self._stop = self._stop or self._agree(at_once=True)
        if self._stop and _step_is_complete(runner):
            self._save(runner, runner.iter)
            self._leave()
        self._seed(runner, LOADING)

    def after_train(self, runner: Any) -> None:
        self._training = False
        self.restore_handlers()

    def _seed(self, runner: Any, stream: int, ahead: int = 0) -> None:
        if self.seed_iterations:
            own = stream != STEP or (runner.cfg.get('randomness') or {}).get('diff_rank_seed', False)
            seed_all(self._base(runner), runner.iter + ahead, get_rank() if own else 0, stream)


def _step_is_complete(runner: Any) -> bool:
    """Whether no gradient waits for the iterations that accumulate with it; no checkpoint holds gradients."""
    wrappers = getattr(runner.optim_wrapper, 'optim_wrappers', {'': runner.optim_wrapper})  # of an OptimWrapperDict
    return all(getattr(wrapper, 'should_update', lambda: True)() for wrapper in wrappers.values())
