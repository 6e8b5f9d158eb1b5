"""Data that the host libraries cannot read, and transforms that they do not have.

The classes are imported when they are looked up: :mod:`mmkron.datasets.events` reads recordings with NumPy alone.
"""

from __future__ import annotations

from typing import Any


def _classes() -> dict[str, type]:
    from mmkron.registry import DATASETS, TRANSFORMS

    for registry in (DATASETS, TRANSFORMS):
        registry.import_from_location()
    return {**DATASETS.module_dict, **TRANSFORMS.module_dict}


def __getattr__(name: str) -> Any:
    if name == '__all__':
        return sorted(_classes())
    if name.startswith('_') or name not in _classes():
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return _classes()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_classes()})
