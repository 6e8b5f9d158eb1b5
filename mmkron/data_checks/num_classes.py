"""The number of classes: each head of the model against the classes of the data."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

from mmkron.data_checks.class_folders import read_labels
from mmkron.data_checks.classes import class_names, dataset_type, metainfo
from mmkron.data_checks.common import Problem, find_dicts, find_metrics, type_name, used_datasets

# Parts of a model that do not tell the classes of the dataset apart: whether there is an object, which kind of stuff
# is around it, which person it is.
_OTHER_CLASSES = ('rpn_head', 'semantic_head', 'reid')
# Track one class of many, take words for classes, or learn whether there is an edge.
_OTHER_TYPES = ('MOTChallengeDataset', 'SideAdapterCLIPHead', 'STDCHead')
_HINT = """\
Each head of the model, and its losses, need the number of classes of the data: set KEY=NUMBER in the config or with
  --cfg-options KEY=NUMBER"""


class Classes(NamedTuple):
    """How many classes a dataset has."""

    key: str  # of the dataset
    number: int
    source: str  # what the number is taken from
    things: Optional[int]  # of them those with boxes; None if that is not known
    exact: bool = True  # False: a list of labels has at least so many


def count_classes(cfg: Any, splits: Sequence[str]) -> Iterator[Classes]:
    """Yield the number of classes of each dataset of which it can be found."""
    for key, dataset in used_datasets(cfg, splits):
        kind = dataset_type(dataset, cfg.get('default_scope'))
        names, source = class_names(dataset, kind)
        labels = read_labels(key, dataset, kind)
        subset = names is None or source.startswith('METAINFO')  # maybe: of a published dataset, under its type
        if labels is not None and labels.is_list and subset:
            number = max(labels.counts, default=-1) + 1
            yield Classes(key, number, f'labels up to {number - 1} in {labels.path}', number, exact=False)
        elif labels is not None and subset:
            number = len(labels.by_folder)
            yield Classes(key, number, f'class folders in {labels.path}', number, exact=names is None)
        elif names is not None and type_name(dataset) not in _OTHER_TYPES:
            things = metainfo(dataset, kind).get('thing_classes', None if 'Panoptic' in type_name(dataset) else names)
            yield Classes(key, len(names), source, None if things is None else len(things))


def find_heads(node: Any, key: str, inside: bool = False) -> Iterator[tuple[str, dict]]:
    """Yield (dotted key, config) of the parts of a model that state a number of classes."""
    name = key.rpartition('.')[2]
    inside = inside or name.endswith(('head', 'augments')) or name == 'data_preprocessor'
    if isinstance(node, (list, tuple)):
        for i, item in enumerate(node):
            yield from find_heads(item, f'{key}.{i}', inside)
    if not isinstance(node, dict) or name in _OTHER_CLASSES or type_name(node) in _OTHER_TYPES:
        return
    if node.get('class_agnostic') or node.get('language_model') or 'contrastive_cfg' in node:
        return
    if inside and (isinstance(node.get('num_classes'), int) or isinstance(node.get('num_things_classes'), int)):
        yield key, node
    for child, item in node.items():
        yield from find_heads(item, f'{key}.{child}', inside)


def check_num_classes(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield the heads and losses whose number of classes is not the one of the data."""
    datasets = list(count_classes(cfg, splits))
    preprocessor = cfg.get('data_preprocessor') or {}
    parts = [part for _, part in find_dicts([preprocessor, cfg.get('model')])]
    mixes = any(part.get(field) for part in parts for field in ('augments', 'batch_augments', 'to_onehot'))
    for key, head in [*find_heads(cfg.get('model'), 'model'), *find_heads(preprocessor, 'data_preprocessor')]:
        field, stated = 'num_classes', head.get('num_classes')
        panoptic = 'num_things_classes' in head
        if panoptic:
            counts = (head['num_things_classes'], head.get('num_stuff_classes'))
            field, stated = 'num_things_classes', sum(count for count in counts if isinstance(count, int))
        binary = is_decode_head(key) and not panoptic and output_classes(head) == 2
        fitting = (stated, None, 2) if binary else (stated, None)
        misfits: dict = {}
        for data in datasets:
            number = data.number if panoptic else data.things
            if number not in fitting:
                misfits.setdefault((number, data.source, data.exact or number > stated), []).append(data.key)
        unused = key.endswith('data_preprocessor') and not mixes  # only mixed batches take its number of classes
        for (number, source, certain), keys in misfits.items():
            text = f'it is {stated}, but the data has {number} classes: {source} ({", ".join(keys)})'
            yield Problem(f'{key}.{field}', text, hint=_HINT, warning=unused or not certain)


def is_decode_head(key: str) -> bool:
    """Return whether a dotted key leads into a head of MMSegmentation."""
    return any(part in ('decode_head', 'auxiliary_head') for part in key.split('.'))


def output_classes(head: dict) -> int:
    """Return how many classes a decode head tells apart: one output does two."""
    return 2 if (head.get('out_channels') or head['num_classes']) == 1 else head['num_classes']


def check_heads(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield losses and accuracies that do not fit their head's number of classes."""
    outer = 0
    for key, head in find_heads(cfg.get('model'), 'model'):
        if not isinstance(head.get('num_classes'), int):
            continue
        outer = head['num_classes'] if key == 'model.head' else outer
        for field, loss in _losses(key, head):
            yield from _loss_problems(f'{key}.{field}', loss, head)
        if head.get('cal_acc'):
            yield from _topk_problems(f'{key}.topk', head.get('topk'), head['num_classes'])
    for split in (split for split in ('val', 'test') if split in splits and outer):
        for _, metric in find_metrics(cfg, split, 'Accuracy'):
            yield from _topk_problems(f'{split}_evaluator.topk', metric.get('topk'), outer)


def _topk_problems(key: str, topk: Any, number: int) -> Iterator[Problem]:
    most = max((k for k in (topk if isinstance(topk, (list, tuple)) else (topk,)) if isinstance(k, int)), default=1)
    if most > number:
        yield Problem(key, f'{topk!r} asks for the best {most} of {number} classes')


def _losses(key: str, head: dict) -> Iterator[tuple[str, dict]]:
    """Yield (field, config) of the classification losses of a head, with the softmax that is the hosts' default."""
    fields = ('loss', 'loss_decode', 'loss_cls')
    if not any(map(head.get, fields)) and (is_decode_head(key) or type_name(head) == 'LinearClsHead'):
        head = {'loss_decode' if is_decode_head(key) else 'loss': dict(type='CrossEntropyLoss')}
    return (found for field in fields for found in find_dicts(head.get(field), field))


def _loss_problems(key: str, loss: dict, head: dict) -> Iterator[Problem]:
    number, background = head['num_classes'], 'loss_cls' in key.split('.')  # which is one class more
    softmax = type_name(loss) == 'CrossEntropyLoss' and not loss.get('use_sigmoid') and not background
    if softmax and (head.get('out_channels') or number) == 1:
        text = f'the head has one output (num_classes={number}), whose softmax is 1 and whose loss is 0 for any input;'
        yield Problem(key, f'{text}\nuse_sigmoid=True tells two classes apart with one output')
    for field in ('class_weight', 'pos_weight'):
        weights = loss.get(field)
        if isinstance(weights, (list, tuple)) and len(weights) not in (number, number + background):
            yield Problem(f'{key}.{field}', f'it has {len(weights)} weights for {number} classes')
