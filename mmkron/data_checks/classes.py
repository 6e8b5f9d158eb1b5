"""The classes of a dataset, found without building it."""

import os.path as osp
from typing import Any, Optional

from mmengine.fileio import list_from_file

from mmkron.data_checks.common import type_name
from mmkron.data_checks.paths import data_path
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


def lists_by(kind: Optional[type], module: str) -> bool:
    """Return whether a type lists its samples with the method of this module of a host library."""
    return getattr(getattr(kind, 'load_data_list', None), '__module__', '') == module


def build_unread(dataset: dict, kind: Optional[type], module: str) -> Any:
    """Return a dataset that has read no samples yet, which knows its paths and suffixes as the host does.

    Returns None unless :func:`lists_by` is true, and for arguments that the type refuses: the host says it when it
    builds the dataset.
    """
    if not lists_by(kind, module):
        return None
    given = {name: value for name, value in dataset.items() if name != 'type'}
    try:
        return kind(**{**given, 'pipeline': [], 'lazy_init': True})
    except Exception:
        return None


def metainfo(dataset: dict, kind: Optional[type]) -> dict:
    """Return what a dataset will know of its classes: ``METAINFO`` of its type, changed by its config."""
    given = dataset.get('metainfo')
    own = dict(given) if isinstance(given, dict) else {}
    if dataset.get('classes') is not None:
        own.setdefault('classes', dataset['classes'])
    if 'classes' in own:  # then the things and stuff of METAINFO belong to other classes
        return own
    return {**(getattr(kind, 'METAINFO', None) or {}), **own}


def class_names(dataset: dict, kind: Optional[type]) -> tuple[Optional[tuple[str, ...]], str]:
    """Return the names that ``metainfo`` gives the classes, None if it gives none, and where they are set.

    Without them, the classes of :class:`EventFolder` are its folders.
    """
    source = 'metainfo.classes' if 'classes' in metainfo(dataset, None) else f'METAINFO of {type_name(dataset)}'
    classes: Any = metainfo(dataset, kind).get('classes')
    if isinstance(classes, str):  # check_fields has made sure that it is a file
        classes = None if '://' in classes else list_from_file(osp.expanduser(classes))
    if classes is None and isinstance(kind, type) and issubclass(kind, EventFolder):
        folder = data_path(dataset, dataset.get('data_prefix') if dataset.get('ann_file') else 'train')
        if osp.isdir(folder):
            return folder_classes(folder), f'class folders in {folder}'
    return None if classes is None else tuple(classes), source
