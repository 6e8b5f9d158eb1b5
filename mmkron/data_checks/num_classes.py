"""Compare the number of classes of each head of the model with the classes of the data."""

from __future__ import annotations

import os.path as osp
from collections.abc import Iterator
from typing import Any

from mmkron.data_checks.class_labels import class_folders, class_names, listed_labels
from mmkron.data_checks.common import Data, Problem, find_dicts, type_name

_HINT = 'Each head of the model, and its losses, need the number of classes of the data.'
# Parts and types that count something else than the classes of the dataset: objects, kinds of stuff, persons, edges.
_OTHER_PARTS = ('rpn_head', 'semantic_head', 'reid')
_UNCOUNTED = ('CocoPanopticDataset', 'MOTChallengeDataset', 'SideAdapterCLIPHead', 'STDCHead')


def find_heads(node: Any, key: str, inside: bool = False) -> Iterator[tuple[str, dict]]:
    """Yield (dotted key, config) of the parts of a model that state a number of classes."""
    name = key.rpartition('.')[2]
    inside = inside or name.endswith(('head', 'augments')) or name == 'data_preprocessor'
    children = enumerate(node) if isinstance(node, (list, tuple)) else ()
    if isinstance(node, dict) and name not in _OTHER_PARTS and type_name(node) not in _UNCOUNTED:
        if node.get('class_agnostic') or node.get('language_model') or 'contrastive_cfg' in node:
            return
        if inside and isinstance(node.get('num_classes'), int):
            yield key, node
        children = node.items()
    for child, item in children:
        yield from find_heads(item, f'{key}.{child}', inside)


def count_classes(data: Data) -> tuple[int, str, bool] | None:
    """Return the known number of classes of a dataset, where it comes from, and whether it is only the least number."""
    names, source = class_names(data)
    listed, folders = listed_labels(data), class_folders(data)
    if listed and (names is None or source.startswith('METAINFO')):  # may be a subset of METAINFO
        number = max(listed[1], default=-1) + 1
        return number, f'labels up to {number - 1} in {osp.abspath(listed[0])}', True
    if names is None and folders:
        return len(folders[1]), f'class folders in {osp.abspath(folders[0])}', False
    return None if names is None or type_name(data.config) in _UNCOUNTED else (len(names), source, False)


def check_num_classes(data: Data) -> Iterator[Problem]:
    """Yield the heads and losses whose number of classes differs from the data's."""
    found, model = count_classes(data), data.cfg.get('model')
    preprocessor = data.cfg.get('data_preprocessor') or {}
    parts = [part for _, part in find_dicts([preprocessor, model])]
    heads = [*find_heads(model, 'model')]
    if any(part.get(field) for part in parts for field in ('augments', 'batch_augments', 'to_onehot')):
        heads += find_heads(preprocessor, 'data_preprocessor')  # only mixed batches use its number of classes
    for key, head in heads if found else ():
        stated, (number, source, is_least) = head['num_classes'], found
        binary = is_decode_head(key) and output_classes(head) == 2
        if number not in (stated, 2 if binary else None) and not (is_least and number < stated):
            text = f'it is {stated}, but the data has {number} classes: {source}'
            yield Problem(f'{key}.num_classes', text, data.key, (_HINT,), f'{key}.num_classes={number}')


def is_decode_head(key: str) -> bool:
    """Return whether a dotted key leads into a head of MMSegmentation."""
    return not {'decode_head', 'auxiliary_head'}.isdisjoint(key.split('.'))


def output_classes(head: dict) -> int:
    """Return how many classes a decode head distinguishes: one output counts as two."""
    return 2 if (head.get('out_channels') or head['num_classes']) == 1 else head['num_classes']


def check_losses(data: Data) -> Iterator[Problem]:
    """Yield the softmax losses of heads with one output, from which nothing is learned."""
    for key, head in find_heads(data.cfg.get('model'), 'model'):
        outputs = head.get('out_channels') or head['num_classes']
        for field, loss in _losses(key, head) if outputs == 1 else ():
            if type_name(loss) == 'CrossEntropyLoss' and not loss.get('use_sigmoid'):
                text = 'the head has one output, whose softmax is always 1 and whose loss is always 0;'
                yield Problem(f'{key}.{field}', f'{text}\nuse_sigmoid=True distinguishes two classes with one output')


def _losses(key: str, head: dict) -> Iterator[tuple[str, dict]]:
    """Yield (field, config) of the losses of a classifier or decode head, with the hosts' default softmax."""
    fields = ('loss', 'loss_decode')  # loss_cls of a detector adds one class, the background
    if not any(map(head.get, (*fields, 'loss_cls'))) and (is_decode_head(key) or type_name(head) == 'LinearClsHead'):
        head = {'loss_decode' if is_decode_head(key) else 'loss': dict(type='CrossEntropyLoss')}
    return (found for field in fields for found in find_dicts(head.get(field), field))
