"""Find the classes of a dataset, and check that labels of classification data mean the same in each split."""

from __future__ import annotations

import os
import os.path as osp
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from mmengine.fileio import list_from_file

from mmkron.data_checks.common import Data, Problem, first_three, part_of, type_name, used_data
from mmkron.datasets.event_folder import EventFolder, folder_classes

_HINT = 'MMPretrain numbers the folders of each split in the order of their names, so that labels would shift.'


def class_names(data: Data) -> tuple[tuple[str, ...] | None, str]:
    """Return the class names of a dataset, None if it has none, and where they are set."""
    classes, source = _given_names(data), 'metainfo.classes'
    if classes is None:
        classes = (getattr(data.kind, 'METAINFO', None) or {}).get('classes')
        source = f'METAINFO of {type_name(data.config)}'
    if not isinstance(classes, (list, tuple)):
        is_file = isinstance(classes, str) and osp.isfile(osp.expanduser(classes))
        classes = list_from_file(osp.expanduser(classes)) if is_file else None
    if classes is None and isinstance(data.kind, type) and issubclass(data.kind, EventFolder):
        folder = data.path(data.config.get('data_prefix') if data.config.get('ann_file') else 'train')
        if osp.isdir(folder):
            return folder_classes(folder), f'class folders in {folder}'
    return None if classes is None else tuple(classes), source


def _given_names(data: Data) -> Any:
    metainfo = data.config.get('metainfo')
    return (metainfo if isinstance(metainfo, dict) else {}).get('classes', data.config.get('classes'))


def check_class_names(data: Data) -> Iterator[Problem]:
    """Yield a string that is not a file of names: MMEngine would take each of its characters for a class."""
    names = _given_names(data)
    if isinstance(names, str) and '://' not in names and not osp.isfile(osp.expanduser(names)):
        yield Problem(f'{data.key}.metainfo.classes', f'expected a list of names or a file of them, got {names!r}')


def _build(data: Data) -> Any:
    built = data.build() if data.reader == ('mmpretrain', 'CustomDataset') else None
    return built if built is not None and built.with_label else None


def class_folders(data: Data) -> tuple[str, list[str]] | None:
    """Return the parent and the names of the class folders that MMPretrain's CustomDataset would number, if any."""
    built = _build(data)
    if built is None or built.ann_file or not osp.isdir(built.img_prefix):
        return None
    return built.img_prefix, sorted(entry.name for entry in os.scandir(built.img_prefix) if entry.is_dir())


def listed_labels(data: Data) -> tuple[str, Counter, str] | None:
    """Return the path of a list of labels, how often each label occurs, and why it cannot be read, if there is one."""
    built = _build(data)
    if built is None or not osp.isfile(built.ann_file):
        return None
    return built.ann_file, *_read_list(built.ann_file, os.stat(built.ann_file).st_mtime_ns)


@lru_cache(maxsize=8)
def _read_list(path: str, _: int) -> tuple[Counter, str]:
    try:
        labels = Counter(int(line.strip().rpartition(' ')[2]) for line in list_from_file(path))
        return labels, '' if labels else 'it is empty'
    except ValueError as error:
        return Counter(), f'it cannot be read: {error}'


def check_class_folders(data: Data) -> Iterator[Problem]:
    """Yield faults of class folders, such as differences from the training set, that shift the labels."""
    found = class_folders(data)
    for text in _folder_faults(data, *found) if found else ():
        yield Problem(osp.abspath(found[0]), text, data.source('data_prefix', 'split', 'data_root'), (_HINT,))


def _folder_faults(data: Data, root: str, folders: list[str]) -> Iterator[str]:
    trained = next(filter(None, map(class_folders, used_data(data.cfg, ('train',)))), (root, folders))
    hidden = [name for name in folders if name.startswith('.')]
    folders, expected = ([name for name in names if name[0] != '.'] for names in (folders, trained[1]))
    if hidden:
        yield f'hidden folders would become classes: {first_three(hidden)}'
    if folders != expected:
        absent = first_three(name for name in expected if name not in folders) or 'none'
        added = first_three(name for name in folders if name not in expected) or 'none'
        yield f'class folders that are only in {osp.abspath(trained[0])}: {absent}; only here: {added}'
    classes, source = class_names(data)
    if classes is not None and set(classes) == set(folders) and list(classes) != folders:
        text = f'but the labels are numbered in the order of the folders: {first_three(folders)}'
        yield f'{source} has the classes in the order {first_three(classes)},\n{text}'


def check_label_lists(data: Data) -> Iterator[Problem]:
    """Yield labels of a list that are not classes of the dataset."""
    found, (classes, source) = listed_labels(data), class_names(data)
    if found is None:
        return
    path, counts, fault = found
    # A published type may be read in part.
    most = max(counts, default=0) if classes is None or source.startswith('METAINFO') else len(classes) - 1
    wrong = sorted(label for label in counts.elements() if not 0 <= label <= most)
    if wrong or not counts:
        text = fault or part_of(wrong, counts.total(), f'labels are not in 0 to {most}')
        yield Problem(osp.abspath(path), text, data.source('ann_file', 'split'))
