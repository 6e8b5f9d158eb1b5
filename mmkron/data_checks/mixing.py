"""Check that a config does not mix event frames with augments made for images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mmkron.data_checks.common import Problem, find_dicts, type_name, used_datasets

_HOSTS = 'ClsDataPreprocessor'  # MMPretrain's default
_HINT = "To cut H and W, set data_preprocessor=dict(type='mmkron.EventDataPreprocessor', num_classes=...)."


def check_mixing(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield the batch augments that cut event frames in the wrong dimensions.

    MMPretrain's ``CutMix`` and ``ResizeMix`` would cut polarities and rows of (B, T, C, H, W). Frames are recognized by
    the transform ``PackEventInputs``; ``EventDataPreprocessor`` makes every batch augment right.
    """
    model = cfg.get('model') or {}
    preprocessor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    trained_on = used_datasets(cfg, ('train',)) if 'train' in splits else ()
    steps = (step for _, dataset, _ in trained_on for _, step in find_dicts(dataset.get('pipeline')))
    if not isinstance(preprocessor, dict) or type_name({'type': _HOSTS, **preprocessor}) != _HOSTS:
        return
    if all(type_name(step) != 'PackEventInputs' for step in steps):
        return
    hooks = find_dicts(cfg.get('custom_hooks'), 'custom_hooks')
    places = [(key, hook) for key, hook in hooks if type_name(hook) == 'SwitchRecipeHook']
    for place, node in [('model.train_cfg', model.get('train_cfg')), ('data_preprocessor', preprocessor), *places]:
        for key, augment in find_dicts(node, place):
            name = type_name(augment)
            if '.augments' in key and name not in ('', 'Mixup'):  # Mixup adds whole samples, whatever their dimensions
                text = f"{name} cuts polarities and rows of frames (B, T, C, H, W) with MMPretrain's {_HOSTS}"
                yield Problem(key, text, hint=_HINT)
