"""Check settings of a training that lead to silent faults, whatever the data is."""

from __future__ import annotations

from collections.abc import Iterator

from mmkron.data_checks.common import Data, Problem, find_dicts, type_name

# The least value of each key: MMEngine takes any, and a training of -1 epochs would end at once with exit code 0.
_LEAST = dict(max_epochs=1, max_iters=1, val_begin=0, val_interval=1)
_PREPROCESSOR = 'ClsDataPreprocessor'  # MMPretrain's default
_HINT = "To cut H and W, set data_preprocessor=dict(type='mmkron.EventDataPreprocessor', num_classes=...)."


def check_schedule(data: Data) -> Iterator[Problem]:
    """Yield the numbers of ``train_cfg`` that are not whole or too small to train or to validate."""
    given = data.cfg.get('train_cfg') if 'train' in data.splits else None
    for name, least in _LEAST.items() if isinstance(given, dict) else ():
        value = given.get(name, least)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or value % 1 != 0 or value < least:
            yield Problem(f'train_cfg.{name}', f'must be a whole number of at least {least}, got {value!r}')


def check_mixing(data: Data) -> Iterator[Problem]:
    """Yield the batch augments that would cut event frames in the wrong dimensions, as MMPretrain's ``CutMix`` does."""
    steps = find_dicts(data.config.get('pipeline'))
    if data.split != 'train' or all(type_name(step) != 'PackEventInputs' for _, step in steps):
        return
    model = data.cfg.get('model') or {}
    preprocessor = model.get('data_preprocessor') or data.cfg.get('data_preprocessor') or {}
    if not isinstance(preprocessor, dict) or type_name({'type': _PREPROCESSOR, **preprocessor}) != _PREPROCESSOR:
        return
    hooks = find_dicts(data.cfg.get('custom_hooks'), 'custom_hooks')
    places = [(key, hook) for key, hook in hooks if type_name(hook) == 'SwitchRecipeHook']
    for place, node in [('model.train_cfg', model.get('train_cfg')), ('data_preprocessor', preprocessor), *places]:
        for key, augment in find_dicts(node, place):
            name = type_name(augment)
            if '.augments' in key and name not in ('', 'Mixup'):  # Mixup adds whole samples, whatever their dimensions
                text = f"{name} cuts polarities and rows of frames (B, T, C, H, W) with MMPretrain's {_PREPROCESSOR}"
                yield Problem(key, text, hints=(_HINT,))
