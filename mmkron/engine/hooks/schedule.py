"""What a resumed training takes from its config instead of the checkpoint: the schedule and the optimizer's options."""

from __future__ import annotations

import warnings
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop
from torch import Tensor

from mmkron.engine.errors import LaunchError

START_FROM_WEIGHTS = 'to start from its weights set load_from=PATH and resume=False in the config'
# What changes in a scheduler while it runs. All else in its state is a setting.
_PROGRESS = ('last_step', '_global_step', '_last_value', 'best', 'num_bad_epochs', 'cooldown_counter')


class FollowConfigHook(Hook):
    """Let a resumed training follow the schedule and the optimizer's options in its config.

    MMEngine overwrites both with those of the checkpoint, so a longer schedule would have no effect. If the config's
    schedule is another one, it is stepped to the place where the training resumes, and the learning rates are those of
    a training that had this schedule from the start. In an epoch-based training that place is an epoch, whatever the
    number of batches per epoch was.

    MMEngine also runs the text of the config that a checkpoint keeps. It is removed from what was read.

    Raises:
        LaunchError: The checkpoint is of another optimizer, or a schedule that depends on a metric has changed.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        (checkpoint.get('meta') or {}).pop('config', None)
        if not runner._resume:
            return
        own, wrappers = _states(runner), getattr(runner.optim_wrapper, 'optim_wrappers', {'': runner.optim_wrapper})
        changed = set()
        if _settings(own) != _settings(checkpoint.get('param_schedulers')) or 'optimizer' not in checkpoint:
            _step_to(runner, checkpoint['meta'])
            checkpoint['param_schedulers'] = _states(runner)
            own, changed = None, {'schedule'}
        if 'optimizer' not in checkpoint and hasattr(runner, 'strategy'):  # which asks for one
            checkpoint['optimizer'] = runner.optim_wrapper.state_dict()
        saved = checkpoint.get('optimizer', {})
        for key, wrapper in wrappers.items() if 'optimizer' in checkpoint else ():
            scheduled = own.get(key, ()) if isinstance(own, dict) else own or ()
            changed |= _take_options(wrapper, saved.get(key) if key else saved, {s['param_name'] for s in scheduled})
        if changed:
            place = ''
            if 'schedule' in changed:
                rates = ', '.join(f'{wrapper.get_lr()["lr"][0]:.6g}' for wrapper in wrappers.values())
                place = f'; the schedule is at a learning rate of {rates}'
            runner.logger.warning(f'--resume: {", ".join(sorted(changed))} of the config, not of the checkpoint{place}')


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
    """Step the schedulers, which are at their beginning, to where the training resumes, in the order of a training."""
    groups = runner.param_schedulers or []
    schedulers = sum(groups.values(), []) if isinstance(groups, dict) else groups
    for scheduler in schedulers:
        if getattr(scheduler, 'need_val_args', False):
            raise LaunchError(
                f'--resume: param_scheduler is not that of the checkpoint, and {type(scheduler).__name__} follows a '
                'metric, so where it would be now is unknown; set it as it was, with the same end, which is max_epochs '
                f'by default; or, {START_FROM_WEIGHTS}'
            )
    epochs, length, rest = 0, 0, meta['iter']
    if not isinstance(runner.train_loop, IterBasedTrainLoop):
        epochs, length = meta['epoch'], len(runner.train_loop.dataloader)
        interrupted = meta.get('mmkron') or {}
        rest = interrupted.get('position', 0) if interrupted.get('epoch_length') == length else 0

    def step(by_epoch: bool, count: int) -> None:
        chosen = [scheduler for scheduler in schedulers if scheduler.by_epoch == by_epoch]
        for _ in range(count):
            for scheduler in chosen:
                scheduler.step()

    runner.logger.info(f'--resume: the schedule is stepped to iteration {meta["iter"]}', extra=dict(on_console=True))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that no optimizer steps in between
        for _ in range(epochs):
            step(False, length)
            step(True, 1)
        step(False, rest)


def _take_options(wrapper: Any, saved: Any, scheduled: set[str]) -> set[str]:
    """Put the options of an optimizer into a saved state, except ``scheduled`` ones, and return those that differed."""
    groups, others = wrapper.optimizer.param_groups, saved.get('param_groups') if isinstance(saved, dict) else None
    if not isinstance(others, list) or not all(isinstance(other, dict) for other in others):
        raise LaunchError('--resume: the checkpoint has no state of such an optimizer')
    sizes, other_sizes = ([len(group.get('params', ())) for group in found] for found in (groups, others))
    sharded = any(isinstance(name, str) for other in others for name in other.get('params', ()))  # by FSDP
    if len(sizes) != len(other_sizes) or (sizes != other_sizes and not sharded):
        raise LaunchError(
            f'--resume: the parameter groups of the optimizer have {sizes} entries, those of the checkpoint '
            f'{other_sizes}; {START_FROM_WEIGHTS}'
        )
    _add_dimensions(groups, others, saved.get('state') or {})
    kept = {'params', *scheduled} | ({'betas'} if 'momentum' in scheduled else set())  # by which Adam has a momentum
    changed = set()
    for group, other in [*zip(groups, others), (wrapper.base_param_settings, saved.get('base_param_settings'))]:
        if not group or not other:
            continue
        names = {name for name in group if name not in kept}
        lacking, unknown = (
            {n for n in found if n[:8] != 'initial_'} for found in (names - {*other}, {*other} - {*group})
        )
        if lacking and unknown:
            raise LaunchError(
                f'--resume: optim_wrapper.optimizer is {type(wrapper.optimizer).__name__}, and that of the checkpoint '
                f'has {", ".join(sorted(unknown))} instead of {", ".join(sorted(lacking))}; {START_FROM_WEIGHTS}'
            )
        changed |= {name for name in names - lacking if name[:8] != 'initial_' and other[name] != group[name]}
        other.update({name: group[name] for name in names})
    return changed


def _add_dimensions(groups: Any, others: Any, state: dict) -> None:
    """Let the state of parameters that earlier versions had without dimensions, time constants, have those of today."""
    for group, other in zip(groups, others):
        for parameter, key in zip(group['params'], other.get('params', ())):
            for name, value in (state.get(key) or {}).items():
                if isinstance(value, Tensor) and not value.dim() and parameter.shape == (1,) and name != 'step':
                    state[key][name] = value.reshape(1)
