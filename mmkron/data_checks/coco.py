"""What an annotation file in COCO's format and a dataset's config have to agree on.

MMDetection passes over what does not fit: annotations of a category whose name is no class, of an id that no category
has, or of an image that is not listed are dropped, and the training runs on the rest.
"""

import os
import os.path as osp
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional

import numpy as np
from PIL import Image

from mmkron.data_checks.classes import dataset_type, read_from
from mmkron.data_checks.coco_file import CocoFile, read_coco
from mmkron.data_checks.common import Problem, first_three, type_name, used_datasets

_CLASSES_HINT = """\
MMDetection would drop what does not fit without a word. The classes of a dataset are set by
  metainfo=dict(classes=(...))
with the names of the file in its order."""
_BOXES_HINT = """\
A box is [x, y, width, height] in pixels of its image, an area is in pixels.
MMDetection drops what does not fit without a word."""
_SHOWN = 5  # names or ids that a message lists
_FEW = 1e-3  # so small a part of the boxes can be dropped without a warning, as it is of COCO's own files
_SAMPLE = 50  # images that are opened, evenly spread


def missing_images(images: Iterable[str], folder: str) -> list[str]:
    """Paths of the images that are not below ``folder``, by one listing of each folder: COCO has 118,287 files."""
    listings: dict = {}
    missing = []
    for name in images:
        path = osp.join(folder, name)
        parent, base = osp.split(path)
        if parent not in listings:
            listings[parent] = set(os.listdir(parent)) if osp.isdir(parent) else set()
        if base not in listings[parent]:
            missing.append(path)
    return missing


def dataset_classes(dataset: dict, kind: Optional[type] = None) -> tuple[Any, str]:
    """The classes of a dataset of type ``kind``, ``CocoDataset`` by default, and where they are set.

    Returns:
        A sequence of names, a string that is no file of names, or None where they are remote or mmdet is missing,
        which is reported elsewhere; and the key below the dataset, or ``'CocoDataset.METAINFO'``.
    """
    classes = (dataset.get('metainfo') or {}).get('classes')
    if isinstance(classes, str):
        path = osp.expanduser(classes)
        if osp.isfile(path):
            with open(path, encoding='utf-8') as file:
                classes = [line.rstrip('\n\r') for line in file]
        return (None if '://' in path else classes), 'metainfo.classes'
    if classes is not None:
        return classes, 'metainfo.classes'
    if kind is not None:
        return kind.METAINFO.get('classes'), f'{kind.__name__}.METAINFO'
    try:
        from mmdet.datasets import CocoDataset
    except (ImportError, AssertionError):  # mmdet asserts the versions that it works with
        return None, ''
    return CocoDataset.METAINFO['classes'], 'CocoDataset.METAINFO'


def coco_file(dataset: dict, kind: Optional[type] = None) -> str:
    """Return the annotation file that MMDetection's CocoDataset reads; '' for other types or if it is not on disk.

    A subclass, which ``kind`` may be, is another type if it reads the file by a method of its own.
    """
    path = osp.expanduser(osp.join(dataset.get('data_root') or '', dataset.get('ann_file') or ''))
    known = type_name(dataset) == 'CocoDataset' or read_from(kind, 'mmdet.datasets.coco')
    return path if known and osp.isfile(path) else ''


def image_folder(dataset: dict) -> str:
    """Return the folder of a dataset's images, which may be remote."""
    folder = (dataset.get('data_prefix') or {}).get('img') or ''
    return folder if '://' in folder else osp.expanduser(osp.join(dataset.get('data_root') or '', folder))


def check_coco(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with the COCO annotation files of the used datasets and metrics.

    Looks at MMDetection's ``CocoDataset``, and at subclasses that read the file as it does. Categories that are no
    class are no mistake as long as each class is a category: that is how the host trains on some of them. For the cost
    see :func:`read_coco`.
    """
    for key, dataset in used_datasets(cfg, splits):
        kind = dataset_type(dataset, cfg.get('default_scope'))
        path = coco_file(dataset, kind)
        if not path:
            continue
        content, source = read_coco(path), f'{key}.ann_file = {dataset["ann_file"]!r}'
        path = osp.abspath(path)
        for text in content.problems:
            yield Problem(path, f'MMDetection cannot read it: {text}', source)
        if not content.problems:
            for text in misfits(content, dataset, kind):
                yield Problem(path, text, source, _CLASSES_HINT)
            for text, warning in (*box_faults(content), *training_faults(content, dataset, kind)):
                yield Problem(path, text, source, _BOXES_HINT, warning)
            for text, warning in size_faults(content, image_folder(dataset)):
                yield Problem(path, text, source, warning=warning)
    for split in splits:
        yield from _metric_faults(cfg.get(f'{split}_evaluator'), f'{split}_evaluator')


def box_faults(content: CocoFile) -> Iterator[tuple[str, bool]]:
    """Yield which boxes MMDetection would drop, and whether that is only suspicious: of half of them it is wrong."""
    total = content.annotations or 0
    for count, text in content.dropped:
        if count > _FEW * total:
            yield text, 2 * count <= total
    if content.corners > 0.1 * total:
        yield f'{content.corners} of the {total} boxes reach beyond their image; they look like two corners', True


def training_faults(content: CocoFile, dataset: dict, kind: Optional[type] = None) -> Iterator[tuple[str, bool]]:
    """Yield what leaves a dataset without images or boxes, or a model that learns masks without a mask."""
    classes, testing = dataset_classes(dataset, kind)[0], bool(dataset.get('test_mode'))
    names = content.names if classes is None or isinstance(classes, str) else classes
    wanted = [i for i, name in enumerate(content.names) if name in names]
    kept = np.isin(content.labels, wanted)
    if content.annotations is None or not wanted:
        return
    blamed = content.lost_categories or content.lost_images or any(not warning for _, warning in box_faults(content))
    if not (kept & ~content.crowd).any() and not blamed:
        yield f'none of the {len(content.images)} images has a box of a class that can be used', testing
    least = 0 if testing else (dataset.get('filter_cfg') or {}).get('min_size', 0)
    small = int((content.sizes.min(1) < least).sum())
    if small > _FEW * len(content.images):
        text = (
            f'{small} of the {len(content.images)} images are smaller than filter_cfg.min_size={least} and are dropped'
        )
        yield text, 2 * small <= len(content.images)
    bare = np.flatnonzero(kept & ~content.masked)
    if len(bare) and not testing and _loads_masks(dataset.get('pipeline')):
        shown = first_three([f'annotations[{i}]' for i in bare])
        yield f'with_mask is True, but {len(bare)} annotations have no segmentation of polygons or RLE: {shown}', False
    thin = np.flatnonzero(kept & content.masked & content.thin)
    if len(thin) > _FEW * kept.sum() and not testing and _loads_masks(dataset.get('pipeline')):
        shown = first_three([f'annotations[{i}]' for i in thin])
        yield (
            f'{len(thin)} annotations have no polygon of at least 3 points, x and y of each, and are ignored: {shown}',
            2 * len(thin) <= kept.sum(),
        )


def _loads_masks(steps: Any) -> bool:
    if isinstance(steps, dict):
        return bool(steps.get('with_mask')) or _loads_masks(list(steps.values()))
    return isinstance(steps, (list, tuple)) and any(map(_loads_masks, steps))


def size_faults(content: CocoFile, folder: str) -> Iterator[tuple[str, bool]]:
    """Yield which of a sample of images have another size than the annotation file says."""
    places = sorted({round(i) for i in np.linspace(0, len(content.images) - 1, _SAMPLE)}) if content.images else []
    looked, wrong = 0, []
    for i in places if '://' not in folder else ():
        found, said = image_size(osp.join(folder, content.images[i])), tuple(content.sizes[i])
        looked += found is not None
        if found not in (None, said):
            wrong.append(f'{content.images[i]} has {found[0]} x {found[1]} pixels instead of {said[0]:g} x {said[1]:g}')
    if wrong:
        yield (
            f'{len(wrong)} of {looked} images that were looked at have another size: {first_three(wrong)}',
            (2 * len(wrong) <= looked),
        )


def image_size(path: str) -> Optional[tuple[int, int]]:
    """Return width and height of an image as it is loaded, turned as its EXIF says; None if Pillow cannot tell."""
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(0x0112, 1) >= 5
            return image.size[::-1] if turned else image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _metric_faults(evaluator: Any, key: str) -> Iterator[Problem]:
    """Yield what a ``CocoMetric`` would stop at after the first epoch, when it reads its own annotation file."""
    if isinstance(evaluator, (list, tuple)):
        for i, metric in enumerate(evaluator):
            yield from _metric_faults(metric, f'{key}.{i}')
    if not isinstance(evaluator, dict) or type_name(evaluator) != 'CocoMetric' or evaluator.get('format_only'):
        return
    path = osp.abspath(osp.expanduser(evaluator.get('ann_file') or ''))
    if not osp.isfile(path):
        return
    content, source = read_coco(path), f'{key}.ann_file = {evaluator["ann_file"]!r}'
    kinds = evaluator.get('metric', 'bbox')
    bare = np.flatnonzero(~content.masked) if 'segm' in ([kinds] if isinstance(kinds, str) else kinds) else ()
    texts = [f'MMDetection cannot read it: {text}' for text in content.problems]
    for places, what in ((content.without_crowd, 'iscrowd'), (bare, 'segmentation of polygons or RLE')):
        if len(places):
            shown = first_three([f'annotations[{i}]' for i in places])
            texts.append(f'CocoMetric needs it, but {len(places)} annotations have no {what}: {shown}')
    for text in texts:
        yield Problem(path, text, source)


def misfits(content: CocoFile, dataset: dict, kind: Optional[type] = None) -> Iterator[str]:
    """Yield each thing that a file and a dataset's config do not agree on, with both sides."""
    if content.annotations is None and not dataset.get('test_mode'):
        yield "the file has no 'annotations', which only a dataset with test_mode=True can do without"
    classes, source = dataset_classes(dataset, kind)
    if isinstance(classes, str):
        yield (
            f'{source} is the string {classes!r}, neither names, as in ({classes!r},), nor a file of names;\n'
            f'categories of the file: {_shorten(content.names)}'
        )
    elif classes is not None:
        yield from _name_misfits(content.names, tuple(classes), source)
    if content.lost_categories:
        yield (
            f'{len(content.lost_categories)} of the {content.annotations} annotations have a category_id that no '
            f'category has: {_shorten(content.lost_categories)};\n'
            f'ids of the categories of the file: {_shorten(content.category_ids)}'
        )
    if content.lost_images:
        yield (
            f'{len(content.lost_images)} of the {content.annotations} annotations have an image_id that no image '
            f'has: {_shorten(content.lost_images)};\n'
            f'ids of the images of the file: {_shorten(content.image_ids)}'
        )


def _name_misfits(names: tuple, classes: tuple, source: str) -> Iterator[str]:
    absent = [name for name in classes if name not in names]
    kept = tuple(name for name in names if name in classes)
    if absent:
        others = [name for name in names if name not in classes]
        yield (
            f'{len(absent)} of the {len(classes)} classes of {source} are no category of the file: '
            f'{_shorten(absent)};\n'
            + (
                f'{len(others)} of the {len(names)} categories of the file are no class: {_shorten(others)}'
                if others
                else f'categories of the file: {_shorten(names)}'
            )
        )
    elif kept != classes:
        yield (
            f'{source} has the classes {_shorten(classes)},\nbut the file has these categories in the order '
            f'{_shorten(kept)}:\nMMDetection numbers its labels in the order of the file'
        )


def _shorten(items: Sequence) -> str:
    """The first different items and the number of all different ones."""
    items = list(dict.fromkeys(items))
    shown = ', '.join(repr(item) for item in items[:_SHOWN])
    return f'{shown}, ... ({len(items)})' if len(items) > _SHOWN else shown or 'none'
