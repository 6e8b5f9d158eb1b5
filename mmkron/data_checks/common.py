"""What the checks share: how they report a problem, and how they walk a config."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
            first, *others = text.splitlines()
            lines += [f'    - {first}', *(f'      {line}' for line in others)]
    for hint in dict.fromkeys(item.hint for item in problems if item.hint):
        lines += ['', hint]
    return '\n'.join(lines)


def print_warning(text: str) -> None:
    """Print a text once per machine: of several processes only the first one speaks."""
    if all(os.environ.get(name, '0') == '0' for name in _LOCAL_RANKS):
        print(text, flush=True)


def first_three(items: Sequence) -> str:
    """Return the first three different items, and '...' if there are more."""
    items = list(dict.fromkeys(items))
    return ', '.join(map(str, items[:3])) + (', ...' if len(items) > 3 else '')


def type_name(cfg: dict) -> str:
    """Return the ``type`` of a config dict without its scope: ``'mmpretrain.ImageNet'`` -> ``'ImageNet'``."""
    kind = cfg.get('type', '')
    return (kind if isinstance(kind, str) else getattr(kind, '__name__', str(kind))).rsplit('.', 1)[-1]


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
        prefix, suffixes = dataset.get('data_prefix'), dataset.get('extensions')
        parts = [(f'data_prefix.{name}', part) for name, part in prefix.items()] if isinstance(prefix, dict) else []
        parts += [('extensions', part or 0) for part in suffixes] if isinstance(suffixes, (list, tuple)) else []
        for field, part in parts:
            if not isinstance(part, (str, type(None))):
                yield Problem(f'{key}.{field}', f'expected strings, got {dataset[field.partition(".")[0]]!r}')
