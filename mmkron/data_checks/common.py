"""What the checks share: how they report a problem, and how they walk a config."""

import os
import os.path as osp
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

# Types of what a dataset's config says, beside None; what else it says is checked by the host.
_TYPES = {
    'type': (str, type),
    'data_root': (str,),
    'split': (str,),
    'ann_file': (str,),
    'data_prefix': (str, dict),
    'img_suffix': (str,),
    'seg_map_suffix': (str,),
    'extensions': (list, tuple),
    'metainfo': (dict,),
}
_LOCAL_RANKS = ('LOCAL_RANK', 'SLURM_LOCALID', 'OMPI_COMM_WORLD_LOCAL_RANK')


class Problem(NamedTuple):
    """Something about the data that does not fit the config."""

    where: str  # absolute path of the file or folder, or a dotted key of the config; problems are grouped by it
    text: str  # what does not fit, with both sides; may have several lines
    source: str = ''  # where the config names it, such as "train_dataloader.dataset.ann_file = 'a.json'"
    hint: str = ''  # what to do about it; equal hints are printed once
    warning: bool = False  # suspicious only: it is printed and the run goes on


def describe(problems: Sequence[Problem], title: str) -> str:
    """Return one message with all problems, grouped by where they are, and their hints at the end."""
    lines = [title]
    for where in dict.fromkeys(item.where for item in problems):
        items = [item for item in problems if item.where == where]
        sources = ', '.join(dict.fromkeys(item.source for item in items if item.source))
        lines += ['', f'  {where}' + (f'  <- {sources}' if sources else '')]
        for text in dict.fromkeys(item.text for item in items):
            lines.append('    - ' + text.replace('\n', '\n      '))
    for hint in dict.fromkeys(item.hint for item in problems if item.hint):
        lines += ['', hint]
    return '\n'.join(lines)


def print_warning(text: str) -> None:
    """Print a text once per machine: of several processes only the first one speaks."""
    if all(os.environ.get(name, '0') == '0' for name in _LOCAL_RANKS):
        print(text, flush=True)


def first_three(items: Iterable) -> str:
    """Return the first three different items, and '...' if there are more."""
    items = list(dict.fromkeys(items))
    return ', '.join(map(str, items[:3])) + (', ...' if len(items) > 3 else '')


def part_of(part: Sequence, whole: int, what: str, shown: Optional[Iterable] = None) -> str:
    """Return how many of the whole ``part`` is, what is wrong with it, and the first three of it."""
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


def find_metrics(cfg: Any, split: str, kind: str) -> Iterator[tuple[str, dict]]:
    """Yield (dotted key, config) of the metrics of a type in the evaluator of a split."""
    key = f'{split}_evaluator'
    return ((name, metric) for name, metric in find_dicts(cfg.get(key), key) if type_name(metric) == kind)


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


def used_datasets(cfg: Any, splits: Sequence[str]) -> Iterator[tuple[str, dict]]:
    """Yield (dotted key, config) of the datasets that the loaders of the splits read."""
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        if isinstance(loader, dict):
            yield from leaf_datasets(loader.get('dataset'), f'{split}_dataloader.dataset')


def check_fields(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield the fields of datasets that are of a type which none of the other checks, and no host, can read."""
    for key, dataset in used_datasets(cfg, splits):
        for field, types in _TYPES.items():
            value = dataset.get(field)
            if not isinstance(value, (*types, type(None))):
                names = ' or '.join(each.__name__ for each in types)
                yield Problem(f'{key}.{field}', f'expected {names}, got {value!r}')
            elif isinstance(value, (dict, list, tuple)) and field != 'metainfo':
                parts = value.values() if isinstance(value, dict) else value
                if not all(isinstance(part, str) or part is None and field == 'data_prefix' for part in parts):
                    yield Problem(f'{key}.{field}', f'expected strings, got {value!r}')
        metainfo = dataset.get('metainfo')
        names = (metainfo if isinstance(metainfo, dict) else {}).get('classes', dataset.get('classes'))
        is_file = isinstance(names, str) and ('://' in names or osp.isfile(osp.expanduser(names)))
        if not isinstance(names, (list, tuple, type(None))) and not is_file:
            text = f"expected names, as in ('cat',), or a file of them, got {names!r}"
            yield Problem(f'{key}.metainfo.classes', text)
