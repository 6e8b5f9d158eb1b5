"""Walk the datasets, metrics and heads of a config, and describe the problems that the checks find there."""

from __future__ import annotations

import os
import os.path as osp
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

# Types of the dataset fields that the checks read; each may also be None.
_TYPES = {
    **dict.fromkeys(('data_root', 'split', 'ann_file', 'img_suffix', 'seg_map_suffix'), (str,)),
    **dict(type=(str, type), data_prefix=(str, dict), extensions=(list, tuple), metainfo=(dict,)),
}
_LOCAL_RANKS = ('LOCAL_RANK', 'SLURM_LOCALID', 'OMPI_COMM_WORLD_LOCAL_RANK')
# Parts and types that count something else than the classes of the dataset: objects, kinds of stuff, persons, edges.
_OTHER_PARTS = ('rpn_head', 'semantic_head', 'reid')
UNCOUNTED = ('MOTChallengeDataset', 'SideAdapterCLIPHead', 'STDCHead')


class Problem(NamedTuple):
    """A mismatch between a config and its data."""

    where: str  # absolute path or dotted key; problems are grouped by it
    text: str
    source: str = ''  # where the config names it, such as "train_dataloader.dataset.ann_file = 'a.json'"
    hint: str = ''  # how to fix it; equal hints are printed once
    warning: bool = False  # only suspicious: the run continues


def describe(problems: Sequence[Problem], title: str) -> str:
    """Return one message with all problems, grouped by their place, and their hints at the end."""
    lines = [title]
    for where in dict.fromkeys(item.where for item in problems):
        items = [item for item in problems if item.where == where]
        sources = ', '.join(dict.fromkeys(item.source for item in items if item.source))
        lines += ['', f'  {where}' + (f'  <- {sources}' if sources else '')]
        lines += ['    - ' + text.replace('\n', '\n      ') for text in dict.fromkeys(item.text for item in items)]
    for hint in dict.fromkeys(item.hint for item in problems if item.hint):
        lines += ['', hint]
    return '\n'.join(lines)


def print_warning(text: str) -> None:
    """Print a text once per machine, from its first process."""
    if all(os.environ.get(name, '0') == '0' for name in _LOCAL_RANKS):
        print(text, flush=True)


def first_three(items: Iterable) -> str:
    """Return the first three different items, and '...' if there are more."""
    items = list(dict.fromkeys(items))
    return ', '.join(map(str, items[:3])) + (', ...' if len(items) > 3 else '')


def part_of(part: Sequence, whole: int, what: str, shown: Iterable | None = None) -> str:
    """Return how many items of the whole are in ``part``, what is wrong with them, and the first three."""
    return f'{len(part)} of the {whole} {what}: {first_three(part if shown is None else shown)}'


def type_name(cfg: dict) -> str:
    """Return the ``type`` of a config dict without its scope: ``'mmpretrain.ImageNet'`` -> ``'ImageNet'``."""
    kind = cfg.get('type', '')
    return (kind if isinstance(kind, str) else getattr(kind, '__name__', str(kind))).rsplit('.', 1)[-1]


def find_dicts(node: Any, key: str = '') -> Iterator[tuple[str, dict]]:
    """Yield (dotted key, dict) of each dict in nested dicts and lists, from the outside to the inside."""
    if isinstance(node, dict):
        yield key, node
    children = node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, (list, tuple)) else ())
    for name, child in children:
        yield from find_dicts(child, f'{key}.{name}')


def find_metrics(cfg: Any, splits: Sequence[str], kind: str) -> Iterator[tuple[str, dict]]:
    """Yield (dotted key, config) of the metrics of a type in the evaluators of the splits that have a loader."""
    for key in (f'{split}_evaluator' for split in splits if cfg.get(f'{split}_dataloader')):
        yield from (found for found in find_dicts(cfg.get(key), key) if type_name(found[1]) == kind)


def find_heads(node: Any, key: str, inside: bool = False) -> Iterator[tuple[str, dict]]:
    """Yield (dotted key, config) of the parts of a model that state a number of classes."""
    name = key.rpartition('.')[2]
    inside = inside or name.endswith(('head', 'augments')) or name == 'data_preprocessor'
    children = enumerate(node) if isinstance(node, (list, tuple)) else ()
    if isinstance(node, dict) and name not in _OTHER_PARTS and type_name(node) not in UNCOUNTED:
        if node.get('class_agnostic') or node.get('language_model') or 'contrastive_cfg' in node:
            return
        if inside and any(isinstance(node.get(field), int) for field in ('num_classes', 'num_things_classes')):
            yield key, node
        children = node.items()
    for child, item in children:
        yield from find_heads(item, f'{key}.{child}', inside)


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


def used_datasets(cfg: Any, splits: Sequence[str]) -> Iterator[tuple[str, dict, type | None]]:
    """Yield (dotted key, config, type or None) of the datasets that the loaders of the splits read."""
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        dataset = loader.get('dataset') if isinstance(loader, dict) else None
        for key, leaf in leaf_datasets(dataset, f'{split}_dataloader.dataset'):
            yield key, leaf, dataset_type(leaf, cfg.get('default_scope'))


def dataset_type(dataset: dict, scope: str | None) -> type | None:
    """Return the class that a dataset's config names, or None if it cannot be imported."""
    from mmengine.registry import DATASETS

    kind = dataset.get('type')
    if isinstance(kind, str):
        try:
            kind = DATASETS.get(kind if '.' in kind else f'{scope or "mmengine"}.{kind}')
        except (ImportError, AssertionError, KeyError, RuntimeError):  # reported when the host is checked or builds it
            return None
    return kind if isinstance(kind, type) else None


def check_fields(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield the dataset fields of a type that neither the other checks nor the hosts can read."""
    for key, dataset, _ in used_datasets(cfg, splits):
        for field, types in _TYPES.items():
            value = dataset.get(field)
            parts = {'extensions': value, 'data_prefix': value.values() if isinstance(value, dict) else None}.get(field)
            part_types = (str, type(None)) if field == 'data_prefix' else str
            if not isinstance(value, (*types, type(None))):
                names = ' or '.join(each.__name__ for each in types)
                yield Problem(f'{key}.{field}', f'expected {names}, got {value!r}')
            elif not all(isinstance(part, part_types) for part in parts or ()):
                yield Problem(f'{key}.{field}', f'expected strings, got {value!r}')
        metainfo = dataset.get('metainfo')
        names = (metainfo if isinstance(metainfo, dict) else {}).get('classes', dataset.get('classes'))
        is_file = isinstance(names, str) and ('://' in names or osp.isfile(osp.expanduser(names)))
        if not isinstance(names, (list, tuple, type(None))) and not is_file:
            yield Problem(f'{key}.metainfo.classes', f'expected a list of names or a file of them, got {names!r}')
