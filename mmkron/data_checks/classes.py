"""The classes of a dataset, found without building it."""

import os.path as osp
from typing import Any, Optional

from mmkron.data_checks.common import type_name
from mmkron.datasets.event_folder import EventFolder, folder_classes


def dataset_type(dataset: dict, scope: Optional[str]) -> Optional[type]:
    """Return the class that a dataset's config names, or None if it cannot be imported."""
    from mmengine.registry import DATASETS

    kind = dataset.get('type')
    if not isinstance(kind, str):
        return kind if isinstance(kind, type) else None
    try:
        found = DATASETS.get(kind if '.' in kind else f'{scope or "mmengine"}.{kind}')
    except (ImportError, AssertionError, KeyError, RuntimeError):  # reported when the host is checked or builds it
        return None
    return found if isinstance(found, type) else None


def read_from(kind: Optional[type], module: str) -> bool:
    """Return whether a dataset class lists its samples with the method of this module of a host library."""
    return getattr(getattr(kind, 'load_data_list', None), '__module__', '') == module


def dataset_path(dataset: dict, value: Optional[str]) -> str:
    """Return a path that a dataset's config gives relative to its ``data_root``; '' if it is remote."""
    path = osp.join(dataset.get('data_root') or '', value or '')
    return '' if '://' in path else osp.expanduser(path)


def metainfo(dataset: dict, kind: Optional[type]) -> dict:
    """Return what a dataset will know of its classes: ``METAINFO`` of its type, changed by its config."""
    given = dataset.get('metainfo')
    own = dict(given) if isinstance(given, dict) else {}
    if dataset.get('classes') is not None:
        own.setdefault('classes', dataset['classes'])
    if 'classes' in own:  # things and stuff of METAINFO are those of other classes then
        return own
    return {**(getattr(kind, 'METAINFO', None) or {}), **own}


def class_names(dataset: dict, kind: Optional[type]) -> tuple[Optional[tuple[str, ...]], str]:
    """Return the names that ``metainfo`` gives the classes, None if it gives none, and where they are set.

    Those of an :class:`EventFolder` are its folders otherwise.

    Raises:
        ValueError: The classes are neither names nor a file of names.
    """
    own = metainfo(dataset, None)
    source = 'metainfo.classes' if 'classes' in own else f'METAINFO of {type_name(dataset)}'
    classes: Any = metainfo(dataset, kind).get('classes')
    if isinstance(classes, str):
        path = osp.expanduser(classes)
        if '://' in path:
            return None, source
        if osp.isfile(path):
            with open(path, encoding='utf-8') as file:
                return tuple(line.rstrip('\n\r') for line in file), source
    if classes is None and isinstance(kind, type) and issubclass(kind, EventFolder):
        folder = dataset_path(dataset, (dataset.get('data_prefix') or '') if dataset.get('ann_file') else 'train')
        return (folder_classes(folder), f'class folders in {folder}') if osp.isdir(folder) else (None, source)
    if classes is not None and not isinstance(classes, (list, tuple)):
        raise ValueError(f'metainfo.classes is {classes!r}, neither names nor a file of names')
    return None if classes is None else tuple(classes), source
