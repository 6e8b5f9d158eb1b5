"""Compare an annotation file in COCO's format with the dataset: MMDetection drops what does not fit, and trains on."""

from __future__ import annotations

import json
import os
import os.path as osp
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mmkron.data_checks.class_labels import class_names
from mmkron.data_checks.common import Data, Problem, first_three, missing_files, part_of

_HINT = """\
The classes of a dataset are set by metainfo=dict(classes=(...)), with the names of the file in its order. A box is
[x, y, width, height] in pixels of its image, an area is in pixels."""
_FEW = 1e-3  # share of the boxes that can be dropped without a warning, as in COCO's own files
Faults = Iterator[tuple[str, bool]]  # (text, whether it is only a warning)


class CocoFile(NamedTuple):
    """The part of an annotation file that is compared."""

    names: tuple  # of the categories, in the file's order
    images: tuple  # file names
    sizes: np.ndarray  # (images, 2): width and height
    annotations: int | None  # number of annotations; None without the list
    dropped: tuple  # (key, number, text) for each reason for which MMDetection drops annotations
    labels: np.ndarray  # (annotations,): position of the category; -1 if the annotation is dropped
    crowd: np.ndarray  # (annotations,): whether it is a crowd, which is not learned


@lru_cache(maxsize=8)
def read_coco(path: str, mtime: int) -> CocoFile | str:
    """Read an annotation file, once per process and time of its last change; return what is wrong if it fails."""
    try:
        with open(path, encoding='utf-8') as file:
            return _summarize(json.load(file))
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        return f'it cannot be read: {type(error).__name__}: {error}'


def _summarize(content: dict) -> CocoFile:
    entries = content.get('annotations', [])
    sizes = np.array([(entry['width'], entry['height']) for entry in content['images']], float).reshape(-1, 2)
    used = np.array([not entry.get('ignore') for entry in entries], bool)
    labels, dropped = _positions(entries, 'category_id', content['categories']), []
    for key, reason, mask in _reasons(entries, labels, _positions(entries, 'image_id', content['images']), sizes):
        places = np.flatnonzero(used & mask)
        shown = [f'annotations[{i}].{key} = {json.dumps(entries[i][key])}' for i in places[:4]]
        dropped += [(key, len(places), part_of(places, len(entries), f'annotations {reason}', shown))] * bool(shown)
        used = used & ~mask
    return CocoFile(
        names=tuple(entry['name'] for entry in content['categories']),
        images=tuple(entry['file_name'] for entry in content['images']),
        sizes=sizes,
        annotations=len(entries) if 'annotations' in content else None,
        dropped=tuple(dropped),
        labels=np.where(used, labels, -1),
        crowd=np.array([bool(entry.get('iscrowd')) for entry in entries], bool),
    )


def _positions(entries: list, key: str, parents: list) -> np.ndarray:
    """Return the position of each annotation's category or image, -1 for none."""
    known = {entry['id']: i for i, entry in enumerate(parents)}
    return np.array([known.get(entry[key], -1) for entry in entries], int)


def _reasons(entries: list, labels: np.ndarray, images: np.ndarray, sizes: np.ndarray) -> list[tuple]:
    """Return (key, reason, which annotations) for each reason for which MMDetection drops annotations."""
    boxes = np.array([entry['bbox'] for entry in entries], float).reshape(len(entries), 4)
    start, size = boxes[:, :2], boxes[:, 2:]
    limits = np.vstack([sizes, [np.inf, np.inf]])[images]  # the last row is for annotations without an image
    overlap = np.minimum(start + size, limits) - np.maximum(start, 0)
    return [
        ('category_id', 'are of no category of the file', labels < 0),
        ('image_id', 'are of no image of the file', images < 0),
        ('bbox', 'have a box that is narrower or lower than 1 pixel', (size < 1).any(1)),
        ('bbox', 'have a box outside of their image', ~(overlap > 0).all(1)),
        ('area', 'have an area of 0 or less', np.array([entry['area'] for entry in entries], float) <= 0),
    ]


def check_coco(data: Data) -> Iterator[Problem]:
    """Yield faults in the annotation file of a dataset that MMDetection's CocoDataset reads.

    Categories that are not classes are no fault if each class is a category: the host trains on some of them this way.
    """
    built = data.build()
    if built is None or not osp.isfile(built.ann_file):
        return
    path = osp.abspath(built.ann_file)
    content = read_coco(path, os.stat(path).st_mtime_ns)
    faults = [(content, False)] if isinstance(content, str) else _faults(data, built, content)
    for text, warning in faults:
        yield Problem(path, text, data.source('ann_file'), (_HINT,), warning=warning)


def _faults(data: Data, built: Any, content: CocoFile) -> Faults:
    classes, source = class_names(data)
    yield from _image_faults(built, content)
    yield from _name_faults(content.names, classes or (), source)
    for key, count, text in content.dropped:
        yield from [(text, False)] if key.endswith('_id') else _share(count, content.annotations, text)
    kept = np.isin(content.labels, [i for i, name in enumerate(content.names) if classes is None or name in classes])
    if not (kept & ~content.crowd).any() and not (built.test_mode and content.annotations is None):
        yield f'none of the {len(content.images)} images has a usable box of a class', built.test_mode


def _share(count: int, total: int, text: str) -> Faults:
    """Yield a fault of some boxes or images; it is only a warning up to half of them."""
    if count > _FEW * total:
        yield text, 2 * count <= total


def _image_faults(built: Any, content: CocoFile) -> Faults:
    """Yield images that are missing or that the dataset drops as too small."""
    folder, total = built.data_prefix.get('img') or '', len(content.images)
    own_paths = type(built).parse_data_info.__module__ != 'mmdet.datasets.coco'
    paths = () if '://' in folder or own_paths else [osp.join(folder, name) for name in content.images]
    missing = missing_files(paths)
    if missing:
        yield part_of(missing, total, 'images that it lists do not exist'), False
    least = 0 if built.test_mode else (built.filter_cfg or {}).get('min_size', 0)
    small = int((content.sizes.min(1) < least).sum())
    text = f'images are smaller than filter_cfg.min_size={least} and are dropped'
    yield from _share(small, total, f'{small} of the {total} {text}')


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
