"""Compare an annotation file in COCO's format with the dataset's config.

MMDetection ignores what does not fit: annotations of a category whose name is no class, of an id that no category
has, or of an image that is not listed are dropped, and the training runs on the rest.
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
MMDetection drops what does not fit without a word. The classes of a dataset are set by
  metainfo=dict(classes=(...))
with the names of the file in its order. A box is [x, y, width, height] in pixels of its image, an area is in pixels."""
_FEW = 1e-3  # so small a part of the boxes can be dropped without a warning, as it is of COCO's own files
_SAMPLE = 50  # images that are opened, evenly spread


def coco_file(dataset: dict, kind: type | None = None) -> str:
    """Return the annotation file that MMDetection's CocoDataset reads; '' for other types or if it is not on disk.

    A subclass, which ``kind`` may be, is another type if it reads the file with a method of its own.
    """
    path = data_path(dataset, dataset.get('ann_file'))
    known = type_name(dataset) == 'CocoDataset' or lists_by(kind, 'mmdet.datasets.coco')
    return path if known and osp.isfile(path) else ''


def check_coco(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with the COCO annotation files of the used datasets and metrics.

    Looks at MMDetection's ``CocoDataset``, and at subclasses that read the file as it does. Categories that are no
    class are no mistake as long as each class is a category: that is how the host trains on some of them. For the cost
    see :func:`read_coco`.
    """
    files = []
    for key, dataset, kind in used_datasets(cfg, splits):
        path = coco_file(dataset, kind)
        if path:
            content = read_coco(path)
            faults = _dataset_faults(content, dataset, kind)
            files.append((path, f'{key}.ann_file = {dataset["ann_file"]!r}', content, faults))
    for key, metric in find_metrics(cfg, splits, 'CocoMetric'):
        path = data_path({}, metric.get('ann_file'))
        if osp.isfile(path) and not metric.get('format_only'):
            content = read_coco(path)
            files.append((path, f'{key}.ann_file = {metric["ann_file"]!r}', content, _metric_faults(content, metric)))
    for path, source, content, faults in files:
        unread = [(f'MMDetection cannot read it: {text}', False) for text in content.problems]
        for text, warning in unread or faults:
            yield Problem(osp.abspath(path), text, source, _HINT, warning)


def _dataset_faults(content: CocoFile, dataset: dict, kind: type | None) -> Iterator[tuple[str, bool]]:
    classes, source = class_names(dataset, kind)
    if content.annotations is None and not dataset.get('test_mode'):
        yield "the file has no 'annotations', which only a dataset with test_mode=True can do without", False
    yield from _name_faults(content.names, classes or (), source)
    yield from ((text, False) for text in content.lost)
    yield from _box_faults(content)
    yield from _training_faults(content, dataset, classes)
    yield from _size_faults(content, data_path(dataset, (dataset.get('data_prefix') or {}).get('img')))


def _name_faults(names: tuple, classes: tuple, source: str) -> Iterator[tuple[str, bool]]:
    absent = [name for name in classes if name not in names]
    kept = tuple(name for name in names if name in classes)
    if absent:
        others = first_three(repr(name) for name in names if name not in classes)
        text = part_of(absent, len(classes), f'classes of {source} are no category of the file', map(repr, absent))
        yield f'{text};\ncategories of the file that are no class: {others or "none"}', False
    elif kept != classes:
        yield (
            (
                f'{source} has the classes {first_three(classes)},\nbut the file has these categories in the order '
                f'{first_three(kept)}:\nMMDetection numbers its labels in the order of the file'
            ),
            False,
        )


def _box_faults(content: CocoFile) -> Iterator[tuple[str, bool]]:
    """Yield which boxes MMDetection would drop; it is only suspicious up to half of them."""
    total = content.annotations or 0
    for count, text in content.dropped:
        if count > _FEW * total:
            yield text, 2 * count <= total
    if content.corners > 0.1 * total:
        yield f'{content.corners} of the {total} boxes reach beyond their image; they look like two corners', True


def _training_faults(content: CocoFile, dataset: dict, classes: tuple | None) -> Iterator[tuple[str, bool]]:
    """Yield what leaves a dataset without images or boxes, or a model that learns masks without a mask."""
    testing, total = bool(dataset.get('test_mode')), len(content.images)
    wanted = [i for i, name in enumerate(content.names) if classes is None or name in classes]
    kept = np.isin(content.labels, wanted)
    if content.annotations is None or not wanted:
        return
    if not (kept & ~content.crowd).any() and not content.lost and all(warning for _, warning in _box_faults(content)):
        yield f'none of the {total} images has a box of a class that can be used', testing
    least = 0 if testing else (dataset.get('filter_cfg') or {}).get('min_size', 0)
    small = int((content.sizes.min(1) < least).sum())
    if small > _FEW * total:
        text = f'{small} of the {total} images are smaller than filter_cfg.min_size={least} and are dropped'
        yield text, 2 * small <= total
    if testing or not any(step.get('with_mask') for _, step in find_dicts(dataset.get('pipeline'))):
        return
    bare = [f'annotations[{i}]' for i in np.flatnonzero(kept & ~content.masked)]
    thin = [f'annotations[{i}]' for i in np.flatnonzero(kept & content.thin)]
    if bare:
        text = f'annotations have no segmentation of polygons or RLE: {first_three(bare)}'
        yield f'with_mask is True, but {len(bare)} {text}', False
    if len(thin) > _FEW * kept.sum():
        text = (
            f'annotations have no polygon of at least 3 points, x and y of each, and are ignored: {first_three(thin)}'
        )
        yield f'{len(thin)} {text}', 2 * len(thin) <= kept.sum()


def _size_faults(content: CocoFile, folder: str) -> Iterator[tuple[str, bool]]:
    """Yield which of a sample of images have another size than the annotation file says."""
    looked, wrong = 0, []
    for i in spread(len(content.images), _SAMPLE) if folder else ():
        found, said = image_size(osp.join(folder, content.images[i])), tuple(content.sizes[i])
        looked += found is not None
        if found not in (None, said):
            wrong.append(f'{content.images[i]} has {found[0]} x {found[1]} pixels instead of {said[0]:g} x {said[1]:g}')
    if wrong:
        text = f'{len(wrong)} of {looked} images that were looked at have another size: {first_three(wrong)}'
        yield text, 2 * len(wrong) <= looked


def _metric_faults(content: CocoFile, metric: dict) -> Iterator[tuple[str, bool]]:
    """Yield what a ``CocoMetric`` would stop at after the first epoch, when it reads its own annotation file."""
    bare = np.flatnonzero(~content.masked) if 'segm' in metric.get('metric', 'bbox') else ()
    for places, what in ((content.without_crowd, 'iscrowd'), (bare, 'segmentation of polygons or RLE')):
        if len(places):
            shown = first_three(f'annotations[{i}]' for i in places)
            yield f'CocoMetric needs it, but {len(places)} annotations have no {what}: {shown}', False
