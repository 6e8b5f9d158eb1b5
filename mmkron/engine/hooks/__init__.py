"""Hooks that only this project has: ``type='mmkron.<Name>'`` in a config."""

from mmkron.engine.hooks.deprecated import CheckpointHook, ResumeHook
from mmkron.engine.hooks.deterministic import DeterministicResumeHook
from mmkron.engine.hooks.preemption import PreemptionHook

__all__ = ['CheckpointHook', 'DeterministicResumeHook', 'PreemptionHook', 'ResumeHook']
