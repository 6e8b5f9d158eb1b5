"""Let a resumed training follow the schedule and the options of the optimizer in its config."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop

from mmkron.utils.errors import LaunchError

START_FROM_WEIGHTS = 'to start from its weights set load_from=PATH and resume=False in the config'


class FollowConfigHook(Hook):
    """Hook that lets a resumed training follow the schedule and the optimizer's options in its config.

    MMEngine overwrites both with those in the checkpoint, so a longer schedule would have no effect. Here the schedule
    of the config is stepped to the place where the training resumes, which is an epoch in an epoch-based training,
    whatever the number of batches per epoch was. Schedulers that follow a metric cannot be stepped: with one of them,
    schedule and options are those in the checkpoint.

    MMEngine also runs the text of the config that a checkpoint holds; the hook removes it.

    Raises:
        LaunchError: The checkpoint is of another optimizer, or of another schedule that follows a metric.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Replace the schedule and the options in a checkpoint with the schedule and the options of the config."""
        (checkpoint.get('meta') or {}).pop('config', None)
        if not runner._resume:
            return
        groups = _by_optimizer(runner.param_schedulers)
        schedulers = sum(groups.values(), [])
        states = {key: [scheduler.state_dict() for scheduler in group] for key, group in groups.items()}
        followers = [type(scheduler).__name__ for scheduler in schedulers if getattr(scheduler, 'need_val_args', False)]
        if followers:
            if _settings(states) != _settings(_by_optimizer(checkpoint.get('param_schedulers'))):
                raise LaunchError(
                    f'--resume: param_scheduler differs from the checkpoint, and {followers[0]} follows a metric, so '
                    f'that it cannot be stepped; restore it or, {START_FROM_WEIGHTS}'
                )
            runner.logger.warning(
                f'--resume takes schedule and options of the optimizer from the checkpoint: {followers[0]} follows a '
                'metric, so that the schedule of the config cannot be stepped'
            )
            return
        _step_to(runner.train_loop, schedulers, checkpoint['meta'])
        states = {key: [scheduler.state_dict() for scheduler in group] for key, group in groups.items()}
        checkpoint['param_schedulers'] = states if isinstance(runner.param_schedulers, dict) else states['']
        if 'optimizer' in checkpoint:
            _follow_options(runner, checkpoint['optimizer'])
        elif hasattr(runner, 'strategy'):  # it requires one
            checkpoint['optimizer'] = runner.optim_wrapper.state_dict()


def _by_optimizer(groups: Any) -> dict[str, list]:
    """Return the schedulers of each optimizer, or their states; a single optimizer has no name."""
    return groups if isinstance(groups, dict) else {'': groups or []}


def _settings(states: dict[str, list[dict]]) -> dict[str, list[list[str]]]:
    return {key: [sorted(state) for state in group] for key, group in states.items()}


def _step_to(loop: Any, schedulers: list, meta: dict) -> None:
    """Step the schedulers from their beginning to where the training resumes, in the order of a training."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # no optimizer steps in between
        for by_epoch, count in _progress(loop, meta):
            for _ in range(count):
                for scheduler in schedulers:
                    if scheduler.by_epoch == by_epoch:
                        scheduler.step()


def _progress(loop: Any, meta: dict) -> Iterator[tuple[bool, int]]:
    """Yield (whether a scheduler by epoch steps, how often) from the start of a training to where it resumes."""
    if isinstance(loop, IterBasedTrainLoop):
        yield False, meta['iter']
        return
    length = len(loop.dataloader)
    for _ in range(meta['epoch']):
        yield False, length
        yield True, 1
    interrupted = meta.get('mmkron') or {}
    if interrupted.get('epoch_length') == length:
        yield False, interrupted.get('position', 0)


def _follow_options(runner: Any, saved: Any) -> None:
    """Put the options of the optimizers into their saved states, and warn of those that change."""
    wrappers = getattr(runner.optim_wrapper, 'optim_wrappers', {'': runner.optim_wrapper})
    changed = set().union(
        *(_take_options(wrapper, saved.get(key) if key else saved) for key, wrapper in wrappers.items())
    )
    if changed:
        rates = ', '.join(f'{wrapper.get_lr()["lr"][0]:.6g}' for wrapper in wrappers.values())
        runner.logger.warning(
            f'--resume takes from the config, not from the checkpoint: {", ".join(sorted(changed))}; the learning rate '
            f'is {rates}'
        )


def _take_options(wrapper: Any, saved: Any) -> set[str]:
    """Put the options of an optimizer into a saved state, and return the names of those that change."""
    groups = wrapper.optimizer.param_groups
    others = [other for other in (saved or {}).get('param_groups', ()) if isinstance(other, dict)]
    if len(others) != len(groups):
        raise LaunchError(
            f'--resume: optim_wrapper.optimizer has {len(groups)} parameter groups, and the checkpoint {len(others)}; '
            f'{START_FROM_WEIGHTS}'
        )
    changed = set()
    for group, other in [*zip(groups, others), (wrapper.base_param_settings, saved.get('base_param_settings'))]:
        if not group or not other:
            continue
        if {*group} - {*other} and {*other} - {*group}:
            raise LaunchError(
                f'--resume: optim_wrapper.optimizer is {type(wrapper.optimizer).__name__}, and the checkpoint is of '
                f'another one, with {", ".join(sorted({*other} - {*group}))}; {START_FROM_WEIGHTS}'
            )
        options = {name: value for name, value in group.items() if name != 'params'}
        changed |= {name for name, value in options.items() if other.get(name, value) != value}
        other.update(options)
    return changed - {'initial_lr'}
