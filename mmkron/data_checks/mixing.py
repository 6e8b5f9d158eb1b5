"""Checks that a config does not mix frames of events with what mixes images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mmkron.data_checks.common import Problem, type_name, used_datasets

HOSTS = 'ClsDataPreprocessor'  # MMPretrain's, and its default
SAFE = ('Mixup',)  # adds whole samples, whatever their dimensions
_HINT = """\
H and W are cut by
  data_preprocessor=dict(type='mmkron.EventDataPreprocessor', num_classes=...)"""


def check_mixing(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield the batch augments that cut frames of events in the wrong dimensions.

    MMPretrain's ``CutMix`` and ``ResizeMix`` would cut polarities and rows of (B, T, C, H, W). Frames are known by the
    transform ``PackEventInputs``; ``EventDataPreprocessor`` makes every batch augment right.
    """
    model = cfg.get('model')
    model = model if isinstance(model, dict) else {}
    preprocessor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    if not isinstance(preprocessor, dict) or type_name({'type': HOSTS, **preprocessor}) != HOSTS:
        return
    trained_on = used_datasets(cfg, ('train',)) if 'train' in splits else ()
    if any(_holds(dataset.get('pipeline'), 'PackEventInputs') for _, dataset in trained_on):
        for key, name in _augments(cfg, model, preprocessor):
            if name not in SAFE:
                text = f"{name} cuts polarities and rows of frames (B, T, C, H, W) with MMPretrain's {HOSTS}"
                yield Problem(key, text, hint=_HINT)


def _augments(cfg: Any, model: dict, preprocessor: dict) -> Iterator[tuple[str, str]]:
    """Yield (key, type) of the batch augments."""
    places = {'model.train_cfg': model.get('train_cfg'), 'batch_augments': preprocessor.get('batch_augments')}
    for hook in cfg.get('custom_hooks') or ():
        if isinstance(hook, dict) and type_name(hook) == 'SwitchRecipeHook':
            for i, recipe in enumerate(hook.get('schedule') or ()):
                places[f'SwitchRecipeHook.schedule.{i}'] = recipe.get('batch_augments')
    for key, place in places.items():
        augments = place.get('augments') if isinstance(place, dict) else None
        for augment in augments if isinstance(augments, (list, tuple)) else [augments]:
            if isinstance(augment, dict):
                yield key, type_name(augment)


def _holds(steps: Any, name: str) -> bool:
    """Whether a pipeline has a step of a type, also nested in others."""
    if isinstance(steps, dict):
        return type_name(steps) == name or _holds(list(steps.values()), name)
    return isinstance(steps, (list, tuple)) and any(_holds(step, name) for step in steps)
