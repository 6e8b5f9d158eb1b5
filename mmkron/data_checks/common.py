"""What the checks share: how they report a problem, and how they walk a config."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
