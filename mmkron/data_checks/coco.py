"""Compare an annotation file in COCO's format with the dataset's config.

MMDetection ignores mismatches: it drops annotations of a category whose name is not a class, of an id that no category
has, or of an image that is not listed, and trains on the rest.
"""

from __future__ import annotations

import os.path as osp
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmkron.data_checks.classes import class_names, lists_by
from mmkron.data_checks.coco_file import CocoFile, read_coco
from mmkron.data_checks.common import Problem, find_dicts, find_metrics, first_three, part_of, type_name, used_datasets
from mmkron.data_checks.paths import data_path, image_size, spread

_HINT = """\
MMDetection drops mismatches without a message. The classes of a dataset are set by
  metainfo=dict(classes=(...))
with the names of the file in its order. A box is [x, y, width, height] in pixels of its image, an area is in pixels."""
_FEW = 1e-3  # share of the boxes that can be dropped without a warning, as in COCO's own files
_SAMPLE = 50  # images that are opened, evenly spread
Faults = Iterator[tuple[str, bool]]  # (text, whether it is only a warning)


def coco_file(dataset: dict, kind: type | None = None) -> str:
    """Return the annotation file that MMDetection's CocoDataset reads; '' for other types or if it is not on disk.

    A subclass (``kind``) is another type if it reads the file with a method of its own.
    """
    path = data_path(dataset, dataset.get('ann_file'))
    known = type_name(dataset) == 'CocoDataset' or lists_by(kind, 'mmdet.datasets.coco')
    return path if known and osp.isfile(path) else ''


def check_coco(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield faults in the COCO annotation files of the used datasets and metrics.

    Categories that are not classes are no fault if each class is a category: the host trains on some of them this way.
    """
    files = []
    for key, dataset, kind in used_datasets(cfg, splits):
        path = coco_file(dataset, kind)
        if path:
            files.append((path, key, dataset, _dataset_faults(read_coco(path), dataset, *class_names(dataset, kind))))
    for key, metric in find_metrics(cfg, splits, 'CocoMetric'):
        path = data_path({}, metric.get('ann_file'))
        if osp.isfile(path) and not metric.get('format_only'):
            files.append((path, key, metric, _metric_faults(read_coco(path), metric)))
    for path, key, owner, faults in files:
        unread = [(f'MMDetection cannot read it: {text}', False) for text in read_coco(path).problems]
        for text, warning in unread or faults:
            yield Problem(osp.abspath(path), text, f'{key}.ann_file = {owner["ann_file"]!r}', _HINT, warning)


def _dataset_faults(content: CocoFile, dataset: dict, classes: tuple | None, source: str) -> Faults:
    if content.annotations is None and not dataset.get('test_mode'):
        yield "the file has no 'annotations', which only a dataset with test_mode=True can do without", False
    yield from _name_faults(content.names, classes or (), source)
    yield from ((text, False) for text in content.lost)
    yield from _box_faults(content)
    yield from _training_faults(content, dataset, classes)
    yield from _size_faults(content, data_path(dataset, (dataset.get('data_prefix') or {}).get('img')))


def _share(count: int, total: int, text: str) -> Faults:
    """Yield a fault of some boxes or images; it is only a warning up to half of them."""
    if count > _FEW * total:
        yield text, 2 * count <= total


def _name_faults(names: tuple, classes: tuple, source: str) -> Faults:
    absent = [name for name in classes if name not in names]
    kept = tuple(name for name in names if name in classes)
    if absent:
        others = first_three(repr(name) for name in names if name not in classes) or 'none'
        text = part_of(absent, len(classes), f'classes of {source} are not in the file', map(repr, absent))
        yield f'{text};\ncategories of the file that are not classes: {others}', False
    elif kept != classes:
        order = f'but MMDetection numbers its labels in the order of the file: {first_three(kept)}'
        yield f'{source} has the classes in the order {first_three(classes)},\n{order}', False


def _box_faults(content: CocoFile) -> Faults:
    total = content.annotations or 0
    for count, text in content.dropped:
        yield from _share(count, total, text)
    if content.corners > 0.1 * total:
        yield f'{content.corners} of the {total} boxes reach beyond their image; they look like two corners', True


def _training_faults(content: CocoFile, dataset: dict, classes: tuple | None) -> Faults:
    """Yield faults that leave a dataset without images or boxes, or a model that learns masks without a mask."""
    testing, total = bool(dataset.get('test_mode')), len(content.images)
    wanted = [i for i, name in enumerate(content.names) if classes is None or name in classes]
    kept = np.isin(content.labels, wanted)
    if content.annotations is None or not wanted:
        return
    if not (kept & ~content.crowd).any() and not content.lost and all(warning for _, warning in _box_faults(content)):
        yield f'none of the {total} images has a usable box of a class', testing
    least = 0 if testing else (dataset.get('filter_cfg') or {}).get('min_size', 0)
    small = int((content.sizes.min(1) < least).sum())
    text = f'images are smaller than filter_cfg.min_size={least} and are dropped'
    yield from _share(small, total, f'{small} of the {total} {text}')
    if testing or not any(step.get('with_mask') for _, step in find_dicts(dataset.get('pipeline'))):
        return
    bare, thin = ([f'annotations[{i}]' for i in np.flatnonzero(kept & bad)] for bad in (~content.masked, content.thin))
    if bare:
        text = f'annotations have no segmentation of polygons or RLE: {first_three(bare)}'
        yield f'with_mask is True, but {len(bare)} {text}', False
    text = f'annotations have no polygon of at least 3 points, x and y of each, and are ignored: {first_three(thin)}'
    yield from _share(len(thin), int(kept.sum()), f'{len(thin)} {text}')


def _size_faults(content: CocoFile, folder: str) -> Faults:
    """Yield a fault if a sample of images have other sizes than the annotation file states."""
    places = spread(len(content.images), _SAMPLE) if folder else ()
    found = [(image_size(osp.join(folder, content.images[i])), i) for i in places]
    read = [(content.images[i], size, tuple(content.sizes[i])) for size, i in found if size is not None]
    wrong = [f'{name} is {size[0]} x {size[1]}, not {w:g} x {h:g}' for name, size, (w, h) in read if size != (w, h)]
    yield from _share(len(wrong), len(read), part_of(wrong, len(read), 'images that were read have another size'))


def _metric_faults(content: CocoFile, metric: dict) -> Faults:
    """Yield faults at which a ``CocoMetric`` with its own annotation file would stop after the first epoch."""
    bare = np.flatnonzero(~content.masked) if 'segm' in metric.get('metric', 'bbox') else ()
    for places, what in ((content.without_crowd, 'iscrowd'), (bare, 'segmentation of polygons or RLE')):
        if len(places):
            shown = first_three(f'annotations[{i}]' for i in places)
            yield f'CocoMetric needs it, but {len(places)} annotations have no {what}: {shown}', False
