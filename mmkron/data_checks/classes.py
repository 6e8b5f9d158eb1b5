"""Find the classes of a dataset without building it."""

from __future__ import annotations

import os.path as osp
from typing import Any

from mmengine.fileio import list_from_file

from mmkron.data_checks.common import type_name
from mmkron.data_checks.paths import data_path
from mmkron.datasets.event_folder import EventFolder, folder_classes


def lists_by(kind: type | None, module: str) -> bool:
    """Return whether a type lists its samples with the method of this module of a host library."""
    return getattr(getattr(kind, 'load_data_list', None), '__module__', '') == module


def build_unread(dataset: dict, kind: type | None, module: str) -> Any:
    """Build a dataset that has read no samples yet, but knows its paths and suffixes as the host does.

    Returns None unless :func:`lists_by` is true, and for arguments that the type refuses: the host reports those.
    """
    given = {name: value for name, value in dataset.items() if name != 'type'}
    try:
        return kind(**{**given, 'pipeline': [], 'lazy_init': True}) if lists_by(kind, module) else None
    except Exception:
        return None


def metainfo(dataset: dict, kind: type | None) -> dict:
    """Return what a dataset will know about its classes: ``METAINFO`` of its type, changed by its config."""
    given = dataset.get('metainfo')
    own = dict(given) if isinstance(given, dict) else {}
    if dataset.get('classes') is not None:
        own.setdefault('classes', dataset['classes'])
    # The things and stuff of METAINFO do not apply to other classes.
    return own if 'classes' in own else {**(getattr(kind, 'METAINFO', None) or {}), **own}


def class_names(dataset: dict, kind: type | None) -> tuple[tuple[str, ...] | None, str]:
    """Return the class names of a dataset, None if it has none, and where they are set.

    Without names in its config, the classes of an :class:`EventFolder` are its folders.
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
