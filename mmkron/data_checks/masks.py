"""Label maps of segmentation data: a sample of them is read as MMSegmentation will read them."""

import os
import os.path as osp
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from mmkron.data_checks.classes import build_unread, dataset_type
from mmkron.data_checks.common import Problem, find_dicts, first_three, part_of, type_name, used_datasets
from mmkron.data_checks.num_classes import find_heads, is_decode_head, output_classes
from mmkron.data_checks.paths import image_size, missing_files, spread

_SAMPLE = 50  # label maps that are read for each dataset, evenly spread
_PIXELS = 200_000_000  # after so many no further one is read
_HINT = 'A label map has one channel, whose value is the number of the class, from 0, or 255 for pixels to be ignored.'


class Maps(NamedTuple):
    """Label maps of a dataset and how they become labels."""

    dataset: Any  # MMSegmentation's, which has read nothing yet
    pairs: list  # (image, label map)
    step: dict  # of the pipeline, which loads the label maps

    def label(self, value: int) -> int:
        """Return the label that MMSegmentation makes of a pixel's value."""
        if self.dataset.reduce_zero_label:
            value = 255 if value in (0, 255) else value - 1
        return (self.dataset.label_map or {}).get(value, value)


def find_maps(dataset: dict, kind: Optional[type]) -> Optional[Maps]:
    """Return the label maps of a dataset that reads them as MMSegmentation's BaseSegDataset does, else None."""
    steps = [step for _, step in find_dicts(dataset.get('pipeline')) if type_name(step) == 'LoadAnnotations']
    built = build_unread(dataset, kind, 'mmseg.datasets.basesegdataset') if steps else None
    if built is None or not (dataset.get('data_prefix') or {}).get('seg_map_path'):
        return None
    folders = [built.data_prefix.get(name) or '' for name in ('img_path', 'seg_map_path')]
    if not all(map(osp.isdir, folders)):
        return None
    return Maps(built, [(item['img_path'], item['seg_map_path']) for item in built.load_data_list()], steps[0])


def _files(folder: str) -> list[str]:
    return [
        osp.relpath(osp.join(top, name), folder)
        for top, _, names in os.walk(folder)
        for name in names
        if not name.startswith('.')
    ]


def _read(path: str, backend: str) -> tuple[str, list[int], tuple[int, int]]:
    """Return what is wrong with a label map, its values, and its width and height."""
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
    """Yield what is wrong with the label maps of segmentation data, of which a sample is read."""
    heads = [head for key, head in find_heads(cfg.get('model'), 'model') if is_decode_head(key)]
    heads = [head for head in heads if isinstance(head.get('num_classes'), int)]
    for key, dataset in used_datasets(cfg, splits):
        maps = find_maps(dataset, dataset_type(dataset, cfg.get('default_scope')))
        if maps is None:
            continue
        found = [*_file_problems(maps)]
        if not any(not warning for _, warning in found):
            found += _value_problems(maps, heads, key.startswith('train'))
        for text, warning in found:
            source = f'{key}.data_prefix.seg_map_path = {dataset["data_prefix"]["seg_map_path"]!r}'
            yield Problem(osp.abspath(maps.dataset.data_prefix['seg_map_path']), text, source, _HINT, warning)


def _file_problems(maps: Maps) -> Iterator[tuple[str, bool]]:
    images, folder = (maps.dataset.data_prefix[name] for name in ('img_path', 'seg_map_path'))
    suffix, zero = maps.dataset.img_suffix, maps.dataset.reduce_zero_label
    ending = maps.dataset.seg_map_suffix  # Cityscapes has other files beside its label maps
    if not maps.pairs:
        others = first_three(sorted({osp.splitext(name)[1] for name in _files(images)}))
        yield f'no image in {images} ends in img_suffix={suffix!r}; files there end in: {others or "none"}', False
    missing = missing_files(path for _, path in maps.pairs)
    if missing:
        yield part_of(missing, len(maps.pairs), 'images have no label map'), False
    used = {path for _, path in maps.pairs}
    listed = osp.isfile(maps.dataset.ann_file)
    files = [] if listed else [name for name in _files(folder) if name.endswith(ending)]
    stray = [name for name in files if osp.join(folder, name) not in used]
    if stray and maps.pairs:
        yield f'{len(stray)} files have no image that ends in img_suffix={suffix!r}: {first_three(stray)}', True
    if maps.step.get('reduce_zero_label') not in (None, zero):
        yield f'reduce_zero_label is {zero} in the dataset, but {not zero} in its LoadAnnotations', False


def _value_problems(maps: Maps, heads: list, trained_on: bool) -> Iterator[tuple[str, bool]]:
    """Yield what a sample of label maps shows; their values have to be classes or to be ignored by each head."""
    backend, total = maps.step.get('imdecode_backend') or 'pillow', len(maps.pairs)
    seen, faults, read, pixels = {}, {}, 0, 0  # value -> label maps with it; what is wrong -> label maps
    for image, path in [maps.pairs[i] for i in spread(total, _SAMPLE)]:
        fault, values, size = _read(path, backend)
        if not fault and image_size(image) not in (None, size):
            fault = 'of another size than their image'
        if fault:
            faults.setdefault(fault, []).append(path)
        for value in values:
            seen.setdefault(value, []).append(path)
        read, pixels = read + 1, pixels + size[0] * size[1]
        if pixels > _PIXELS:
            break
    looked = f'{read} of the {total} label maps were looked at'
    for fault, paths in faults.items():
        yield f'{len(paths)} label maps {fault}: {first_three(paths)};\n{looked}', False
    names = dict(enumerate(maps.dataset.metainfo.get('classes') or ()))
    number = max([len(names), *(output_classes(head) for head in heads if not names or output_classes(head) == 2)])
    if not number or not seen:
        return
    labels = {value: maps.label(value) for value in seen}
    ignored = [head.get('ignore_index', 255) for head in heads or ({},)]
    odd = [value for value, label in labels.items() if not 0 <= label < number]
    wrong = [value for value in odd if any(labels[value] != index for index in ignored)]
    if wrong:
        shown = [f'{value} in {len(seen[value])} ({seen[value][0]})' for value in sorted(wrong)]
        yield f'values are no classes of 0 to {number - 1} and not ignored: {first_three(shown)};\n{looked}', False
    if set(seen) == {0, 255} and number > 1 and _only_two(maps, backend):
        yield 'all label maps hold only the values 0 and 255, which is ignored: there is one class to learn', False
        return
    unused = [label for label in range(number) if label not in labels.values()]
    if unused and trained_on:
        shown = [f'{label} ({names.get(label, "")})' for label in unused]
        yield f'{part_of(unused, number, "classes do not occur", shown)};\n{looked}', True


def _only_two(maps: Maps, backend: str) -> bool:
    """Return whether all label maps hold only 0 and 255; the first one with another value ends the search."""
    return all(set(_read(path, backend)[1]) <= {0, 255} for _, path in maps.pairs)
