"""Hooks under the names in configs of version 0.1."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from mmengine.hooks import CheckpointHook as MMEngineCheckpointHook

from mmkron.engine.hooks.deterministic import DeterministicResumeHook
from mmkron.engine.hooks.preemption import PreemptionHook
from mmkron.engine.storage import ATOMIC
from mmkron.registry import HOOKS
from mmkron.utils.checks import check_flags


def _warn(old: str, new: str) -> None:
    warnings.warn(f'mmkron.{old} is deprecated: use {new}', DeprecationWarning, stacklevel=3)


@HOOKS.register_module()
class ResumeHook(PreemptionHook):
    """Deprecated: :class:`PreemptionHook` and, with ``seed_iterations``, :class:`DeterministicResumeHook`."""

    def __init__(self, signals: Sequence[str] = ('SIGTERM',), seed_iterations: bool = True) -> None:
        _warn('ResumeHook', 'mmkron.PreemptionHook and, for exact resuming, mmkron.DeterministicResumeHook')
        super().__init__(signals)
        check_flags(seed_iterations=seed_iterations)
        self.seed_iterations = seed_iterations

    def before_run(self, runner: Any) -> None:
        added = any(isinstance(hook, DeterministicResumeHook) for hook in runner.hooks)
        if self.seed_iterations and not added:
            runner.register_hook(DeterministicResumeHook())


@HOOKS.register_module()
class CheckpointHook(MMEngineCheckpointHook):
    """Deprecated: MMEngine's hook with ``backend_args=dict(backend='atomic')``, its default here for local folders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _warn('CheckpointHook', "CheckpointHook(backend_args=dict(backend='atomic'))")
        if '://' not in str(kwargs.get('out_dir')) and kwargs.get('file_client_args') is None:
            kwargs['backend_args'] = kwargs.get('backend_args') or dict(ATOMIC)
        super().__init__(*args, **kwargs)
