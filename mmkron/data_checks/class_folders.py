"""Check that labels of classification data mean the same in each split, by class folders and lists of labels.

MMPretrain numbers the class folders of each split separately, in the order of their names, hidden folders included.
"""

from __future__ import annotations

import os
import os.path as osp
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from mmkron.data_checks.classes import build_unread, class_names
from mmkron.data_checks.common import Problem, first_three, part_of, used_datasets

_HINT = 'MMPretrain numbers the folders of each split in the order of their names, so that labels would shift.'


class Labels(NamedTuple):
    """The labels of a classification dataset."""

    path: str  # of the parent of the class folders, or of the list
    source: str  # where the config names it
    by_folder: dict  # folder -> its label; of a list, the folders whose images share a label
    counts: Counter = Counter()  # of a list: how often each label occurs
    problem: str = ''  # why the list cannot be read
    is_list: bool = False
    hidden: tuple = ()  # names of folders that start with a dot
    extensions: tuple = ()  # of the images in the folders


def read_labels(key: str, dataset: dict, kind: type | None) -> Labels | None:
    """Return the labels of a dataset that reads class folders or a list as MMPretrain's CustomDataset does."""
    built = build_unread(dataset, kind, 'mmpretrain.datasets.custom')
    if built is None or not built.with_label:
        return None
    path = built.ann_file or built.img_prefix
    fields = ('ann_file', 'split', 'type') if built.ann_file else ('data_prefix', 'split', 'data_root', 'type')
    field = next(name for name in fields if dataset.get(name))
    where = osp.abspath(path), f'{key}.{field} = {dataset[field]!r}'
    if built.ann_file:
        return Labels(*where, *_read_list(path, os.stat(path).st_mtime_ns), is_list=True) if osp.isfile(path) else None
    folders = sorted(entry.name for entry in os.scandir(path) if entry.is_dir()) if osp.isdir(path) else None
    if folders is None:
        return None
    hidden = tuple(name for name in folders if name.startswith('.'))
    by_folder = {name: label for label, name in enumerate(name for name in folders if name not in hidden)}
    return Labels(*where, by_folder, hidden=hidden, extensions=tuple(built.extensions))


@lru_cache(maxsize=8)
def _read_list(path: str, _: int) -> tuple[dict, Counter, str]:
    counts, by_folder, text = Counter(), {}, ''
    try:
        with open(path, encoding='utf-8') as file:
            for line in file:
                name, _, text = line.strip().rpartition(' ')
                counts[int(text)] += 1
                by_folder.setdefault(osp.basename(osp.dirname(name)), set()).add(int(text))
    except UnicodeDecodeError as error:
        return {}, Counter(), f'it is not text in UTF-8: {error}'
    except ValueError:
        return {}, Counter(), f'a line ends in {text!r} instead of a label'
    return {name: min(labels) for name, labels in by_folder.items() if name and len(labels) == 1}, counts, ''


def check_class_folders(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield faults of class folders and lists of labels, and differences from the training set."""
    train = None
    for key, dataset, kind in used_datasets(cfg, tuple(dict.fromkeys(('train', *splits)))):
        labels = read_labels(key, dataset, kind)
        if labels is None:
            continue
        found = [] if train is None else [*_differences(train, labels)]
        if key.partition('_')[0] in splits:
            check = _list_problems if labels.is_list else _folder_problems
            found += check(labels, *class_names(dataset, kind), train is None)
        for text, warning in found:
            yield Problem(labels.path, text, labels.source, '' if labels.is_list else _HINT, warning)
        if train is None and key.startswith('train'):
            train = labels


def _folder_problems(labels: Labels, classes: tuple | None, source: str, _: bool) -> Iterator[tuple[str, bool]]:
    folders = list(labels.by_folder)
    if labels.hidden:
        yield f'{len(labels.hidden)} hidden folders would become classes: {first_three(labels.hidden)}', False
    empty = [name for name in folders if not _has_image(osp.join(labels.path, name), labels.extensions)]
    if empty:
        yield part_of(empty, len(folders), 'class folders have no image'), True
    if classes is not None and len(classes) != len(folders):
        # A subset of a published dataset has the right labels and only shows the wrong names.
        subset = source.startswith('METAINFO')
        yield f'there are {len(folders)} class folders, but {len(classes)} classes in {source}', subset
    elif classes is not None and set(classes) == set(folders) and list(classes) != folders:
        text = f'but the labels are numbered in the order of the folders: {first_three(folders)}'
        yield f'{source} has the classes in the order {first_three(classes)},\n{text}', False


def _has_image(folder: str, extensions: tuple) -> bool:
    files = (name for _, _, names in os.walk(folder, followlinks=True) for name in names)
    return any(name.lower().endswith(extensions) and not name.startswith('.') for name in files)


def _list_problems(labels: Labels, classes: tuple | None, source: str, first: bool) -> Iterator[tuple[str, bool]]:
    classes = None if source.startswith('METAINFO') else classes
    most = max(labels.counts, default=-1) if classes is None else len(classes) - 1
    wrong = sorted(label for label in labels.counts.elements() if not 0 <= label <= most)
    unused = [label for label in range(most + 1) if label not in labels.counts]
    if labels.problem:
        yield labels.problem, False
        return
    if wrong:
        yield part_of(wrong, sum(labels.counts.values()), f'labels are not in 0 to {most}'), False
    if unused and first:
        shown = [f'{label} ({classes[label]})' if classes else label for label in unused]
        yield part_of(unused, most + 1, 'classes have no image', shown), True


def _differences(train: Labels, other: Labels) -> Iterator[tuple[str, bool]]:
    """Compare the labels of a dataset with the labels of the training set."""
    ours, theirs = other.by_folder, train.by_folder
    absent, added = [name for name in theirs if name not in ours], [name for name in ours if name not in theirs]
    if (absent or added) and not train.is_list and not other.is_list:
        parts = [f'has no class folders {first_three(absent)}'] * bool(absent)
        parts += [f'has others: {first_three(added)}'] * bool(added)
        yield f'compared with {train.path}, it {" and ".join(parts)}', False
        return
    moved = [name for name, label in ours.items() if theirs.get(name, label) != label]
    if moved:
        shown = [f'{name} is {theirs[name]} there and {ours[name]} here' for name in moved]
        # Folders that share a label are not classes but, for example, patients.
        shared = any(len(set(each.values())) < len(each) for each in (ours, theirs))
        yield f'{len(moved)} folders have another label than in {train.path}: {first_three(shown)}', shared
    unseen = sorted(label for label in other.counts.elements() if label not in train.counts)
    if unseen and train.is_list and not train.problem:
        yield f'{len(unseen)} images have labels that do not occur in {train.path}: {first_three(unseen)}', True
