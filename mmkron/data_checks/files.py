"""Find the files and folders that a config names and that do not exist."""

from __future__ import annotations

import os.path as osp
from collections.abc import Iterator

from mmkron.data_checks.common import Data, Problem, find_dicts, type_name
from mmkron.datasets import CIFAR10DVS

_DEMO = 'To try the project without any download: python tools/train.py configs/kanet/kanet-kv_digits.py'
# They download missing files unless they are told not to; on a cluster nobody expects a launcher to do so.
_DOWNLOADED = ('MNIST', 'FashionMNIST', 'CIFAR10', 'CIFAR100')
_IDX_FILES = tuple(f'{split}-{kind}-ubyte' for split in ('train', 't10k') for kind in ('images-idx3', 'labels-idx1'))
_PARTS = dict(zip(_DOWNLOADED, (_IDX_FILES, _IDX_FILES, ('cifar-10-batches-py',), ('cifar-100-python',))))
_PARTS |= dict(CIFAR10DVS=CIFAR10DVS.METAINFO['classes'], DVS128Gesture=('trials_to_train.txt', 'trials_to_test.txt'))
_SOURCES = {
    'FashionMNIST': "Debian's package dataset-fashion-mnist has the files as .gz: gunzip them into the folder above.",
    'BaseSegDataset': 'To make the Fashion scenes: python tools/dataset_converters/fashion_scenes.py',
}


def check_files(data: Data) -> Iterator[Problem]:
    """Yield the local paths that a dataset and the ``CocoMetric`` of its split need and that do not exist."""
    for path, source, root_key in _named_paths(data):
        if path and not osp.exists(path):
            yield _missing(path, source, root_key, data)
    evaluator = f'{data.split}_evaluator'
    for key, metric in find_dicts(data.cfg.get(evaluator), evaluator):
        path = Data(data.cfg, data.splits).path(metric.get('ann_file'))
        if type_name(metric) == 'CocoMetric' and path and not osp.exists(path):
            yield _missing(path, f'{key}.ann_file = {metric["ann_file"]!r}', f'{key}.ann_file', data)


def _named_paths(data: Data) -> list[tuple[str, str, str]]:
    """Return (path, where the config names it, key that moves the whole dataset) for a dataset."""
    name, root, prefix = type_name(data.config), data.config.get('data_root'), data.config.get('data_prefix') or ''
    parts = prefix.items() if isinstance(prefix, dict) else ()
    prefixes = {'': prefix} if isinstance(prefix, str) else {f'.{part}': value for part, value in parts}
    named = {'ann_file': data.config.get('ann_file'), **{f'data_prefix{part}': prefixes[part] for part in prefixes}}
    named = {f'{data.key}.{field}': value for field, value in named.items() if value}
    root_key = f'{data.key}.data_root' if root or not named else next(iter(named))
    if name in _DOWNLOADED and data.config.get('download'):
        return []
    if root and data.path('') and not osp.exists(data.path('')):
        return [(data.path(''), f'{root_key} = {root!r}', root_key)]
    if name == 'ImageNet' and data.config.get('split') and not prefix:
        named[f'{data.key}.split'] = data.config['split']
    paths = [*named.items()] + [(root_key, osp.join(prefixes.get('', ''), part)) for part in _PARTS.get(name, ())]
    return [(data.path(value), f'{key} = {value!r}', root_key) for key, value in paths]


def _missing(path: str, source: str, root_key: str, data: Data) -> Problem:
    name, kind = type_name(data.config), data.kind
    is_ours = getattr(kind, '__module__', '').startswith('mmkron.')
    layout = f'help(mmkron.datasets.{name}) in Python' if is_ours else 'see docs/train_on_your_data.md'
    hints = [f'{name} reads this layout: {layout}'] if kind else []
    hints += [_SOURCES[name]] if name in _SOURCES else []
    if name in _DOWNLOADED:
        hints.append(f'To let the host download it: --cfg-options {data.key}.download=True')
    return Problem(osp.abspath(path), 'it does not exist', source, (*hints, _DEMO), f'{root_key}=PATH')
