"""Hooks that only this project can give: ``type='mmkron.<Name>'`` in a config."""

from mmkron.engine.hooks.checkpoint import CheckpointHook
from mmkron.engine.hooks.resume import ResumeHook

__all__ = ['CheckpointHook', 'ResumeHook']
