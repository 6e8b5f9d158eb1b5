"""Random numbers that follow from the seed and the iteration, so that a resumed training equals a straight one."""

from __future__ import annotations

from typing import Any

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import DataLoader

from mmkron.engine.hooks.batches import LOADING, STEP, SeededBatches, seed_all
from mmkron.engine.hooks.preemption import PreemptionHook
from mmkron.registry import HOOKS
from mmkron.utils.errors import LaunchError


@HOOKS.register_module()
class DeterministicResumeHook(Hook):
    """Seeds every iteration, so that a resumed training has the parameters of an uninterrupted one, bit by bit.

    MMEngine restores the parameters, the optimizer, the schedules and the seed, but no state of a random number
    generator. With this hook the random numbers of each iteration follow from the seed, the number of the iteration and
    the process alone, in the data workers as well, which start again in each epoch. It needs :class:`PreemptionHook`,
    which restores the order of the samples, the same number of processes and workers, the same batch size, and
    deterministic operators. Add it by ``custom_hooks = [dict(type='mmkron.DeterministicResumeHook')]``.

    Not covered, in addition: an epoch that ends amid a step of gradient accumulation, and what a dataset keeps from
    earlier samples, such as MMDetection's cached mosaic.

    Raises:
        LaunchError: If the runner has no :class:`PreemptionHook`.
    """

    priority = 'LOWEST'

    def __init__(self) -> None:
        self._batches: SeededBatches | None = None

    def before_train_epoch(self, runner: Any) -> None:
        if self._batches is None:  # in before_train, PreemptionHook still changes the loader
            if not any(isinstance(hook, PreemptionHook) for hook in runner.hooks):
                raise LaunchError('DeterministicResumeHook needs dict(type="mmkron.PreemptionHook") in default_hooks')
            loader, first = runner.train_dataloader, runner.iter
            if isinstance(runner.train_loop, IterBasedTrainLoop):  # which reads and drops what is not skipped
                first = getattr(getattr(loader, 'batch_sampler', None), 'skip', 0)
            if isinstance(loader, DataLoader):
                self._batches = SeededBatches(loader, runner.seed, get_rank(), first)
        self._seed(runner, LOADING)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._seed(runner, STEP)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if self._batches is not None:  # workers that start later
            self._batches.first = runner.iter + 1
        self._seed(runner, LOADING, ahead=1)

    def after_val_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        self._seed(runner, LOADING)

    def _seed(self, runner: Any, stream: int, ahead: int = 0) -> None:
        own = stream != STEP or (runner.cfg.get('randomness') or {}).get('diff_rank_seed', False)
        seed_all(runner.seed, runner.iter + ahead, get_rank() if own else 0, stream)
