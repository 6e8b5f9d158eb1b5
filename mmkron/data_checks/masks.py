"""Check a sample of the label maps of segmentation data, read as MMSegmentation will read them."""

from __future__ import annotations

import os
import os.path as osp
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmkron.data_checks.classes import build_unread
from mmkron.data_checks.common import Problem, find_dicts, find_heads, first_three, part_of, type_name, used_datasets
from mmkron.data_checks.num_classes import is_decode_head, output_classes
from mmkron.data_checks.paths import image_size, missing_files, spread

_SAMPLE = 50  # label maps that are read for each dataset, evenly spread
_PIXELS = 200_000_000  # reading stops after this number of pixels
_HINT = 'A label map has one channel, whose value is the number of the class, from 0, or 255 for pixels to be ignored.'


class Maps(NamedTuple):
    """Label maps of a dataset."""

    dataset: Any  # MMSegmentation's, which has read nothing yet
    pairs: list  # (image, label map)
    step: dict  # of the pipeline, which loads the label maps

    def label(self, value: int) -> int:
        """Return the label that MMSegmentation makes of a pixel's value."""
        if self.dataset.reduce_zero_label:
            value = 255 if value in (0, 255) else value - 1
        return (self.dataset.label_map or {}).get(value, value)

    def read(self, path: str) -> tuple[str, list[int], tuple[int, int]]:
        """Return the fault of a label map, its values, and its width and height."""
        return _read(path, self.step.get('imdecode_backend') or 'pillow')


def find_maps(dataset: dict, kind: type | None) -> Maps | None:
    """Return the label maps of a dataset that reads them as MMSegmentation's BaseSegDataset does, else None."""
    steps = [step for _, step in find_dicts(dataset.get('pipeline')) if type_name(step) == 'LoadAnnotations']
    built = build_unread(dataset, kind, 'mmseg.datasets.basesegdataset') if steps else None
    if built is None or not (dataset.get('data_prefix') or {}).get('seg_map_path'):
        return None
    if not all(osp.isdir(built.data_prefix.get(name) or '') for name in ('img_path', 'seg_map_path')):
        return None
    return Maps(built, [(item['img_path'], item['seg_map_path']) for item in built.load_data_list()], steps[0])


def _files(folder: str, ending: str = '') -> list[str]:
    paths = [osp.relpath(osp.join(top, name), folder) for top, _, names in os.walk(folder) for name in names]
    return [path for path in paths if path.endswith(ending) and not osp.basename(path).startswith('.')]


def _read(path: str, backend: str) -> tuple[str, list[int], tuple[int, int]]:
    import mmcv

    try:
        with open(path, 'rb') as file:
            pixels = mmcv.imfrombytes(file.read(), flag='unchanged', backend=backend).squeeze()
    except Exception as error:  # of any decoder
        return f'that cannot be read ({type(error).__name__})', [], (0, 0)
    if pixels.ndim != 2:
        return f'with {pixels.shape[-1]} channels instead of one', [], (0, 0)
    values = np.flatnonzero(np.bincount(pixels.ravel())) if pixels.dtype == np.uint8 else np.unique(pixels)
    return '', [int(value) for value in values], pixels.shape[::-1]


def check_masks(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield faults in a sample of the label maps of segmentation data."""
    heads = [head for key, head in find_heads(cfg.get('model'), 'model') if is_decode_head(key)]
    heads = [head for head in heads if isinstance(head.get('num_classes'), int)]
    for key, dataset, kind in used_datasets(cfg, splits):
        maps = find_maps(dataset, kind)
        found = [] if maps is None else [*_file_problems(maps)]
        if maps is not None and all(warning for _, warning in found):
            found += _value_problems(maps, heads, key.startswith('train'))
        for text, warning in found:
            source = f'{key}.data_prefix.seg_map_path = {dataset["data_prefix"]["seg_map_path"]!r}'
            yield Problem(osp.abspath(maps.dataset.data_prefix['seg_map_path']), text, source, _HINT, warning)


def _file_problems(maps: Maps) -> Iterator[tuple[str, bool]]:
    dataset, used = maps.dataset, {path for _, path in maps.pairs}
    images, folder = (dataset.data_prefix[name] for name in ('img_path', 'seg_map_path'))
    if not used:
        endings = first_three(sorted({osp.splitext(name)[1] for name in _files(images)})) or 'none'
        yield f'no image in {images} ends in img_suffix={dataset.img_suffix!r}; files there end in: {endings}', False
    missing = missing_files(path for _, path in maps.pairs)
    if missing:
        yield part_of(missing, len(maps.pairs), 'images have no label map'), False
    # Cityscapes has other files next to its label maps; of a list, other files are not meant to be used.
    files = _files(folder, dataset.seg_map_suffix) if used and not osp.isfile(dataset.ann_file) else []
    stray = [name for name in files if osp.join(folder, name) not in used]
    if stray:
        text = f'files have no image that ends in img_suffix={dataset.img_suffix!r}: {first_three(stray)}'
        yield f'{len(stray)} {text}', True
    if maps.step.get('reduce_zero_label') not in (None, dataset.reduce_zero_label):
        zero = dataset.reduce_zero_label
        yield f'reduce_zero_label is {zero} in the dataset, but {not zero} in its LoadAnnotations', False


def _value_problems(maps: Maps, heads: list, trained_on: bool) -> Iterator[tuple[str, bool]]:
    """Yield faults of a sample of label maps, whose values must be classes or be ignored by each head."""
    total, seen, faults, read, pixels = len(maps.pairs), {}, {}, 0, 0
    for image, path in [maps.pairs[i] for i in spread(total, _SAMPLE)]:
        fault, values, size = maps.read(path)
        if not fault and image_size(image) not in (None, size):
            fault = 'of another size than their image'
        if fault:
            faults.setdefault(fault, []).append(path)
        for value in values:
            seen.setdefault(value, []).append(path)
        read, pixels = read + 1, pixels + size[0] * size[1]
        if pixels > _PIXELS:
            break
    sample = f';\n{read} of the {total} label maps were read'
    for fault, paths in faults.items():
        yield f'{len(paths)} label maps {fault}: {first_three(paths)}{sample}', False
    names = dict(enumerate(maps.dataset.metainfo.get('classes') or ()))
    outputs = [output_classes(head) for head in heads]
    number = max([len(names), *(output for output in outputs if not names or output == 2)])
    if not number or not seen:
        return
    labels = {value: maps.label(value) for value in seen}
    ignored = {head.get('ignore_index', 255) for head in heads or ({},)}
    wrong = sorted(value for value, label in labels.items() if not 0 <= label < number and ignored != {label})
    if wrong:
        shown = first_three(f'{value} in {len(seen[value])} ({seen[value][0]})' for value in wrong)
        yield f'values are no classes of 0 to {number - 1} and not ignored: {shown}{sample}', False
    # The rest of the label maps is read only until one has another value.
    if set(seen) == {0, 255} and number > 1 and all(set(maps.read(path)[1]) <= {0, 255} for _, path in maps.pairs):
        yield 'all label maps hold only the values 0 and 255, which is ignored: there is one class to learn', False
        return
    unused = [label for label in range(number) if label not in labels.values()]
    if unused and trained_on:
        shown = [f'{label} ({names.get(label, "")})' for label in unused]
        yield part_of(unused, number, 'classes do not occur', shown) + sample, True
