"""What MMDetection reads of an annotation file in COCO's format, what it cannot read, and what it would drop."""

import json
import os
import os.path as osp
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, Optional

import numpy as np

_SHOWN = 60  # characters of a value that a message shows
_HUGE = 1e12  # coordinates, sizes and areas are below it; this also excludes NaN and infinity
_MISSING = object()


class CocoFile(NamedTuple):
    """The part of an annotation file that is compared; all ids as in the file."""

    problems: tuple = ()  # why MMDetection cannot read it; the rest is empty then
    names: tuple = ()  # of the categories, in the file's order
    category_ids: tuple = ()
    images: tuple = ()  # file names
    image_ids: tuple = ()
    sizes: np.ndarray = np.zeros((0, 2))  # (images, 2): width and height
    annotations: Optional[int] = None  # their number; None without the list
    lost_categories: tuple = ()  # category_id of each annotation that is of no category
    lost_images: tuple = ()  # image_id of each annotation that is of no listed image
    dropped: tuple = ()  # (number, text) for each reason for which MMDetection drops annotations
    labels: np.ndarray = np.zeros(0, int)  # position of each annotation's category; -1 if it is dropped
    pictures: np.ndarray = np.zeros(0, int)  # position of each annotation's image, or -1
    masked: np.ndarray = np.zeros(0, bool)  # whether each annotation has a segmentation that can be read
    thin: np.ndarray = np.zeros(0, bool)  # whether each annotation has polygons, but none with an area
    crowd: np.ndarray = np.zeros(0, bool)  # whether each annotation is a crowd, which is not learned
    without_crowd: tuple = ()  # positions of the annotations without iscrowd
    corners: int = 0  # boxes that reach beyond their image, if all of them can be read as two corners


def read_coco(path: str) -> CocoFile:
    """Read an annotation file, once per process for as long as it does not change.

    The host reads it again, so this adds the time of one ``json.load`` to the start of a run, and about a third of it
    for the checks. Only what a :class:`CocoFile` holds stays in memory.
    """
    path = osp.abspath(path)
    return _read(path, os.stat(path).st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: str, _: int) -> CocoFile:
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (ValueError, RecursionError) as error:
        return CocoFile((f'it is not JSON: {error}',))
    lacking = [key for key in ('images', 'categories') if not isinstance(content, dict) or key not in content]
    if lacking:
        return CocoFile((f'it lacks {" and ".join(map(repr, lacking))}',))
    problems = tuple(_bad_entries(content)) or tuple(_repeated_ids(content))
    return CocoFile(problems) if problems else _summarize(content)


def _is_id(value: Any) -> bool:
    return type(value) in (int, float, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_HUGE < value < _HUGE


def _is_size(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_box(value: Any) -> bool:
    return type(value) is list and len(value) == 4 and all(map(_is_number, value))


def _is_flag(value: Any) -> bool:
    return type(value) in (int, float, bool) and value in (0, 1)


def _is_mask(value: Any) -> bool:
    """Whether MMDetection can make a mask of it: polygons with numbers, or RLE."""
    if type(value) is dict:
        return isinstance(value.get('counts'), (list, str)) and type(value.get('size')) is list
    if type(value) is not list or not value:
        return False
    return all(type(polygon) is list and {*map(type, polygon)} <= {int, float} for polygon in value)


# Of each list: key, whether it may be absent, what fits, and what that is in words.
_FIELDS: dict[str, list[tuple[str, bool, Callable, str]]] = {
    'categories': [
        ('id', False, _is_id, 'a number'),
        ('name', False, lambda value: type(value) is str, 'a string'),
    ],
    'images': [
        ('id', False, _is_id, 'a number'),
        ('file_name', False, lambda value: type(value) is str, 'a string'),
        ('height', False, _is_size, 'a number above 0'),
        ('width', False, _is_size, 'a number above 0'),
    ],
    'annotations': [
        ('id', False, _is_id, 'a number'),
        ('image_id', False, _is_id, 'a number'),
        ('category_id', False, _is_id, 'a number'),
        ('bbox', False, _is_box, 'a list of four numbers'),
        ('area', False, _is_number, 'a number'),
        ('iscrowd', True, _is_flag, '0 or 1'),
    ],
}


def _bad_entries(content: dict) -> Iterator[str]:
    """Yield what MMDetection would stop at, with the first three entries of each kind by name."""
    for kind, fields in _FIELDS.items():
        entries = content.get(kind, [])
        if type(entries) is not list:
            yield f'{kind} must be a list, got {_short(entries)}'
            continue
        wrong = [i for i, entry in enumerate(entries) if type(entry) is not dict]
        if wrong:
            yield f'{_of(wrong, entries, kind)} are not objects: {_name(kind, wrong, entries.__getitem__)}'
            continue
        for key, optional, fits, words in fields:
            column = [entry.get(key, _MISSING) for entry in entries]
            lacking = [] if optional else [i for i, value in enumerate(column) if value is _MISSING]
            if lacking:
                yield f'{_of(lacking, entries, kind)} lack {key!r}: {_name(kind, lacking)}'
            wrong = [i for i, value in enumerate(column) if not fits(value) and value is not _MISSING]
            if wrong:
                shown = _name(kind, wrong, column.__getitem__, f'.{key}')
                yield f'{_of(wrong, entries, kind)} have a {key} that is not {words}: {shown}'


def _repeated_ids(content: dict) -> Iterator[str]:
    """Yield which ids occur twice: MMDetection keeps the last image or category of an id and stops at annotations."""
    for kind in _FIELDS:
        ids = [entry['id'] for entry in content.get(kind, [])]
        repeated = {number for number, count in Counter(ids).items() if count > 1}
        where = [i for i, number in enumerate(ids) if number in repeated]
        if where:
            shown = _name(kind, where, ids.__getitem__, '.id')
            yield f'{_of(where, ids, kind)} have an id that another one has: {shown}'


def _of(part: Sequence, whole: Sequence, kind: str) -> str:
    return f'{len(part)} of the {len(whole)} {kind}'


def _name(kind: str, places: Sequence[int], value: Optional[Callable] = None, key: str = '') -> str:
    """Return the first three entries by name, such as ``annotations[3].bbox = None``."""
    shown = [f'{kind}[{i}]{key}' + ('' if value is None else f' = {_short(value(i))}') for i in places[:3]]
    return ', '.join(shown) + (', ...' if len(places) > 3 else '')


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'


def _summarize(content: dict) -> CocoFile:
    categories = {entry['id']: i for i, entry in enumerate(content['categories'])}
    images = {entry['id']: i for i, entry in enumerate(content['images'])}
    entries = content.get('annotations', [])
    labels = np.array([categories.get(entry['category_id'], -1) for entry in entries], int)
    pictures = np.array([images.get(entry['image_id'], -1) for entry in entries], int)
    sizes = np.array([(entry['width'], entry['height']) for entry in content['images']], float).reshape(-1, 2)
    boxes = np.array([entry['bbox'] for entry in entries], float).reshape(-1, 4)
    area = np.array([entry['area'] for entry in entries], float)
    # Those without an image are reported as such.
    limits = np.vstack([sizes, [np.inf, np.inf]])[pictures]
    unused = np.array([bool(entry.get('ignore')) for entry in entries], bool) | (pictures < 0)
    reasons, corners = _lost_boxes(boxes, area, limits, ~unused)
    texts = []
    for reason, lost in reasons.items():
        places = np.flatnonzero(lost)
        shown = _name('annotations', places, lambda i: entries[i]['bbox'], '.bbox')
        if reason == _FLAT:
            shown = _name('annotations', places, lambda i: entries[i]['area'], '.area')
        texts.append((len(places), f'{_of(places, entries, "annotations")} {reason}: {shown}'))
        unused = unused | lost
    return CocoFile(
        names=tuple(entry['name'] for entry in content['categories']),
        category_ids=tuple(categories),
        images=tuple(entry['file_name'] for entry in content['images']),
        image_ids=tuple(images),
        sizes=sizes,
        annotations=len(entries) if 'annotations' in content else None,
        lost_categories=tuple(entry['category_id'] for entry, label in zip(entries, labels) if label < 0),
        lost_images=tuple(entry['image_id'] for entry, picture in zip(entries, pictures) if picture < 0),
        dropped=tuple(texts),
        labels=np.where(unused, -1, labels),
        pictures=pictures,
        masked=np.array(_masked(entries), bool),
        thin=np.array([_is_thin(entry.get('segmentation')) for entry in entries], bool),
        crowd=np.array([bool(entry.get('iscrowd')) for entry in entries], bool),
        without_crowd=tuple(i for i, entry in enumerate(entries) if 'iscrowd' not in entry),
        corners=corners,
    )


def _masked(entries: Sequence[dict]) -> list[bool]:
    masks = [entry.get('segmentation') for entry in entries]
    polygons = [*chain.from_iterable(mask for mask in masks if type(mask) is list)]
    # The types of all numbers at once: COCO has tens of millions.
    plain = {*map(type, polygons)} <= {list} and {*map(type, chain.from_iterable(polygons))} <= {int, float}
    return [bool(mask) if plain and type(mask) is list else _is_mask(mask) for mask in masks]


def _is_thin(mask: Any) -> bool:
    """Whether MMDetection uses none of the polygons, of which each needs at least three points."""
    return type(mask) is list and not any(type(each) is list and len(each) > 5 and len(each) % 2 == 0 for each in mask)


_FLAT = 'have an area of 0 or less'


def _lost_boxes(
    boxes: np.ndarray, area: np.ndarray, limits: np.ndarray, used: np.ndarray
) -> tuple[dict[str, np.ndarray], int]:
    """Return which boxes MMDetection drops, by the first reason, and how many reach beyond their image.

    The second number is 0 unless every box that is used would also be one if it were given by two corners.
    """
    start, size = boxes[:, :2], boxes[:, 2:]
    overlap = np.minimum(start + size, limits) - np.maximum(start, 0)
    relative = used & (size < 1).any(1) & (np.abs(boxes) <= 1).all(1)
    reasons = {
        'have a box that looks relative to the size of its image': relative,
        'have a box that is narrower or lower than 1 pixel': (size < 1).any(1),
        'have a box outside of their image': ~(overlap > 0).all(1),
        _FLAT: area <= 0,
    }
    left, lost = used, {}
    for reason, mask in reasons.items():
        if (left & mask).any():
            lost[reason] = left & mask
        left = left & ~mask
    beyond = used & (start + size > limits + 1).any(1)
    return lost, int(beyond.sum()) if (size > start)[used].all() else 0
