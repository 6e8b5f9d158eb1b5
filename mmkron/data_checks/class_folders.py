"""Class folders and lists of labels of classification data: labels must mean the same in each split.

MMPretrain numbers the class folders of each split on its own, in the order of their names, hidden folders included.
"""

import os
import os.path as osp
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Optional

from mmkron.data_checks.classes import build_unread, class_names, dataset_type
from mmkron.data_checks.common import Problem, first_three, part_of, used_datasets

_HINT = 'MMPretrain numbers the folders of each split in the order of their names, so that labels would shift.'


class Labels(NamedTuple):
    """Where a classification dataset has its labels from, and which they are."""

    path: str  # the folder of the class folders, or the list
    source: str  # where the config names it
    by_folder: dict  # folder -> its label; of a list, the folders whose images share a label
    counts: Counter = Counter()  # of a list: how often each label occurs
    problem: str = ''  # why the list cannot be read
    is_list: bool = False
    hidden: tuple = ()  # names of folders that start with a dot
    extensions: tuple = ()  # of the images in the folders


def read_labels(key: str, dataset: dict, kind: Optional[type]) -> Optional[Labels]:
    """Return the labels of a dataset that reads class folders or a list as MMPretrain's CustomDataset does."""
    built = build_unread(dataset, kind, 'mmpretrain.datasets.custom')
    if built is None or not built.with_label:
        return None
    fields = ('ann_file', 'split', 'type') if built.ann_file else ('data_prefix', 'split', 'data_root', 'type')
    field = next(name for name in fields if dataset.get(name))
    path = built.ann_file or built.img_prefix
    where = osp.abspath(path), f'{key}.{field} = {dataset[field]!r}'
    if built.ann_file and osp.isfile(path):
        return Labels(*where, *_read_list(path, os.stat(path).st_mtime_ns), is_list=True)
    if built.ann_file or not osp.isdir(path):
        return None
    folders = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    shown = [name for name in folders if not name.startswith('.')]
    hidden = tuple(name for name in folders if name.startswith('.'))
    by_folder = {name: label for label, name in enumerate(shown)}
    return Labels(*where, by_folder, hidden=hidden, extensions=tuple(built.extensions))


@lru_cache(maxsize=8)
def _read_list(path: str, _: int) -> tuple[dict, Counter, str]:
    counts: Counter = Counter()
    by_folder: dict = {}
    text = ''
    try:
        with open(path, encoding='utf-8') as file:
            for line in file:
                name, _, text = line.strip().rpartition(' ')
                counts[int(text)] += 1
                folder = osp.basename(osp.dirname(name))
                if folder:
                    by_folder.setdefault(folder, set()).add(int(text))
    except UnicodeDecodeError as error:
        return {}, Counter(), f'it is not text in UTF-8: {error}'
    except ValueError:
        return {}, Counter(), f'a line ends in {text!r} instead of a label'
    return {name: labels.pop() for name, labels in by_folder.items() if len(labels) == 1}, counts, ''


def check_class_folders(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield faults of class folders and lists of labels, and differences from the training set."""
    train = None
    for key, dataset in used_datasets(cfg, tuple(dict.fromkeys(('train', *splits)))):
        kind = dataset_type(dataset, cfg.get('default_scope'))
        labels = read_labels(key, dataset, kind)
        if labels is None:
            continue
        found = [] if train is None else [*_differences(train, labels)]
        if key.partition('_')[0] in splits:
            classes, source = class_names(dataset, kind)
            if labels.is_list:
                found += _list_problems(labels, None if source.startswith('METAINFO') else classes, train is None)
            else:
                found += _folder_problems(labels)
                found += _name_problems(list(labels.by_folder), classes, source)
        for text, warning in found:
            yield Problem(labels.path, text, labels.source, '' if labels.is_list else _HINT, warning)
        if train is None and key.startswith('train'):
            train = labels


def _folder_problems(labels: Labels) -> Iterator[tuple[str, bool]]:
    if labels.hidden:
        yield f'{len(labels.hidden)} hidden folders would become classes: {first_three(labels.hidden)}', False
    empty = [name for name in labels.by_folder if not _has_image(osp.join(labels.path, name), labels.extensions)]
    if empty:
        yield part_of(empty, len(labels.by_folder), 'class folders have no image'), True


def _has_image(folder: str, extensions: tuple) -> bool:
    files = (name for _, _, names in os.walk(folder, followlinks=True) for name in names)
    return any(name.lower().endswith(extensions) and not name.startswith('.') for name in files)


def _name_problems(folders: list, classes: Optional[tuple], source: str) -> Iterator[tuple[str, bool]]:
    """Compare class folders with the names that the dataset shows for its labels."""
    if classes is None:
        return
    if len(classes) != len(folders):
        # A subset of a published dataset has the right labels and only shows the wrong names.
        subset = source.startswith('METAINFO')
        yield f'there are {len(folders)} class folders, but {len(classes)} classes in {source}', subset
    elif set(classes) == set(folders) and list(classes) != folders:
        text = f'but the labels are numbered in the order of the folders: {first_three(folders)}'
        yield f'{source} has the classes in the order {first_three(classes)},\n{text}', False


def _list_problems(labels: Labels, classes: Optional[tuple], trained_on: bool) -> Iterator[tuple[str, bool]]:
    if labels.problem:
        yield labels.problem, False
        return
    most = max(labels.counts, default=-1) if classes is None else len(classes) - 1
    wrong = sorted(label for label in labels.counts.elements() if not 0 <= label <= most)
    if wrong:
        yield part_of(wrong, sum(labels.counts.values()), f'labels are not in 0 to {most}'), False
    unused = [label for label in range(most + 1) if label not in labels.counts]
    if unused and trained_on:
        shown = [f'{label} ({classes[label]})' if classes else label for label in unused]
        yield part_of(unused, most + 1, 'classes have no image', shown), True


def _differences(train: Labels, other: Labels) -> Iterator[tuple[str, bool]]:
    """Compare the labels of a dataset with the labels of the training set."""
    lacking = [name for name in train.by_folder if name not in other.by_folder]
    added = [name for name in other.by_folder if name not in train.by_folder]
    if (lacking or added) and not train.is_list and not other.is_list:
        parts = [f'lacks the class folders {first_three(lacking)}'] * bool(lacking)
        parts += [f'has others: {first_three(added)}'] * bool(added)
        yield f'compared with {train.path}, it {" and ".join(parts)}', False
        return
    moved = [name for name, label in other.by_folder.items() if train.by_folder.get(name, label) != label]
    if moved:
        shown = [f'{name} is {train.by_folder[name]} there and {other.by_folder[name]} here' for name in moved]
        # Folders that share a label are not classes but, for example, patients.
        shared = any(len(set(each.by_folder.values())) < len(each.by_folder) for each in (train, other))
        yield f'{len(moved)} folders have another label than in {train.path}: {first_three(shown)}', shared
    unseen = sorted(label for label in other.counts.elements() if label not in train.counts)
    if unseen and train.is_list and not train.problem:
        yield f'{len(unseen)} images have labels that do not occur in {train.path}: {first_three(unseen)}', True
