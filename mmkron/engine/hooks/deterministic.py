"""Random numbers that follow from the seed and the iteration, so that a resumed training equals a straight one."""

from __future__ import annotations

from typing import Any

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from torch.utils.data import DataLoader

from mmkron.engine.hooks.batches import LOADING, STEP, SeededBatches, seed_all
from mmkron.registry import HOOKS


@HOOKS.register_module()
class DeterministicResumeHook(Hook):
    """Seeds every iteration, so that a resumed training has the parameters of an uninterrupted one, bit by bit.

    MMEngine restores the parameters, the optimizer, the schedules and the seed, but no state of a random number
    generator. With this hook the random numbers of each iteration follow from the seed, the number of the iteration and
    the process alone, in the data workers as well. It needs :class:`PreemptionHook`, which restores the order of the
    samples, the same number of processes and workers, the same batch size, and deterministic operators. Add it by
    ``custom_hooks = [dict(type='mmkron.DeterministicResumeHook')]``.

    Not covered: an ``IterBasedTrainLoop`` whose sampler is not an ``InfiniteSampler``, after its first pass over the
    data; an epoch that ends amid a step of gradient accumulation; training data that is not a ``DataLoader``; and what
    a dataset keeps from earlier samples, such as MMDetection's cached mosaic.
    """

    priority = 'LOWEST'  # after PreemptionHook, which is registered first

    def __init__(self) -> None:
        self._seed_of_checkpoint: int | None = None
        self._batches: list[SeededBatches] = []

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        checkpoint.setdefault('meta', {}).setdefault('mmkron', {})['seed'] = self._base(runner)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        self._seed_of_checkpoint = ((checkpoint.get('meta') or {}).get('mmkron') or {}).get('seed')

    def prepare(self, runner: Any, loader: DataLoader, first: int, length: float) -> None:
        """Seed each batch of a loader whose workers have not started.

        Args:
            runner: The runner.
            loader: The loader, which is changed.
            first: The iteration of its first batch.
            length: Batches after which persistent workers start again with the first one.
        """
        base = self._base(runner)
        batches = SeededBatches(loader.collate_fn, loader.worker_init_fn, base, get_rank(), first, length)
        loader.collate_fn, loader.worker_init_fn = batches, batches.start
        self._batches.append(batches)

    def before_train(self, runner: Any) -> None:
        if runner.iter == 0:
            self._seed_of_checkpoint = None  # of load_from

    def before_train_epoch(self, runner: Any) -> None:
        self._seed(runner, LOADING)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._seed(runner, STEP)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        for batches in self._batches:  # of workers that start later
            batches.first = runner.iter + 1
        self._seed(runner, LOADING, ahead=1)

    def after_val_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        self._seed(runner, LOADING)

    def _base(self, runner: Any) -> int:
        return int(runner.seed if self._seed_of_checkpoint is None else self._seed_of_checkpoint)

    def _seed(self, runner: Any, stream: int, ahead: int = 0) -> None:
        own = stream != STEP or (runner.cfg.get('randomness') or {}).get('diff_rank_seed', False)
        seed_all(self._base(runner), runner.iter + ahead, get_rank() if own else 0, stream)
