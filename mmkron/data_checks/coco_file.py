"""Read an annotation file in COCO's format; note what MMDetection cannot read and what it would drop."""

from __future__ import annotations

import json
import os
import os.path as osp
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mmkron.data_checks.common import part_of

_SHOWN = 60  # characters of a value that a message shows
_HUGE = 1e12  # bound of coordinates, sizes and areas; this also excludes NaN and infinity
_MISSING = object()


class CocoFile(NamedTuple):
    """The part of an annotation file that is compared; arrays have one item per annotation."""

    problems: tuple = ()  # why MMDetection cannot read it; the rest is empty then
    names: tuple = ()  # of the categories, in the file's order
    images: tuple = ()  # file names
    sizes: np.ndarray = np.zeros((0, 2))  # (images, 2): width and height
    annotations: int | None = None  # number of annotations; None without the list
    lost: tuple = ()  # texts on annotations without a category or an image
    dropped: tuple = ()  # (number, text) for each reason for which MMDetection drops annotations
    labels: np.ndarray = np.zeros(0, int)  # position of the category; -1 if the annotation is dropped
    masked: np.ndarray = np.zeros(0, bool)  # whether the segmentation can be read
    thin: np.ndarray = np.zeros(0, bool)  # whether MMDetection ignores all polygons
    crowd: np.ndarray = np.zeros(0, bool)  # whether it is a crowd, which is not learned
    without_crowd: tuple = ()  # positions of the annotations without iscrowd
    corners: int = 0  # boxes that reach beyond their image, if all of them can be read as two corners


def read_coco(path: str) -> CocoFile:
    """Read an annotation file, once per process as long as it does not change.

    The host reads it again, so this adds the time of one ``json.load`` to the start of a run, and about a third of it
    for the checks. Only what a :class:`CocoFile` holds stays in memory.
    """
    return _read(osp.abspath(path), os.stat(path).st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: str, _: int) -> CocoFile:
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (ValueError, RecursionError) as error:
        return CocoFile((f'it is not JSON: {error}',))
    absent = [repr(key) for key in ('images', 'categories') if not isinstance(content, dict) or key not in content]
    if absent:
        return CocoFile((f'it has no {" and ".join(absent)}',))
    problems = tuple(_bad_entries(content)) or tuple(_repeated_ids(content))
    return CocoFile(problems) if problems else _summarize(content)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_HUGE < value < _HUGE


def _is_mask(value: Any) -> bool:
    """Return whether MMDetection can make a mask of it: polygons with numbers, or RLE."""
    if type(value) is dict:
        return isinstance(value.get('counts'), (list, str)) and type(value.get('size')) is list
    polygons = value if type(value) is list else []
    return bool(polygons) and all(type(each) is list and {*map(type, each)} <= {int, float} for each in polygons)


def _is_thin(mask: Any) -> bool:
    """Return whether no polygon of a mask has at least three points, x and y of each."""
    return type(mask) is list and not any(len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in mask)


_ID = (lambda value: type(value) in (int, float, str), 'a number')
_TEXT = (lambda value: type(value) is str, 'a string')
_SIZE = (lambda value: _is_number(value) and value > 0, 'a number above 0')
_FLAG = (lambda value: type(value) in (int, float, bool) and value in (0, 1), '0 or 1')
_BOX = (lambda value: type(value) is list and len(value) == 4 and all(map(_is_number, value)), 'a list of four numbers')
_AREA = (_is_number, 'a number')
# A test of the values of each field and its description. Only iscrowd may be absent.
_FIELDS: dict[str, dict] = {
    'categories': dict(id=_ID, name=_TEXT),
    'images': dict(id=_ID, file_name=_TEXT, height=_SIZE, width=_SIZE),
    'annotations': dict(id=_ID, image_id=_ID, category_id=_ID, bbox=_BOX, area=_AREA, iscrowd=_FLAG),
}


def _note(kind: str, values: Sequence, places: Sequence[int], what: str, key: str = '') -> Iterator[str]:
    """Yield a text on the wrong values, if any, with the first three, such as ``annotations[3].bbox = null``."""
    shown = []
    for i in places[:4]:
        text = '' if values[i] is _MISSING else json.dumps(values[i])
        value = f'{key and "."}{key} = {text[:_SHOWN]}{"..." * (len(text) > _SHOWN)}' if text else ''
        shown.append(f'{kind}[{i}]{value}')
    if shown:
        yield part_of(places, len(values), f'{kind} {what}', shown)


def _bad_entries(content: dict) -> Iterator[str]:
    """Yield entries at which MMDetection would stop."""
    for kind, fields in _FIELDS.items():
        entries = content.get(kind, [])
        if type(entries) is not list:
            yield f'{kind} must be a list, got {json.dumps(entries)[:_SHOWN]}'
            continue
        wrong = [i for i, entry in enumerate(entries) if type(entry) is not dict]
        yield from _note(kind, entries, wrong, 'are not objects')
        for key, (fits, words) in fields.items() if not wrong else ():
            values = [entry.get(key, _MISSING) for entry in entries]
            absent = [i for i, value in enumerate(values) if value is _MISSING]
            wrong = [i for i, value in enumerate(values) if value is not _MISSING and not fits(value)]
            yield from _note(kind, values, absent if key != 'iscrowd' else [], f'have no {key!r}')
            yield from _note(kind, values, wrong, f'have a {key} that is not {words}', key)


def _repeated_ids(content: dict) -> Iterator[str]:
    """Yield repeated ids: MMDetection keeps the last image or category of an id and stops at annotations."""
    for kind in _FIELDS:
        ids = [entry['id'] for entry in content.get(kind, [])]
        counts = Counter(ids)
        repeated = [i for i, number in enumerate(ids) if counts[number] > 1]
        yield from _note(kind, ids, repeated, 'have an id that another one has', 'id')


def _find_parents(content: dict, key: str, kind: str) -> tuple[np.ndarray, list[str]]:
    """Return the position of each annotation's image or category, -1 for none, and a text on those without."""
    known = {entry['id']: i for i, entry in enumerate(content[kind])}
    ids = [entry[key] for entry in content.get('annotations', [])]
    positions = np.array([known.get(number, -1) for number in ids], int)
    what = f'are of no {key.removesuffix("_id")} of the file'
    return positions, [*_note('annotations', ids, np.flatnonzero(positions < 0), what, key)]


def _summarize(content: dict) -> CocoFile:
    entries = content.get('annotations', [])
    sizes = np.array([(entry['width'], entry['height']) for entry in content['images']], float).reshape(-1, 2)
    categories, without_category = _find_parents(content, 'category_id', 'categories')
    images, without_image = _find_parents(content, 'image_id', 'images')
    masks = [entry.get('segmentation') for entry in entries]
    masked = [_is_mask(mask) for mask in masks]
    used = np.array([not entry.get('ignore') for entry in entries], bool) & (images >= 0)
    # Annotations without an image have no limits; they are reported as lost.
    reasons, corners = _lost_boxes(entries, np.vstack([sizes, [np.inf, np.inf]])[images], used)
    dropped = []
    for reason, mask in reasons.items():
        places, key = np.flatnonzero(used & mask), 'area' if 'area' in reason else 'bbox'
        texts = _note('annotations', [entry[key] for entry in entries], places, reason, key)
        dropped += [(len(places), text) for text in texts]
        used = used & ~mask
    return CocoFile(
        names=tuple(entry['name'] for entry in content['categories']),
        images=tuple(entry['file_name'] for entry in content['images']),
        sizes=sizes,
        annotations=len(entries) if 'annotations' in content else None,
        lost=(*without_category, *without_image),
        dropped=tuple(dropped),
        labels=np.where(used, categories, -1),
        masked=np.array(masked, bool),
        thin=np.array([read and _is_thin(mask) for read, mask in zip(masked, masks)], bool),
        crowd=np.array([bool(entry.get('iscrowd')) for entry in entries], bool),
        without_crowd=tuple(i for i, entry in enumerate(entries) if 'iscrowd' not in entry),
        corners=corners,
    )


def _lost_boxes(entries: list, limits: np.ndarray, used: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
    """Return the boxes that MMDetection drops, by reason, and the number of boxes that reach beyond their image.

    The number is 0 unless all used boxes would also be valid as two corners.
    """
    boxes = np.array([entry['bbox'] for entry in entries], float).reshape(-1, 4)
    start, size = boxes[:, :2], boxes[:, 2:]
    overlap = np.minimum(start + size, limits) - np.maximum(start, 0)
    narrow = (size < 1).any(1)
    beyond = used & (start + size > limits + 1).any(1)
    reasons = {
        'have a box that looks relative to the size of its image': narrow & (np.abs(boxes) <= 1).all(1),
        'have a box that is narrower or lower than 1 pixel': narrow,
        'have a box outside of their image': ~(overlap > 0).all(1),
        'have an area of 0 or less': np.array([entry['area'] for entry in entries], float) <= 0,
    }
    return reasons, int(beyond.sum()) if (size > start)[used].all() else 0
