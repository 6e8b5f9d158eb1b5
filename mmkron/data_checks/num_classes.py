"""Compare the number of classes of each head of the model with the classes of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mmkron.data_checks.class_folders import read_labels
from mmkron.data_checks.classes import class_names, metainfo
from mmkron.data_checks.common import UNCOUNTED, Problem, find_dicts, find_heads, find_metrics, type_name, used_datasets

_HINT = """\
Each head of the model, and its losses, need the number of classes of the data: set KEY=NUMBER in the config or with
  --cfg-options KEY=NUMBER"""


class Classes(NamedTuple):
    """The number of classes of a dataset."""

    key: str  # of the dataset
    number: int
    source: str  # where the number comes from
    things: int | None  # classes with boxes; None if unknown
    exact: bool = True  # False: a list of labels has at least this number


def count_classes(cfg: Any, splits: Sequence[str]) -> Iterator[Classes]:
    """Yield the number of classes of each dataset that has a known one."""
    for key, dataset, kind in used_datasets(cfg, splits):
        names, source = class_names(dataset, kind)
        labels = read_labels(key, dataset, kind)
        if labels is not None and (names is None or source.startswith('METAINFO')):  # may be a subset of METAINFO
            number = max(labels.counts, default=-1) + 1 if labels.is_list else len(labels.by_folder)
            source = f'{f"labels up to {number - 1}" if labels.is_list else "class folders"} in {labels.path}'
            yield Classes(key, number, source, number, exact=names is None and not labels.is_list)
        elif names is not None and type_name(dataset) not in UNCOUNTED:
            things = metainfo(dataset, kind).get('thing_classes', None if 'Panoptic' in type_name(dataset) else names)
            yield Classes(key, len(names), source, None if things is None else len(things))


def check_num_classes(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield the heads and losses whose number of classes differs from the data's."""
    datasets = list(count_classes(cfg, splits))
    preprocessor = cfg.get('data_preprocessor') or {}
    parts = [part for _, part in find_dicts([preprocessor, cfg.get('model')])]
    mixes = any(part.get(field) for part in parts for field in ('augments', 'batch_augments', 'to_onehot'))
    for key, head in [*find_heads(cfg.get('model'), 'model'), *find_heads(preprocessor, 'data_preprocessor')]:
        panoptic = 'num_things_classes' in head
        fields = ('num_things_classes', 'num_stuff_classes') if panoptic else ('num_classes',)
        stated = sum(head[field] for field in fields if isinstance(head.get(field), int))
        binary = is_decode_head(key) and not panoptic and output_classes(head) == 2
        unused = key.endswith('data_preprocessor') and not mixes  # only mixed batches use its number of classes
        misfits: dict = {}
        for data in datasets:
            number = data.number if panoptic else data.things
            if number not in (stated, None, 2 if binary else None):
                misfits.setdefault((number, data.source, data.exact or number > stated), []).append(data.key)
        for (number, source, certain), keys in misfits.items():
            text = f'it is {stated}, but the data has {number} classes: {source} ({", ".join(keys)})'
            yield Problem(f'{key}.{fields[0]}', text, hint=_HINT, warning=unused or not certain)


def is_decode_head(key: str) -> bool:
    """Return whether a dotted key leads into a head of MMSegmentation."""
    return not {'decode_head', 'auxiliary_head'}.isdisjoint(key.split('.'))


def output_classes(head: dict) -> int:
    """Return how many classes a decode head distinguishes: one output counts as two."""
    return 2 if (head.get('out_channels') or head['num_classes']) == 1 else head['num_classes']


def check_heads(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield losses and accuracies that do not fit their head's number of classes."""
    tops = []  # (key, topk, number of classes)
    for key, head in find_heads(cfg.get('model'), 'model'):
        number = head.get('num_classes')
        if not isinstance(number, int):
            continue
        for field, loss in _losses(key, head):
            yield from _loss_problems(f'{key}.{field}', loss, head)
        tops += [(key, head.get('topk'), number)] if head.get('cal_acc') else []
        if key == 'model.head':
            metrics = find_metrics(cfg, [split for split in splits if split != 'train'], 'Accuracy')
            tops += [(name, metric.get('topk'), number) for name, metric in metrics]
    for key, topk, number in tops:
        most = max((k for k in (topk if isinstance(topk, (list, tuple)) else (topk,)) if isinstance(k, int)), default=1)
        if most > number:
            yield Problem(f'{key}.topk', f'{topk!r} requests the best {most} of {number} classes')


def _losses(key: str, head: dict) -> Iterator[tuple[str, dict]]:
    """Yield (field, config) of the classification losses of a head, with the hosts' default softmax."""
    fields = ('loss', 'loss_decode', 'loss_cls')
    if not any(map(head.get, fields)) and (is_decode_head(key) or type_name(head) == 'LinearClsHead'):
        head = {'loss_decode' if is_decode_head(key) else 'loss': dict(type='CrossEntropyLoss')}
    return (found for field in fields for found in find_dicts(head.get(field), field))


def _loss_problems(key: str, loss: dict, head: dict) -> Iterator[Problem]:
    number, background = head['num_classes'], 'loss_cls' in key.split('.')  # which adds one class
    softmax = type_name(loss) == 'CrossEntropyLoss' and not loss.get('use_sigmoid') and not background
    if softmax and (head.get('out_channels') or number) == 1:
        text = f'the head has one output (num_classes={number}), whose softmax is always 1 and whose loss is always 0;'
        yield Problem(key, f'{text}\nuse_sigmoid=True distinguishes two classes with one output')
    for field in ('class_weight', 'pos_weight'):
        weights = loss.get(field)
        if isinstance(weights, (list, tuple)) and len(weights) not in (number, number + background):
            yield Problem(f'{key}.{field}', f'it has {len(weights)} weights for {number} classes')
