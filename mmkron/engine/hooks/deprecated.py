"""Hooks under the names that configs written before version 0.2 hold."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from mmengine.hooks import CheckpointHook as MMEngineCheckpointHook

from mmkron.engine.hooks.deterministic import DeterministicResumeHook
from mmkron.engine.hooks.preemption import ATOMIC, PreemptionHook
from mmkron.registry import HOOKS
from mmkron.utils.checks import check_flags


@HOOKS.register_module()
class ResumeHook(PreemptionHook):
    """Deprecated: :class:`PreemptionHook` and, with ``seed_iterations``, :class:`DeterministicResumeHook`.

    Args:
        signals: See :class:`PreemptionHook`.
        seed_iterations: Whether to add :class:`DeterministicResumeHook`.
    """

    def __init__(self, signals: Sequence[str] = ('SIGTERM',), seed_iterations: bool = True) -> None:
        warnings.warn(
            'mmkron.ResumeHook is deprecated: use mmkron.PreemptionHook and, for exact resuming, '
            'mmkron.DeterministicResumeHook',
            DeprecationWarning,
            stacklevel=2,
        )
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
        warnings.warn(
            "mmkron.CheckpointHook is deprecated: use CheckpointHook(backend_args=dict(backend='atomic'))",
            DeprecationWarning,
            stacklevel=2,
        )
        if '://' not in str(kwargs.get('out_dir')) and kwargs.get('file_client_args') is None:
            kwargs['backend_args'] = kwargs.get('backend_args') or dict(ATOMIC)
        super().__init__(*args, **kwargs)
