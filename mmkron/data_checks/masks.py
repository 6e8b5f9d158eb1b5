"""Check the label maps of segmentation data, read as MMSegmentation will read them."""

from __future__ import annotations

import os.path as osp
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mmengine.fileio import list_dir_or_file
from PIL import Image

from mmkron.data_checks.common import Data, Problem, find_dicts, first_three, missing_files, part_of, type_name
from mmkron.data_checks.num_classes import find_heads, is_decode_head, output_classes

_HINT = 'A label map has one channel, whose value is the number of the class, from 0, or 255 for pixels to be ignored.'
Faults = Iterator[tuple[str, bool]]  # (text, whether it is only a warning)


def check_mask_files(data: Data) -> Iterator[Problem]:
    """Yield images and label maps that are missing or have another suffix than the dataset's."""
    return _problems(data, _file_faults)


def check_mask_sample(data: Data) -> Iterator[Problem]:
    """Yield the faults of :func:`check_mask_values` in 50 to 99 label maps."""
    return _problems(data, _content_faults, parts=50)


def check_mask_values(data: Data) -> Iterator[Problem]:
    """Yield the label maps that cannot be used, and values that are neither a class nor ignored by each head."""
    return _problems(data, _content_faults)


def _problems(data: Data, find: Callable, parts: int = 0) -> Iterator[Problem]:
    built = data.build()
    if built is None or not all(osp.isdir(built.data_prefix.get(name) or '') for name in ('img_path', 'seg_map_path')):
        return  # missing, remote or refused by the host
    if built.ann_file and not osp.isfile(built.ann_file):
        return
    items = built.load_data_list()
    pairs = [(item['img_path'], item['seg_map_path']) for item in items[:: (parts and len(items) // parts) or 1]]
    steps = [step for _, step in find_dicts(data.config.get('pipeline')) if type_name(step) == 'LoadAnnotations']
    folder, source = osp.abspath(built.data_prefix['seg_map_path']), f'{data.key}.data_prefix'
    for text, warning in find(data, built, pairs, next(iter(steps), None)):
        yield Problem(folder, text, source, (_HINT,), warning=warning)


def _file_faults(data: Data, built: Any, pairs: list[tuple[str, str]], step: dict | None) -> Faults:
    suffix, place = f'img_suffix={built.img_suffix!r}', built.ann_file or built.data_prefix['img_path']
    if not pairs:
        yield f'no images are in {place}' + f' with {suffix}' * (not built.ann_file), False
    for what, i in (('images', 0), ('label maps', 1))[: 1 if step is None else 2]:
        missing = missing_files(pair[i] for pair in pairs)
        if missing:
            yield part_of(missing, len(pairs), f'{what} do not exist'), False
    # Cityscapes has other files next to its label maps; of a list, other files are not meant to be used.
    folder, used = built.data_prefix['seg_map_path'], {label for _, label in pairs}
    names = list_dir_or_file(folder, list_dir=False, suffix=built.seg_map_suffix, recursive=True)
    stray = [] if built.ann_file or step is None else [name for name in names if osp.join(folder, name) not in used]
    if stray and pairs:
        yield f'{len(stray)} label maps have no image that ends in {suffix}: {first_three(sorted(stray))}', True


def _content_faults(data: Data, built: Any, pairs: list[tuple[str, str]], step: dict | None) -> Faults:
    seen: dict[int, list[str]] = {}
    faults: dict[str, list[str]] = {}
    for image, path in pairs if step is not None else ():
        if not osp.exists(path):  # check_mask_files names it
            continue
        fault, values, size = _read(path, step.get('imdecode_backend') or 'pillow')
        if not fault and _image_size(image) not in (None, size):
            fault = 'have another size than their image'
        if fault:
            faults.setdefault(fault, []).append(path)
        for value in values:
            seen.setdefault(value, []).append(path)
    for fault, paths in faults.items():
        yield part_of(paths, len(pairs), f'label maps {fault}'), False
    heads = [head for key, head in find_heads(data.cfg.get('model'), 'model') if is_decode_head(key)]
    yield from _value_faults(built, heads, seen)


def _value_faults(built: Any, heads: list[dict], seen: dict[int, list[str]]) -> Faults:
    outputs = [output_classes(head) for head in heads]
    classes = len(built.metainfo.get('classes') or ())
    number = max([classes, *(output for output in outputs if not classes or output == 2)])
    ignored, labels = {head.get('ignore_index', 255) for head in heads or ({},)}, {v: _label(built, v) for v in seen}
    wrong = sorted(value for value, label in labels.items() if not 0 <= label < number and ignored != {label})
    if wrong and number:
        shown = first_three(f'{value} in {len(seen[value])} ({seen[value][0]})' for value in wrong)
        yield f'values are not classes of 0 to {number - 1} and not ignored: {shown}', False
    if set(seen) == {0, 255} and number > 1:
        yield 'all label maps hold only the values 0 and 255, which is ignored: there is one class to learn', False


def _label(built: Any, value: int) -> int:
    """Return the label that MMSegmentation makes of a pixel's value."""
    if built.reduce_zero_label:
        value = 255 if value in (0, 255) else value - 1
    return (built.label_map or {}).get(value, value)


def _read(path: str, decoder: str) -> tuple[str, list[int], tuple[int, int]]:
    """Return the fault of a label map, its values, and its width and height."""
    import mmcv

    try:
        with open(path, 'rb') as file:
            pixels = mmcv.imfrombytes(file.read(), flag='unchanged', backend=decoder).squeeze()
    except Exception as error:  # of any decoder
        return f'cannot be read ({type(error).__name__})', [], (0, 0)
    if pixels.ndim != 2:
        return f'have {pixels.shape[-1]} channels instead of one', [], (0, 0)
    return '', np.unique(pixels).tolist(), pixels.shape[::-1]


def _image_size(path: str) -> tuple[int, int] | None:
    """Return the width and height of an image, rotated by its EXIF orientation; None if Pillow cannot read it."""
    try:
        with Image.open(path) as image:
            return image.size[::-1] if image.getexif().get(0x0112, 1) >= 5 else image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
