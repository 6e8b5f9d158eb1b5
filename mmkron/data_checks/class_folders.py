"""Class folders and lists of labels of classification data: labels must mean the same in each split.

MMPretrain numbers the class folders of each split on its own, in the order of their names, hidden folders included.
"""

import os
import os.path as osp
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Optional

from mmkron.data_checks.classes import class_names, dataset_path, dataset_type, read_from
from mmkron.data_checks.common import Problem, first_three, used_datasets

_EXTENSIONS = ('.jpg', '.jpeg', '.png', '.ppm', '.bmp', '.pgm', '.tif')
_HINT = 'MMPretrain numbers the folders of each split in the order of their names, so that labels would shift.'


class Labels(NamedTuple):
    """Where a classification dataset has its labels from, and which they are."""

    key: str  # of the dataset in the config
    path: str  # the folder of the class folders, or the list
    source: str  # where the config names it
    is_list: bool
    by_folder: dict  # folder -> its label; of a list, the folders whose images share a label
    counts: Counter  # of a list: how often each label occurs
    hidden: tuple = ()  # names of folders that start with a dot
    problem: str = ''  # why the list cannot be read


def read_labels(key: str, dataset: dict, kind: Optional[type]) -> Optional[Labels]:
    """Return the labels of a dataset that reads class folders or a list as MMPretrain's CustomDataset does."""
    split = dataset.get('split') or ''
    if not read_from(kind, 'mmpretrain.datasets.custom') or not dataset.get('with_label', split != 'test'):
        return None
    prefix = dataset.get('data_prefix') or split
    prefix = prefix.get('img_path') if isinstance(prefix, dict) else prefix
    listed, field = dataset.get('ann_file'), 'ann_file'
    if not listed and split and osp.isfile(dataset_path(dataset, f'meta/{split}.txt')):
        listed, field = f'meta/{split}.txt', 'split'
    path = dataset_path(dataset, listed or prefix)
    if not (osp.isfile(path) if listed else osp.isdir(path)):
        return None
    if listed:
        problem, by_folder, counts = _read_list(path, os.stat(path).st_mtime_ns)
        return Labels(key, osp.abspath(path), _source(key, dataset, field), True, by_folder, counts, (), problem)
    folders = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    hidden = tuple(name for name in folders if name.startswith('.'))
    names = [name for name in folders if name not in hidden]
    field = next((name for name in ('data_prefix', 'split') if dataset.get(name)), 'data_root')
    by_folder = {name: label for label, name in enumerate(names)}
    return Labels(key, osp.abspath(path), _source(key, dataset, field), False, by_folder, Counter(), hidden)


def _source(key: str, dataset: dict, field: str) -> str:
    return f'{key}.{field} = {dataset[field]!r}'


@lru_cache(maxsize=8)
def _read_list(path: str, _: int) -> tuple[str, dict, Counter]:
    entries: Counter = Counter()  # (folder, label) -> lines; ImageNet has a million lines
    try:
        with open(path, encoding='utf-8') as file:
            for line in file:
                name, _, text = line.strip().rpartition(' ')
                entries[osp.basename(osp.dirname(name)), text] += 1
    except ValueError as error:
        return f'it is not text in UTF-8: {error}', {}, Counter()
    counts: Counter = Counter()
    by_folder: dict = {}
    for (folder, text), number in entries.items():
        try:
            label = int(text)
        except ValueError:
            return f'a line ends in {text!r} instead of a label', {}, Counter()
        counts[label] += number
        by_folder.setdefault(folder, set()).add(label)
    by_folder.pop('', None)
    return '', {name: labels.pop() for name, labels in by_folder.items() if len(labels) == 1}, counts


def check_class_folders(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with the class folders or lists of labels, and where they differ from those of train."""
    train = None
    for key, dataset in used_datasets(cfg, tuple(dict.fromkeys(('train', *splits)))):
        kind = dataset_type(dataset, cfg.get('default_scope'))
        labels = read_labels(key, dataset, kind)
        if labels is None:
            continue
        found = [] if train is None else [*_differences(train, labels)]
        if key.partition('_')[0] in splits:
            try:
                classes, source = class_names(dataset, kind)
            except ValueError:  # reported with the number of classes
                classes, source = None, ''
            if labels.is_list:
                found += _list_problems(labels, None if source.startswith('METAINFO') else classes)
            else:
                found += _folder_problems(labels, tuple(dataset.get('extensions') or _EXTENSIONS))
                found += _name_problems(labels, classes, source)
        for text, warning in found:
            yield Problem(labels.path, text, labels.source, '' if labels.is_list else _HINT, warning)
        if train is None and key.startswith('train'):
            train = labels


def _folder_problems(labels: Labels, extensions: tuple) -> Iterator[tuple[str, bool]]:
    if labels.hidden:
        yield f'{len(labels.hidden)} hidden folders would become classes: {first_three(labels.hidden)}', False
    empty = [name for name in labels.by_folder if not _has_image(osp.join(labels.path, name), extensions)]
    if empty:
        yield f'{len(empty)} of the {len(labels.by_folder)} class folders have no image: {first_three(empty)}', True


def _has_image(folder: str, extensions: tuple) -> bool:
    return any(
        name.lower().endswith(extensions) and not name.startswith('.')
        for _, _, names in os.walk(folder, followlinks=True)
        for name in names
    )


def _name_problems(labels: Labels, classes: Optional[tuple], source: str) -> Iterator[tuple[str, bool]]:
    """Compare class folders with the names that the dataset shows for its labels."""
    folders = list(labels.by_folder)
    if classes is None:
        return
    if len(classes) != len(folders):
        yield f'there are {len(folders)} class folders, but {len(classes)} classes in {source}', False
    elif set(classes) == set(folders) and list(classes) != folders:
        yield (
            (
                f'{source} has the classes in the order {first_three(classes)},\n'
                f'but the labels are numbered in the order of the folders: {first_three(folders)}'
            ),
            False,
        )


def _list_problems(labels: Labels, classes: Optional[tuple]) -> Iterator[tuple[str, bool]]:
    if labels.problem:
        yield labels.problem, False
        return
    most = max(labels.counts, default=-1) if classes is None else len(classes) - 1
    wrong = sorted(label for label in labels.counts if not 0 <= label <= most)
    if wrong:
        number = sum(labels.counts[label] for label in wrong)
        yield (
            f'{number} of the {sum(labels.counts.values())} labels are not in 0 to {most}: {first_three(wrong)}',
            False,
        )
    unused = [label for label in range(most + 1) if label not in labels.counts]
    if unused and labels.key.startswith('train'):
        shown = [f'{label} ({classes[label]})' if classes else str(label) for label in unused]
        yield f'{len(unused)} of the {most + 1} classes have no image: {first_three(shown)}', True


def _differences(train: Labels, other: Labels) -> Iterator[tuple[str, bool]]:
    """Compare the labels of a dataset with those of the one that is trained on."""
    if not train.is_list and not other.is_list:
        lacking = [name for name in train.by_folder if name not in other.by_folder]
        added = [name for name in other.by_folder if name not in train.by_folder]
        if lacking or added:
            parts = [f'lacks the class folders {first_three(lacking)}'] * bool(lacking)
            parts += [f'has others: {first_three(added)}'] * bool(added)
            yield f'compared with {train.path}, it {" and ".join(parts)}', False
            return
    moved = [name for name, label in other.by_folder.items() if train.by_folder.get(name, label) != label]
    if moved:
        shown = [f'{name} is {train.by_folder[name]} there and {other.by_folder[name]} here' for name in moved]
        # Folders that share a label are not classes but, for example, patients.
        classes = all(len(set(each.by_folder.values())) == len(each.by_folder) for each in (train, other))
        yield f'{len(moved)} folders have another label than in {train.path}: {first_three(shown)}', not classes
    unseen = sorted(set(other.counts) - set(train.counts)) if train.is_list and not train.problem else []
    if unseen:
        number = sum(other.counts[label] for label in unseen)
        yield f'{number} images have labels that do not occur in {train.path}: {first_three(unseen)}', True
