"""Walk a config and its data, and describe the problems that the checks find there."""

from __future__ import annotations

import os
import os.path as osp
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A mismatch between a config and its data."""

    where: str  # absolute path or dotted key; problems are grouped by it
    text: str
    source: str = ''  # where the config names it, such as "train_dataloader.dataset.ann_file = 'a.json'"
    hints: tuple[str, ...] = ()  # how to fix it; equal hints are printed once
    option: str = ''  # what --cfg-options can set instead, such as "train_dataloader.dataset.data_root=PATH"
    warning: bool = False  # only suspicious: the run continues


class Data(NamedTuple):
    """A dataset of a config, or, without a key, the config as a whole."""

    cfg: Any
    splits: Sequence[str]
    key: str = ''  # such as 'train_dataloader.dataset'
    config: dict = {}
    kind: type | None = None  # None if it cannot be imported

    @property
    def split(self) -> str:
        return self.key.partition('_')[0]

    @property
    def reader(self) -> tuple[str, str]:
        """Return the package and the name of the class whose method lists the samples."""
        mro = getattr(self.kind, '__mro__', ())
        owner = next((base for base in mro if 'load_data_list' in vars(base)), object)
        return owner.__module__.partition('.')[0], owner.__name__

    def path(self, value: str | None) -> str:
        """Return a path that is relative to the dataset's ``data_root``; '' if it is remote."""
        parts = self.config.get('data_root') or '', value or ''
        path = osp.join(*parts) if all(isinstance(part, str) for part in parts) else '://'  # the host refuses others
        return '' if '://' in path else osp.expanduser(path or '.')

    def source(self, *fields: str) -> str:
        """Return the first of some fields that the config sets, with its value."""
        field = next((name for name in fields if self.config.get(name)), 'type')
        return f'{self.key}.{field} = {self.config.get(field)!r}'

    def build(self) -> Any:
        """Build the dataset without reading its samples; return None for arguments that the host will refuse."""
        given = {name: value for name, value in self.config.items() if name != 'type'}
        try:
            return self.kind(**{**given, 'pipeline': [], 'lazy_init': True})
        except Exception:
            return None


def describe(problems: Sequence[Problem], title: str) -> str:
    """Return one message with all problems, grouped by their place, and their hints at the end."""
    lines = [title]
    for where in dict.fromkeys(item.where for item in problems):
        items = [item for item in problems if item.where == where]
        sources = ', '.join(dict.fromkeys(item.source for item in items if item.source))
        lines += ['', f'  {where}' + (f'  <- {sources}' if sources else '')]
        lines += ['    - ' + text.replace('\n', '\n      ') for text in dict.fromkeys(item.text for item in items)]
    for hint in dict.fromkeys(hint for item in problems for hint in item.hints):
        lines += ['', hint]
    options = ' '.join(dict.fromkeys(item.option for item in problems if item.option))
    lines += ['', f'To change it for one run: --cfg-options {options}'] if options else []
    return '\n'.join(lines)


def first_three(items: Iterable) -> str:
    """Return the first three different items, and '...' if there are more."""
    items = list(dict.fromkeys(map(str, items)))
    return ', '.join(items[:3]) + ', ...' * (len(items) > 3)


def part_of(part: Sequence, whole: int, what: str, shown: Iterable | None = None) -> str:
    """Return how many items of the whole are in ``part``, what is wrong with them, and the first three."""
    return f'{len(part)} of the {whole} {what}: {first_three(part if shown is None else shown)}'


def missing_files(paths: Iterable[str]) -> list[str]:
    """Return the paths that do not exist, by one listing of each folder: COCO has 118,287 files."""

    @cache
    def names(folder: str) -> set[str]:
        return set(os.listdir(folder)) if osp.isdir(folder) else set()

    return [path for path in paths if osp.basename(path) not in names(osp.dirname(path) or '.')]


def type_name(cfg: dict) -> str:
    """Return the ``type`` of a config dict without its scope: ``'mmpretrain.ImageNet'`` -> ``'ImageNet'``."""
    kind = cfg.get('type', '')
    return getattr(kind, '__name__', str(kind)).rsplit('.', 1)[-1]


def find_dicts(node: Any, key: str = '') -> Iterator[tuple[str, dict]]:
    """Yield (dotted key, dict) of each dict in nested dicts and lists, from the outside to the inside."""
    if isinstance(node, dict):
        yield key, node
    children = node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, (list, tuple)) else ())
    for name, child in children:
        yield from find_dicts(child, f'{key}.{name}')


def leaf_datasets(dataset: Any, key: str) -> Iterator[tuple[str, dict]]:
    """Yield (dotted key, config) of the datasets that read data, below any nesting of wrappers."""
    if not isinstance(dataset, dict):
        return
    if isinstance(dataset.get('dataset'), dict):
        yield from leaf_datasets(dataset['dataset'], f'{key}.dataset')
    elif isinstance(dataset.get('datasets'), (list, tuple)):
        for i, child in enumerate(dataset['datasets']):
            yield from leaf_datasets(child, f'{key}.datasets.{i}')
    else:
        yield key, dataset


def used_data(cfg: Any, splits: Sequence[str]) -> Iterator[Data]:
    """Yield the datasets that the loaders of the splits read."""
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        dataset = loader.get('dataset') if isinstance(loader, dict) else None
        for key, leaf in leaf_datasets(dataset, f'{split}_dataloader.dataset'):
            yield Data(cfg, splits, key, leaf, _dataset_type(leaf, cfg.get('default_scope')))


def _dataset_type(dataset: dict, scope: str | None) -> type | None:
    from mmengine.registry import DATASETS

    kind = dataset.get('type')
    if isinstance(kind, str):
        try:
            kind = DATASETS.get(kind if '.' in kind else f'{scope or "mmengine"}.{kind}')
        except (ImportError, AssertionError, KeyError, RuntimeError):  # reported when the host builds it
            return None
    return kind if isinstance(kind, type) else None
