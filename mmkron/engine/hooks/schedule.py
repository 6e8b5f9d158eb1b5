"""Let a resumed training follow the schedule and the options of the optimizer in its config."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop
from torch import Tensor

from mmkron.engine.errors import LaunchError

START_FROM_WEIGHTS = 'to start from its weights set load_from=PATH and resume=False in the config'
# The progress in the state of a scheduler; all else is a setting.
_PROGRESS = ('last_step', '_global_step', '_last_value', 'best', 'num_bad_epochs', 'cooldown_counter')


class FollowConfigHook(Hook):
    """Hook that lets a resumed training follow the schedule and the optimizer's options in its config.

    MMEngine overwrites both with those in the checkpoint, so a longer schedule would have no effect. If the schedule
    has changed, it is stepped to the place where the training resumes, and the learning rates are those of a training
    that had this schedule from the start. In an epoch-based training that place is an epoch, whatever the number of
    batches per epoch was.

    MMEngine also runs the text of the config that a checkpoint holds; the hook removes it.

    Raises:
        LaunchError: The checkpoint is of another optimizer, or a schedule that depends on a metric has changed.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Replace the schedule and the options in a checkpoint with the schedule and the options of the config."""
        (checkpoint.get('meta') or {}).pop('config', None)
        if not runner._resume:
            return
        changed = set()
        own, wrappers = _states(runner), getattr(runner.optim_wrapper, 'optim_wrappers', {'': runner.optim_wrapper})
        if _settings(own) != _settings(checkpoint.get('param_schedulers')) or 'optimizer' not in checkpoint:
            changed.add('schedule')
            _step_to(runner, checkpoint['meta'])
            checkpoint['param_schedulers'] = _states(runner)
            own = None
        if 'optimizer' in checkpoint:
            for key, wrapper in wrappers.items():
                states = own.get(key, ()) if isinstance(own, dict) else own or ()
                saved = checkpoint['optimizer'].get(key) if key else checkpoint['optimizer']
                changed |= _take_options(wrapper, saved, {state['param_name'] for state in states})
        elif hasattr(runner, 'strategy'):  # it requires one
            checkpoint['optimizer'] = runner.optim_wrapper.state_dict()
        if changed:
            rates = ', '.join(f'{wrapper.get_lr()["lr"][0]:.6g}' for wrapper in wrappers.values())
            place = f'; the learning rate is {rates}' if 'schedule' in changed else ''
            names = ', '.join(sorted(changed))
            runner.logger.warning(f'--resume takes from the config, not from the checkpoint: {names}{place}')


def _states(runner: Any) -> Any:
    """Return the state of each scheduler; with several optimizers a dict of lists."""
    schedulers = runner.param_schedulers or []
    if isinstance(schedulers, dict):
        return {key: [scheduler.state_dict() for scheduler in group] for key, group in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


def _settings(states: Any) -> Any:
    if isinstance(states, dict):
        return {key: _settings(group) for key, group in states.items()}
    return [{key: value for key, value in state.items() if key not in _PROGRESS} for state in states or ()]


def _step_to(runner: Any, meta: dict) -> None:
    """Step the schedulers from their beginning to where the training resumes, in the order of a training."""
    groups = runner.param_schedulers or []
    schedulers = sum(groups.values(), []) if isinstance(groups, dict) else groups
    for scheduler in schedulers:
        if getattr(scheduler, 'need_val_args', False):
            raise LaunchError(
                f'--resume: param_scheduler differs from the checkpoint, and {type(scheduler).__name__} follows a '
                f'metric, so it cannot be stepped; restore it, with the same end (default: max_epochs), or, '
                f'{START_FROM_WEIGHTS}'
            )
    runner.logger.info(f'--resume: the schedule is stepped to iteration {meta["iter"]}', extra=dict(on_console=True))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # no optimizer steps in between
        for by_epoch, count in _progress(runner.train_loop, meta):
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


def _take_options(wrapper: Any, saved: Any, scheduled: set[str]) -> set[str]:
    """Put the options of an optimizer into a saved state, except ``scheduled`` ones, and return the changed ones."""
    groups, others = wrapper.optimizer.param_groups, saved.get('param_groups') if isinstance(saved, dict) else None
    _check_groups(groups, others)
    _add_dimensions(groups, others, saved.get('state') or {})
    kept = {'params', *scheduled} | ({'betas'} if 'momentum' in scheduled else set())  # Adam's momentum is in its betas
    changed = set()
    for group, other in [*zip(groups, others), (wrapper.base_param_settings, saved.get('base_param_settings'))]:
        if not group or not other:
            continue
        names = {name for name in group if name not in kept}
        missing = {name for name in names - {*other} if not name.startswith('initial_')}
        unknown = {name for name in {*other} - {*group} if not name.startswith('initial_')}
        if missing and unknown:
            raise LaunchError(
                f'--resume: optim_wrapper.optimizer is {type(wrapper.optimizer).__name__}, and the checkpoint is of '
                f'another one, with {", ".join(sorted(unknown))}; {START_FROM_WEIGHTS}'
            )
        changed |= {n for n in names - missing if not n.startswith('initial_') and other[n] != group[n]}
        other.update({name: group[name] for name in names})
    return changed


def _check_groups(groups: list[dict], others: Any) -> None:
    """Raise LaunchError unless a checkpoint has the parameter groups of an optimizer."""
    if not isinstance(others, list) or not all(isinstance(other, dict) for other in others):
        raise LaunchError('--resume: the checkpoint has no state of such an optimizer')
    sizes, saved = ([len(group.get('params', ())) for group in found] for found in (groups, others))
    sharded = any(isinstance(name, str) for other in others for name in other.get('params', ()))  # by FSDP
    if len(sizes) != len(saved) or (sizes != saved and not sharded):
        raise LaunchError(
            f'--resume: the parameter groups of the optimizer have {sizes} entries, in the checkpoint {saved}; '
            f'{START_FROM_WEIGHTS}'
        )


def _add_dimensions(groups: list[dict], others: list[dict], state: dict) -> None:
    """Reshape the state of time constants, which earlier versions saved without dimensions."""
    for group, other in zip(groups, others):
        for parameter, key in zip(group['params'], other.get('params', ())):
            for name, value in (state.get(key) or {}).items():
                if isinstance(value, Tensor) and not value.dim() and parameter.shape == (1,) and name != 'step':
                    state[key][name] = value.reshape(1)
