"""What an annotation file in COCO's format and a dataset's config have to agree on.

MMDetection passes over what does not fit: annotations of a category whose name is no class, of an id that no category
has, or of an image that is not listed are dropped, and the training runs on the rest.
"""

import json
import os
import os.path as osp
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Optional

from mmkron.data_checks.common import Problem, type_name, used_datasets

_HINT = """\
MMDetection would drop what does not fit without a word. The classes of a dataset are set by
  metainfo=dict(classes=(...))
with the names of the file in its order."""
_SHOWN = 5  # names or ids that a message lists


class CocoFile(NamedTuple):
    """The part of an annotation file that is compared; all ids as in the file."""

    problem: str = ''  # why it is no annotation file in COCO's format
    names: tuple = ()  # of the categories, in the file's order
    category_ids: tuple = ()
    images: tuple = ()  # file names
    image_ids: tuple = ()
    annotations: Optional[int] = None  # their number; None without the list
    lost_categories: tuple = ()  # category_id of each annotation that is of no category
    lost_images: tuple = ()  # image_id of each annotation that is of no listed image


def read_coco(path: str) -> CocoFile:
    """Reads an annotation file, once in a process for as long as it does not change.

    The host reads it again, so this adds the time of one ``json.load`` to the start of a run: 3 to 4 s of one CPU core
    for 100 MB, about 15 s for the training set of COCO. Only what a :class:`CocoFile` holds stays in memory.
    """
    return _read(path, os.stat(path).st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: str, _: int) -> CocoFile:
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except ValueError as error:
        return CocoFile(problem=f'it is no JSON: {error}')
    lacking = [key for key in ('images', 'categories') if not isinstance(content, dict) or key not in content]
    if lacking:
        return CocoFile(problem=f'it lacks {" and ".join(map(repr, lacking))}')
    try:
        categories = {each['id']: each['name'] for each in content['categories']}
        images = {each['id']: each['file_name'] for each in content['images']}
        annotations = content.get('annotations')
        used = [(each['category_id'], each['image_id']) for each in annotations or ()]
    except (KeyError, TypeError) as error:
        return CocoFile(problem=f'an entry has not the form of COCO: {type(error).__name__}: {error}')
    return CocoFile(
        names=tuple(each['name'] for each in content['categories']),
        category_ids=tuple(categories),
        images=tuple(images.values()),
        image_ids=tuple(images),
        annotations=None if annotations is None else len(annotations),
        lost_categories=tuple(category for category, _ in used if category not in categories),
        lost_images=tuple(image for _, image in used if image not in images),
    )


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


def dataset_classes(dataset: dict) -> tuple[Any, str]:
    """The classes of a ``CocoDataset`` and where they are set.

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
    try:
        from mmdet.datasets import CocoDataset
    except (ImportError, AssertionError):  # mmdet asserts the versions that it works with
        return None, ''
    return CocoDataset.METAINFO['classes'], 'CocoDataset.METAINFO'


def coco_file(dataset: dict) -> str:
    """Return the annotation file that MMDetection's CocoDataset reads; '' for other types or if it is not on disk."""
    path = osp.expanduser(osp.join(dataset.get('data_root') or '', dataset.get('ann_file') or ''))
    return path if type_name(dataset) == 'CocoDataset' and osp.isfile(path) else ''


def image_folder(dataset: dict) -> str:
    """Return the folder of a dataset's images, which may be remote."""
    folder = (dataset.get('data_prefix') or {}).get('img') or ''
    return folder if '://' in folder else osp.expanduser(osp.join(dataset.get('data_root') or '', folder))


def check_coco(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield what the COCO annotation files of the used datasets and the datasets' classes do not agree on.

    Looks at MMDetection's ``CocoDataset`` only. Categories that are no class are no mistake as long as each class is a
    category: that is how the host trains on some of them. For the cost see :func:`read_coco`.
    """
    for key, dataset in used_datasets(cfg, splits):
        path = coco_file(dataset)
        for text in misfits(read_coco(path), dataset) if path else ():
            yield Problem(osp.abspath(path), text, f'{key}.ann_file = {dataset["ann_file"]!r}', _HINT)


def misfits(content: CocoFile, dataset: dict) -> Iterator[str]:
    """Each thing that a file and a dataset's config do not agree on, with both sides."""
    if content.problem:
        yield f'the file is not in the format of COCO: {content.problem}'
        return
    if content.annotations is None and not dataset.get('test_mode'):
        yield "the file has no 'annotations', which only a dataset with test_mode=True can do without"
    classes, source = dataset_classes(dataset)
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
