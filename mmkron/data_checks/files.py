"""Looks for a config's data before anything is built, and says what is missing in one message."""

import os
import os.path as osp
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mmkron.data_checks.coco import coco_file, image_folder, missing_images, read_coco
from mmkron.data_checks.common import type_name, used_datasets
from mmkron.datasets import CIFAR10DVS

DEMO_CONFIG = 'configs/kanet/kanet-kv_digits.py'

_IDX_FILES = tuple(f'{split}-{kind}-ubyte' for split in ('train', 't10k') for kind in ('images-idx3', 'labels-idx1'))

# What these types look for below their root. The host downloads it where it is missing; a launcher that starts
# downloads unasked is a surprise on a cluster, so here that takes an explicit `download=True`.
_DOWNLOADED = {
    'MNIST': _IDX_FILES,
    'FashionMNIST': _IDX_FILES,
    'CIFAR10': ('cifar-10-batches-py',),
    'CIFAR100': ('cifar-100-python',),
}

# What these need below their root, beside what the config names.
_PARTS = {
    'CIFAR10DVS': CIFAR10DVS.METAINFO['classes'],
    'DVS128Gesture': ('trials_to_train.txt', 'trials_to_test.txt'),
}

# By dataset type without its scope; every line is below the dataset's data_root.
_LAYOUTS = {
    'ImageNet': """\
meta/train.txt               optional: one line 'n01440764/n01440764_10026.JPEG 0' per image
meta/val.txt                 optional; without these files, the class is the folder
train/n01440764/*.JPEG       one folder per class (1000 of them)
val/n01440764/*.JPEG""",
    'CustomDataset': """\
CLASS_A/*.jpg                one folder per class, unless ann_file lists 'path label' lines
CLASS_B/*.jpg""",
    'VOC': """\
JPEGImages/*.jpg
Annotations/*.xml
ImageSets/Main/{train,val,trainval,test}.txt""",
    'VOCDataset': """\
VOC2007/{JPEGImages,Annotations}/
VOC2007/ImageSets/Main/{trainval,test}.txt
VOC2012/{JPEGImages,Annotations}/
VOC2012/ImageSets/Main/{trainval,val}.txt""",
    'PascalVOCDataset': """\
JPEGImages/*.jpg
SegmentationClass/*.png
SegmentationClassAug/*.png   only for configs with the augmented training set
ImageSets/Segmentation/{train,val,aug}.txt""",
    'CocoDataset': """\
annotations/instances_{train,val}2017.json
train2017/*.jpg
val2017/*.jpg""",
    'CityscapesDataset': """\
leftImg8bit/{train,val}/CITY/*_leftImg8bit.png
gtFine/{train,val}/CITY/*_gtFine_labelTrainIds.png                  for segmentation
annotations/instancesonly_filtered_gtFine_{train,val}.json          for detection""",
    'ADE20KDataset': """\
images/{training,validation}/*.jpg
annotations/{training,validation}/*.png""",
    'FashionMNIST': """\
train-images-idx3-ubyte      extracted, not .gz
train-labels-idx1-ubyte
t10k-images-idx3-ubyte
t10k-labels-idx1-ubyte
Debian's package dataset-fashion-mnist brings them as .gz; in the folder above:
  for f in $(dpkg -L dataset-fashion-mnist | grep 'ubyte.gz$'); do gunzip -c "$f" > "$(basename "$f" .gz)"; done""",
    'CIFAR10': 'cifar-10-batches-py/{data_batch_1,...,data_batch_5,test_batch,batches.meta}',
    'CIFAR100': 'cifar-100-python/{train,test,meta}',
    'CIFAR10DVS': """\
airplane/cifar10_airplane_*.aedat      one folder a class: airplane, automobile, bird, cat, deer,
automobile/cifar10_automobile_*.aedat  dog, frog, horse, ship, truck (1,000 recordings each), AEDAT 2.0""",
    'DVS128Gesture': """\
trials_to_{train,test}.txt   a line for each recording, as in DvsGesture.tar.gz: user01_fluorescent.aedat
user*_*.aedat                AEDAT 3.1
user*_*_labels.csv           a header, then 'class,start,end' lines: 1 to 11, microseconds""",
}
_LAYOUTS['BaseSegDataset'] = """\
JPEGImages/*.jpg             below the folders of data_prefix, with names from ann_file if that is given
SegmentationClass/*.png      one value a pixel: the class, or 255 for none
ImageSets/Segmentation/{train,val}.txt
The Fashion scenes of this project are made in that layout by
  python tools/dataset_converters/fashion_scenes.py"""
_LAYOUTS['MNIST'] = '\n'.join(_IDX_FILES)

# Segmentation data that a list of names picks: a file that it names and the disk lacks would stop the training later.
_LISTED_TYPES = ('PascalVOCDataset', 'BaseSegDataset')


class Missing(NamedTuple):
    """A path that the config names and the disk lacks."""

    path: str  # absolute
    key: str  # where the config names it
    value: str  # as written there
    root: str  # the dataset's root as configured
    root_key: str  # the key that moves the whole dataset
    type_name: str  # dataset type without its scope
    note: str = ''  # what else is to be said about it


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, f'{key}.{name}')
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _strings(item, f'{key}.{i}')


def _missing_in(dataset: dict, key: str) -> list[Missing]:
    name, root = type_name(dataset), dataset.get('data_root') or ''
    if name in _DOWNLOADED and dataset.get('download'):
        return []
    # Keys and values as configured; the values are relative to the root, which may be empty.
    paths = [
        item
        for field in ('ann_file', 'data_prefix')
        for item in _strings(dataset.get(field), f'{key}.{field}')
        if item[1]
    ]
    root_key = f'{key}.data_root' if root or not paths else paths[0][0]
    if name == 'ImageNet' and dataset.get('split') and not dataset.get('data_prefix'):
        paths.append((f'{key}.split', dataset['split']))
    if name in _DOWNLOADED:
        base = paths[0][1] if paths else ''
        paths = [(root_key, osp.join(base, file)) for file in _DOWNLOADED[name]]
    paths += [(root_key, part) for part in _PARTS.get(name, ())]

    def lost(path: str) -> bool:
        return '://' not in path and not osp.exists(osp.expanduser(path))

    def missing(where: str, value: str, path: str) -> Missing:
        return Missing(osp.abspath(osp.expanduser(path)), where, value, root, root_key, name)

    if root and lost(root):
        return [missing(f'{key}.data_root', root, root)]
    found = [missing(where, value, osp.join(root, value)) for where, value in paths if lost(osp.join(root, value))]
    if not found and name in _LISTED_TYPES:
        for lost_file, note in _missing_listed(dataset, root):
            found.append(missing(f'{key}.ann_file', dataset['ann_file'], lost_file)._replace(note=note))
    if not found and coco_file(dataset):
        images, folder = read_coco(coco_file(dataset)).images, image_folder(dataset)
        gone = [] if '://' in folder else missing_images(images, folder)
        if gone:
            names = ', '.join(osp.basename(path) for path in gone[:3]) + (', ...' if len(gone) > 3 else '')
            note = f' ({len(gone)} of the {len(images)} images that it lists are missing: {names})'
            found.append(missing(f'{key}.ann_file', dataset['ann_file'], gone[0])._replace(note=note))
    return found


def _missing_listed(dataset: dict, root: str) -> Iterator[tuple[str, str]]:
    """A first missing file and a note on all of them, for images and for labels that a list of names asks for."""
    ann_file = osp.expanduser(osp.join(root, dataset.get('ann_file') or ''))
    if not osp.isfile(ann_file):
        return
    with open(ann_file) as file:
        names = [line.strip() for line in file]
    prefix = dataset.get('data_prefix') or {}
    suffixes = {'img_path': dataset.get('img_suffix', '.jpg')}
    if _loads_annotations(dataset.get('pipeline')):
        suffixes['seg_map_path'] = dataset.get('seg_map_suffix', '.png')
    for field, suffix in suffixes.items():
        folder = osp.join(root, prefix.get(field) or '')
        if field in prefix and '://' not in folder:
            paths = [osp.expanduser(osp.join(folder, name + suffix)) for name in names]
            gone = [path for path in paths if not osp.exists(path)]
            if gone:
                yield gone[0], f' ({len(gone)} of the {len(names)} files that it lists are missing)'


def _loads_annotations(steps: Any) -> bool:
    """Whether a pipeline, with what its steps nest, loads labels."""
    if isinstance(steps, dict):
        return 'Annotations' in type_name(steps) or _loads_annotations(list(steps.values()))
    return isinstance(steps, (list, tuple)) and any(map(_loads_annotations, steps))


def find_missing(cfg: Any, splits: Sequence[str]) -> list[Missing]:
    """Local paths in ``data_root``, ``ann_file`` and ``data_prefix`` of the used datasets that do not exist.

    Also the ``ann_file`` of a ``CocoMetric``, and files that a list of names or a COCO annotation file asks for.
    Relative paths start from the working directory, as in the host libraries. Remote paths (``s3://``,
    ``http://``) are not looked at.

    Args:
        cfg: The whole config.
        splits: Which loaders will be used, of ``'train'``, ``'val'`` and ``'test'``.
    """
    found = [item for key, dataset in used_datasets(cfg, splits) for item in _missing_in(dataset, key)]
    for split in splits:
        if isinstance(cfg.get(f'{split}_dataloader'), dict):
            found += _missing_of_metrics(cfg.get(f'{split}_evaluator'), f'{split}_evaluator')
    return found


def _missing_of_metrics(evaluator: Any, key: str) -> Iterator[Missing]:
    if isinstance(evaluator, (list, tuple)):
        for i, metric in enumerate(evaluator):
            yield from _missing_of_metrics(metric, f'{key}.{i}')
    elif isinstance(evaluator, dict) and type_name(evaluator) == 'CocoMetric':
        value = evaluator.get('ann_file')
        path = osp.abspath(osp.expanduser(value or ''))
        if value and '://' not in value and not osp.exists(path):
            yield Missing(path, f'{key}.ann_file', value, '', f'{key}.ann_file', 'CocoMetric')


def describe_missing(missing: Sequence[Missing], config: str) -> str:
    """One message: what is missing, in which layout, where that is set, and what runs without it.

    Args:
        missing: What :func:`find_missing` returned, not empty.
        config: The config file's path.
    """
    lines = [f'the data of {config} is not on disk. Expected:', '']
    width = max(len(item.path) for item in missing)
    lines += [f'  {item.path:<{width}}  <- {item.key} = {item.value!r}{item.note}' for item in missing]
    for name, root in {item.type_name: item.root for item in reversed(missing)}.items():
        if name in _LAYOUTS:
            lines += ['', f'{name} reads this layout:', '', f'  {osp.join(root, "")}']
            lines += [f'    {line}' for line in _LAYOUTS[name].splitlines()]
    options = ' '.join(f'{key}=PATH' for key in dict.fromkeys(item.root_key for item in missing))
    lines += [
        '',
        f'The paths are set in {config} (or in a file of its _base_), relative ones from {os.getcwd()}.',
        'For data that is elsewhere:',
        f'  --cfg-options {options}',
    ]
    if any(item.type_name in _DOWNLOADED for item in missing):
        downloads = ' '.join(
            f'{key.rsplit(".", 1)[0]}.download=True'
            for key in dict.fromkeys(item.root_key for item in missing if item.type_name in _DOWNLOADED)
        )
        lines += ['To let the host library download it:', f'  --cfg-options {downloads}']
    lines += ['To try the project without any download:', f'  python tools/train.py {DEMO_CONFIG}    (or: make demo)']
    return '\n'.join(lines)
