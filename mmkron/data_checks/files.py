"""Looks for a config's data before anything is built, and says what is missing in one message."""

import os
import os.path as osp
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

from mmengine.fileio import list_from_file

from mmkron.data_checks.classes import dataset_type
from mmkron.data_checks.coco import coco_file, read_coco
from mmkron.data_checks.common import find_dicts, find_metrics, first_three, type_name, used_datasets
from mmkron.data_checks.paths import data_path, missing_files
from mmkron.datasets import CIFAR10DVS

DEMO_CONFIG = 'configs/kanet/kanet-kv_digits.py'
_IDX_FILES = tuple(f'{split}-{kind}-ubyte' for split in ('train', 't10k') for kind in ('images-idx3', 'labels-idx1'))

# What these types need below their root, beside what the config names.
_PARTS = {
    'MNIST': _IDX_FILES,
    'FashionMNIST': _IDX_FILES,
    'CIFAR10': ('cifar-10-batches-py',),
    'CIFAR100': ('cifar-100-python',),
    'CIFAR10DVS': CIFAR10DVS.METAINFO['classes'],
    'DVS128Gesture': ('trials_to_train.txt', 'trials_to_test.txt'),
}
# The host downloads these where they are missing, which here takes an explicit `download=True`: a launcher that starts
# downloads unasked is a surprise on a cluster.
_DOWNLOADED = ('MNIST', 'FashionMNIST', 'CIFAR10', 'CIFAR100')

# Segmentation data that a list of names picks: a file that it names and the disk lacks would stop the training later.
_LISTED_TYPES = ('PascalVOCDataset', 'BaseSegDataset')

# Where a host describes the folders that its datasets read.
_LAYOUTS = {
    'mmpretrain': 'https://mmpretrain.readthedocs.io/en/latest/user_guides/dataset_prepare.html',
    'mmseg': 'https://mmsegmentation.readthedocs.io/en/latest/user_guides/2_dataset_prepare.html',
    'mmdet': 'https://mmdetection.readthedocs.io/en/latest/user_guides/dataset_prepare.html',
}
# How to get the data that shipped configs use.
_SOURCES = {
    'FashionMNIST': """\
Debian's package dataset-fashion-mnist brings the four files as .gz. In the folder above:
  for f in $(dpkg -L dataset-fashion-mnist | grep 'ubyte.gz$'); do gunzip -c "$f" > "$(basename "$f" .gz)"; done""",
    'BaseSegDataset': """\
The Fashion scenes of this project are made by
  python tools/dataset_converters/fashion_scenes.py""",
}


class Missing(NamedTuple):
    """A path that the config names and the disk lacks."""

    path: str  # absolute
    key: str  # where the config names it
    value: str  # as written there
    root_key: str  # the key that moves the whole dataset
    type_name: str  # dataset type without its scope
    layout: str = ''  # where the layout that the type reads is described
    note: str = ''  # what else is to be said about it


def find_missing(cfg: Any, splits: Sequence[str]) -> list[Missing]:
    """Return the local paths that the used datasets and metrics need and that do not exist.

    These are ``data_root``, ``ann_file`` and ``data_prefix``, the ``ann_file`` of a ``CocoMetric``, and the files that
    a list of names or a COCO annotation file names. Relative paths start from the working directory, as in the host
    libraries. Remote paths (``s3://``, ``http://``) are not looked at.

    Args:
        cfg: The whole config.
        splits: Which loaders will be used, of ``'train'``, ``'val'`` and ``'test'``.
    """
    found = []
    for key, dataset in used_datasets(cfg, splits):
        layout = _layout(dataset_type(dataset, cfg.get('default_scope')))
        root_key, lost = _missing_in(dataset, key)
        for path, where, value, note in lost:
            found.append(Missing(osp.abspath(path), where, value, root_key, type_name(dataset), layout, note))
    for split in splits:
        for key, metric in find_metrics(cfg, split, 'CocoMetric') if cfg.get(f'{split}_dataloader') else ():
            value, key = metric.get('ann_file'), f'{key}.ann_file'
            if value and _lost(data_path({}, value)):
                path = osp.abspath(osp.expanduser(value))
                found.append(Missing(path, key, value, key, 'CocoMetric'))
    return found


def _layout(kind: Optional[type]) -> str:
    package = getattr(kind, '__module__', '').partition('.')[0]
    return f'help(mmkron.datasets.{kind.__name__}) in Python' if package == 'mmkron' else _LAYOUTS.get(package, '')


def _lost(path: str) -> bool:
    return bool(path) and not osp.exists(path)


def _missing_in(dataset: dict, key: str) -> tuple[str, list[tuple[str, str, str, str]]]:
    """Return the key that moves a dataset, and (path, key, value, note) of what it lacks."""
    name, root, prefix = type_name(dataset), dataset.get('data_root'), dataset.get('data_prefix')
    named = {'ann_file': dataset.get('ann_file')}
    named |= {f'data_prefix.{part}': prefix[part] for part in prefix} if isinstance(prefix, dict) else {}
    named |= {'data_prefix': prefix} if isinstance(prefix, str) else {}
    named = {field: value for field, value in named.items() if value}
    root_key = f'{key}.{"data_root" if root or not named else next(iter(named))}'
    if name in _DOWNLOADED and dataset.get('download'):
        return root_key, []
    if root and _lost(data_path(dataset, '')):
        return root_key, [(data_path(dataset, ''), f'{key}.data_root', root, '')]
    if name == 'ImageNet' and dataset.get('split') and not prefix:
        named['split'] = dataset['split']
    paths = [(data_path(dataset, value), f'{key}.{field}', value, '') for field, value in named.items()]
    base = prefix if isinstance(prefix, str) else ''
    parts = [osp.join(base, part) for part in _PARTS.get(name, ())]
    paths += [(data_path(dataset, part), root_key, part, '') for part in parts]
    lost = [item for item in paths if _lost(item[0])]
    if not lost:
        lost = [(path, f'{key}.ann_file', dataset['ann_file'], note) for path, note in _missing_listed(dataset)]
    return root_key, lost


def _missing_listed(dataset: dict) -> Iterator[tuple[str, str]]:
    """Yield a first missing file and a note on all of them, of the files that a list or an annotation file names."""
    listed, prefix, groups = data_path(dataset, dataset.get('ann_file')), dataset.get('data_prefix') or {}, []
    if coco_file(dataset):  # of a subclass it is not known where the images are
        groups = [('img', read_coco(listed).images)]
    elif type_name(dataset) in _LISTED_TYPES and osp.isfile(listed):
        names = [line.strip() for line in list_from_file(listed)]
        suffixes = {'img_path': dataset.get('img_suffix', '.jpg')}
        if any('Annotations' in type_name(step) for _, step in find_dicts(dataset.get('pipeline'))):
            suffixes['seg_map_path'] = dataset.get('seg_map_suffix', '.png')
        groups = [(field, [name + suffix for name in names]) for field, suffix in suffixes.items() if field in prefix]
    for field, names in groups:
        folder = data_path(dataset, prefix.get(field))
        gone = missing_files(osp.join(folder, name) for name in names) if folder else []
        if gone:
            shown = first_three(map(osp.basename, gone))
            yield gone[0], f' ({len(gone)} of the {len(names)} files that it lists are missing: {shown})'


def describe_missing(missing: Sequence[Missing], config: str) -> str:
    """Return one message: what is missing, where its layout is described, where it is set, and what runs without it.

    Args:
        missing: What :func:`find_missing` returned, not empty.
        config: The config file's path.
    """
    lines = [f'the data of {config} is not on disk. Expected:', '']
    width = max(len(item.path) for item in missing)
    lines += [f'  {item.path:<{width}}  <- {item.key} = {item.value!r}{item.note}' for item in missing]
    for name, layout in {item.type_name: item.layout for item in missing}.items():
        lines += ['', f'{name} reads this layout: {layout}'] if layout else []
        lines += ['', _SOURCES[name]] if name in _SOURCES else []
    keys = dict.fromkeys(item.root_key for item in missing)
    lines += [
        '',
        f'The paths are set in {config} (or in a file of its _base_), relative ones from {os.getcwd()}.',
        'For data that is elsewhere:',
        f'  --cfg-options {" ".join(f"{key}=PATH" for key in keys)}',
    ]
    downloads = dict.fromkeys(item.root_key.rpartition('.')[0] for item in missing if item.type_name in _DOWNLOADED)
    if downloads:
        options = ' '.join(f'{key}.download=True' for key in downloads)
        lines += ['To let the host library download it:', f'  --cfg-options {options}']
    lines += ['To try the project without any download:', f'  python tools/train.py {DEMO_CONFIG}    (or: make demo)']
    return '\n'.join(lines)
