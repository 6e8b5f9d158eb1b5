"""Let a resumed training follow the schedule and the options of the optimizer in its config."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop

from mmkron.utils.errors import LaunchError

START_FROM_WEIGHTS = 'to start from its weights set load_from=PATH and resume=False in the config'
# The progress in the state of a scheduler; all else is a setting.
_PROGRESS = ('last_step', '_global_step', '_last_value', 'best', 'num_bad_epochs', 'cooldown_counter')


class FollowConfigHook(Hook):
    """Hook that lets a resumed training follow the schedule and the optimizer's options in its config.

    MMEngine overwrites both with those in the checkpoint, so a longer schedule would have no effect. A changed schedule
    is stepped to the place where the training resumes, which is an epoch in an epoch-based training, whatever the
    number of batches per epoch was.

    MMEngine also runs the text of the config that a checkpoint holds; the hook removes it.

    Raises:
        LaunchError: The checkpoint is of another optimizer, or a schedule that follows a metric has changed.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Replace the schedule and the options in a checkpoint with the schedule and the options of the config."""
        (checkpoint.get('meta') or {}).pop('config', None)
        if not runner._resume:
            return
        groups, saved = map(_by_optimizer, (runner.param_schedulers, checkpoint.get('param_schedulers')))
        states = {key: [scheduler.state_dict() for scheduler in group] for key, group in groups.items()}
        scheduled = {key: {state['param_name'] for state in group} for key, group in states.items()}
        if _settings(states) != _settings(saved) or 'optimizer' not in checkpoint:
            _step_to(runner.train_loop, sum(groups.values(), []), checkpoint['meta'])
            states = {key: [scheduler.state_dict() for scheduler in group] for key, group in groups.items()}
            checkpoint['param_schedulers'] = states if isinstance(runner.param_schedulers, dict) else states['']
            scheduled = {}
        if 'optimizer' in checkpoint:
            _follow_options(runner, checkpoint['optimizer'], scheduled)
        elif hasattr(runner, 'strategy'):  # it requires one
            checkpoint['optimizer'] = runner.optim_wrapper.state_dict()


def _by_optimizer(groups: Any) -> dict[str, list]:
    """Return the schedulers of each optimizer, or their states; a single optimizer has no name."""
    return groups if isinstance(groups, dict) else {'': groups or []}


def _settings(states: dict[str, list[dict]]) -> dict[str, list[dict]]:
    return {
        key: [{k: v for k, v in state.items() if k not in _PROGRESS} for state in group]
        for key, group in states.items()
    }


def _step_to(loop: Any, schedulers: list, meta: dict) -> None:
    """Step the schedulers from their beginning to where the training resumes, in the order of a training."""
    followers = [type(scheduler).__name__ for scheduler in schedulers if getattr(scheduler, 'need_val_args', False)]
    if followers:
        raise LaunchError(
            f'--resume: param_scheduler differs from the checkpoint, and {followers[0]} follows a metric, so it cannot '
            f'be stepped; restore it, with the same end (default: max_epochs), or, {START_FROM_WEIGHTS}'
        )
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


def _follow_options(runner: Any, saved: Any, scheduled: dict[str, set[str]]) -> None:
    """Put the options of the optimizers, except scheduled ones, into their saved states; warn of those that change."""
    wrappers = getattr(runner.optim_wrapper, 'optim_wrappers', {'': runner.optim_wrapper})
    changed = set()
    for key, wrapper in wrappers.items():
        changed |= _take_options(wrapper, saved.get(key) if key else saved, scheduled.get(key, set()))
    if changed:
        runner.logger.warning(f'--resume takes from the config, not the checkpoint: {", ".join(sorted(changed))}')


def _take_options(wrapper: Any, saved: Any, scheduled: set[str]) -> set[str]:
    groups = wrapper.optimizer.param_groups
    others = [other for other in (saved or {}).get('param_groups', ()) if isinstance(other, dict)]
    if len(others) != len(groups):
        raise LaunchError(
            f'--resume: optim_wrapper.optimizer has {len(groups)} parameter groups, and the checkpoint {len(others)}; '
            f'{START_FROM_WEIGHTS}'
        )
    kept = {'params', *scheduled} | ({'betas'} if 'momentum' in scheduled else set())  # Adam's momentum is in its betas
    changed = set()
    for group, other in [*zip(groups, others), (wrapper.base_param_settings, saved.get('base_param_settings'))]:
        if not group or not other:
            continue
        missing, unknown = (
            {name for name in names if not name.startswith('initial_')}
            for names in ({*group} - {*other}, {*other} - {*group})
        )
        if missing and unknown:
            raise LaunchError(
                f'--resume: optim_wrapper.optimizer is {type(wrapper.optimizer).__name__}, and the checkpoint is of '
                f'another one, with {", ".join(sorted(unknown))}; {START_FROM_WEIGHTS}'
            )
        options = {name: value for name, value in group.items() if name not in kept}
        changed |= {name for name, value in options.items() if other.get(name, value) != value}
        other.update(options)
    return {name for name in changed if not name.startswith('initial_')}
