"""Find the data of a config that is missing before anything is built, and describe it in one message."""

from __future__ import annotations

import os
import os.path as osp
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mmengine.fileio import list_from_file

from mmkron.data_checks.coco import coco_file, read_coco
from mmkron.data_checks.common import find_dicts, find_metrics, first_three, type_name, used_datasets
from mmkron.data_checks.paths import data_path, missing_files
from mmkron.datasets import CIFAR10DVS

DEMO_CONFIG = 'configs/kanet/kanet-kv_digits.py'
# Files that these types read below their root. The first four download missing files unless they are told not to; here
# it takes an explicit `download=True`, because on a cluster nobody expects a launcher to download.
_DOWNLOADED = ('MNIST', 'FashionMNIST', 'CIFAR10', 'CIFAR100')
_IDX_FILES = tuple(f'{split}-{kind}-ubyte' for split in ('train', 't10k') for kind in ('images-idx3', 'labels-idx1'))
_PARTS = dict(zip(_DOWNLOADED, (_IDX_FILES, _IDX_FILES, ('cifar-10-batches-py',), ('cifar-100-python',))))
_PARTS |= dict(CIFAR10DVS=CIFAR10DVS.METAINFO['classes'], DVS128Gesture=('trials_to_train.txt', 'trials_to_test.txt'))
# Segmentation data that a list of names selects; a missing file would stop the training later.
_LISTED_TYPES = ('PascalVOCDataset', 'BaseSegDataset')
# Descriptions of the folders that the datasets of each host read.
_LAYOUTS = {
    'mmpretrain': 'https://mmpretrain.readthedocs.io/en/latest/user_guides/dataset_prepare.html',
    'mmseg': 'https://mmsegmentation.readthedocs.io/en/latest/user_guides/2_dataset_prepare.html',
    'mmdet': 'https://mmdetection.readthedocs.io/en/latest/user_guides/dataset_prepare.html',
}
# How to get the data of shipped configs.
_SOURCES = {
    'FashionMNIST': """\
Debian's package dataset-fashion-mnist has the four files as .gz. In the folder above:
  for f in $(dpkg -L dataset-fashion-mnist | grep 'ubyte.gz$'); do gunzip -c "$f" > "$(basename "$f" .gz)"; done""",
    'BaseSegDataset': 'To make the Fashion scenes: python tools/dataset_converters/fashion_scenes.py',
}


class Missing(NamedTuple):
    """A path that the config names and that does not exist."""

    path: str  # absolute
    key: str  # where the config names it
    value: str  # as written there
    root_key: str  # the key that moves the whole dataset
    type_name: str  # dataset type without its scope
    layout: str = ''  # where the layout of the type is described
    note: str = ''


def find_missing(cfg: Any, splits: Sequence[str]) -> list[Missing]:
    """Return the local paths that the used datasets and metrics need and that do not exist.

    These are ``data_root``, ``ann_file`` and ``data_prefix``, the ``ann_file`` of a ``CocoMetric``, and the files that
    a list of names or a COCO annotation file names. Relative paths start from the working directory, as in the host
    libraries. Remote paths (``s3://``, ``http://``) are skipped.
    """
    found = []
    for key, dataset, kind in used_datasets(cfg, splits):
        host = getattr(kind, '__module__', '').partition('.')[0]
        layout = f'help(mmkron.datasets.{kind.__name__}) in Python' if host == 'mmkron' else _LAYOUTS.get(host, '')
        found += [item._replace(path=osp.abspath(item.path), layout=layout) for item in _missing_in(dataset, key)]
    for key, metric in find_metrics(cfg, splits, 'CocoMetric'):
        path, key = data_path({}, metric.get('ann_file')), f'{key}.ann_file'
        if _lost(path):
            found.append(Missing(osp.abspath(path), key, metric['ann_file'], key, 'CocoMetric'))
    return found


def _lost(path: str) -> bool:
    return bool(path) and not osp.exists(path)


def _missing_in(dataset: dict, key: str) -> list[Missing]:
    name, root, prefix = type_name(dataset), dataset.get('data_root'), dataset.get('data_prefix') or ''
    prefixes = {'': prefix} if isinstance(prefix, str) else {f'.{part}': value for part, value in prefix.items()}
    named = {'ann_file': dataset.get('ann_file'), **{f'data_prefix{part}': prefixes[part] for part in prefixes}}
    named = {field: value for field, value in named.items() if value}
    root_key = f'{key}.{"data_root" if root or not named else next(iter(named))}'
    if name in _DOWNLOADED and dataset.get('download'):
        return []
    if root and _lost(data_path(dataset, '')):
        return [Missing(data_path(dataset, ''), root_key, root, root_key, name)]
    if name == 'ImageNet' and dataset.get('split') and not prefix:
        named['split'] = dataset['split']
    wanted = [(f'{key}.{field}', value) for field, value in named.items()]
    wanted += [(root_key, osp.join(prefixes.get('', ''), part)) for part in _PARTS.get(name, ())]
    paths = [Missing(data_path(dataset, value), where, value, root_key, name) for where, value in wanted]
    return [item for item in paths if _lost(item.path)] or [
        Missing(path, f'{key}.ann_file', dataset['ann_file'], root_key, name, note=note)
        for path, note in _missing_listed(dataset)
    ]


def _missing_listed(dataset: dict) -> Iterator[tuple[str, str]]:
    """Yield the first missing file and a note on all, of the files that a list or an annotation file names."""
    listed, prefix, groups = data_path(dataset, dataset.get('ann_file')), dataset.get('data_prefix') or {}, {}
    if coco_file(dataset):  # the folder of the images is not known for subclasses
        groups = {'img': read_coco(listed).images}
    elif type_name(dataset) in _LISTED_TYPES and osp.isfile(listed):
        names = [line.strip() for line in list_from_file(listed)]
        suffixes = {'img_path': dataset.get('img_suffix', '.jpg')}
        if any('Annotations' in type_name(step) for _, step in find_dicts(dataset.get('pipeline'))):
            suffixes['seg_map_path'] = dataset.get('seg_map_suffix', '.png')
        groups = {field: [name + suffix for name in names] for field, suffix in suffixes.items() if field in prefix}
    for field, names in groups.items():
        folder = data_path(dataset, prefix.get(field))
        gone = missing_files(osp.join(folder, name) for name in names) if folder else []
        if gone:
            shown = first_three(map(osp.basename, gone))
            yield gone[0], f' ({len(gone)} of the {len(names)} files that it lists are missing: {shown})'


def describe_missing(missing: Sequence[Missing], config: str) -> str:
    """Return one message on missing data, the layouts that it needs, and the options that set its paths."""
    lines = [f'the data of {config} is not on disk. Expected:', '']
    width = max(len(item.path) for item in missing)
    lines += [f'  {item.path:<{width}}  <- {item.key} = {item.value!r}{item.note}' for item in missing]
    for name, layout in {item.type_name: item.layout for item in missing}.items():
        lines += ['', f'{name} reads this layout: {layout}'] if layout else []
        lines += ['', _SOURCES[name]] if name in _SOURCES else []
    keys = dict.fromkeys(f'{item.root_key}=PATH' for item in missing)
    lines += ['', f'The paths are set in {config} (or in a file of its _base_), relative ones from {os.getcwd()}.']
    lines += ['For data that is elsewhere:', f'  --cfg-options {" ".join(keys)}']
    roots = [item.root_key.rpartition('.')[0] for item in missing if item.type_name in _DOWNLOADED]
    options = ' '.join(dict.fromkeys(f'{root}.download=True' for root in roots))
    lines += ['To let the host library download it:', f'  --cfg-options {options}'] if options else []
    lines += ['To try the project without any download:', f'  python tools/train.py {DEMO_CONFIG}    (or: make demo)']
    return '\n'.join(lines)
