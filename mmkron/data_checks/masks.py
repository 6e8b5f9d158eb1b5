"""Label maps of segmentation data: a sample of them is read as MMSegmentation will read them."""

import inspect
import os
import os.path as osp
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
from PIL import Image

from mmkron.data_checks.classes import class_names, dataset_path, dataset_type, read_from
from mmkron.data_checks.coco import image_size, missing_images
from mmkron.data_checks.common import Problem, first_three, type_name, used_datasets
from mmkron.data_checks.num_classes import find_heads, is_decode_head, output_classes

_SAMPLE = 50  # label maps that are read for each dataset, evenly spread
_PIXELS = 200_000_000  # after so many no further one is read
_HINT = 'A label map has one channel, whose value is the number of the class, from 0, or 255 for pixels to be ignored.'


class Maps(NamedTuple):
    """Label maps of a dataset and how they become labels."""

    pairs: list  # (image, label map)
    folders: tuple  # of the images, of the label maps
    suffixes: tuple
    listed: bool  # the images are those of a list
    names: Optional[tuple]  # of the classes
    label_map: dict
    zero: Any  # reduce_zero_label of the dataset
    step: dict  # of the pipeline, which loads the label maps

    def label(self, value: int) -> int:
        """Return the label that MMSegmentation makes of a pixel's value."""
        if self.zero:
            value = 255 if value in (0, 255) else value - 1
        return self.label_map.get(value, value)


class Seen(NamedTuple):
    """What a sample of label maps shows."""

    number: int  # label maps that were read
    values: dict  # value -> those in which it occurs
    faults: dict  # what is wrong -> label maps


def find_maps(dataset: dict, kind: Optional[type]) -> Optional[Maps]:
    """Return the label maps of a dataset that reads them as MMSegmentation's BaseSegDataset does, else None."""
    step, prefix = _loader(dataset.get('pipeline')), dataset.get('data_prefix')
    if step is None or not read_from(kind, 'mmseg.datasets.basesegdataset') or not isinstance(prefix, dict):
        return None
    folders = tuple(dataset_path(dataset, prefix.get(name)) for name in ('img_path', 'seg_map_path'))
    if not prefix.get('seg_map_path') or not all(map(osp.isdir, folders)):
        return None
    images, maps = folders
    suffixes = tuple(_argument(dataset, kind, name) or '' for name in ('img_suffix', 'seg_map_suffix'))
    listed = dataset_path(dataset, dataset['ann_file']) if dataset.get('ann_file') else ''
    if osp.isfile(listed):
        with open(listed, encoding='utf-8') as file:
            stems = [line.strip() for line in file]
    else:
        stems = sorted(name[: len(name) - len(suffixes[0])] for name in _files(images) if name.endswith(suffixes[0]))
    pairs = [(osp.join(images, stem + suffixes[0]), osp.join(maps, stem + suffixes[1])) for stem in stems]
    names, _ = class_names(dataset, kind)
    label_map = kind.get_label_map(names) or {}
    zero = bool(_argument(dataset, kind, 'reduce_zero_label'))
    return Maps(pairs, folders, suffixes, osp.isfile(listed), names, label_map, zero, step)


def _files(folder: str) -> list[str]:
    return [
        osp.relpath(osp.join(top, name), folder)
        for top, _, names in os.walk(folder)
        for name in names
        if not name.startswith('.')
    ]


def _argument(dataset: dict, kind: type, name: str) -> Any:
    """Return an argument of a dataset, or the default of the nearest class that has one."""
    for each in kind.__mro__:
        parameter = inspect.signature(each).parameters.get(name)
        if name not in dataset and parameter is not None:
            return parameter.default
    return dataset.get(name)


def _loader(steps: Any) -> Optional[dict]:
    """Return the step of a pipeline that loads label maps, also from inside of others."""
    if isinstance(steps, dict):
        return steps if type_name(steps) == 'LoadAnnotations' else _loader(list(steps.values()))
    found = map(_loader, steps) if isinstance(steps, (list, tuple)) else ()
    return next((step for step in found if step is not None), None)


def read_maps(pairs: Sequence[tuple[str, str]], backend: str) -> Seen:
    """Read label maps until they have too many pixels, and note what they hold."""
    seen, pixels = Seen(0, {}, {}), 0
    for image, path in pairs:
        fault, values, size = _read(path, backend)
        if not fault and image_size(image) not in (None, size):
            fault = 'of another size than their image'
        if fault:
            seen.faults.setdefault(fault, []).append(path)
        for value in values:
            seen.values.setdefault(value, []).append(path)
        seen = seen._replace(number=seen.number + 1)
        pixels += size[0] * size[1]
        if pixels > _PIXELS:
            break
    return seen


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
    if pixels.dtype == np.uint8:  # the usual case, in a few milliseconds
        values = [value for value, number in enumerate(Image.fromarray(pixels).histogram()) if number]
    else:
        values = [int(value) for value in np.unique(pixels)]
    return '', values, (pixels.shape[1], pixels.shape[0])


def check_masks(cfg: Any, splits: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with the label maps of segmentation data, of which a sample is read."""
    heads = [head for key, head in find_heads(cfg.get('model'), 'model') if is_decode_head(key)]
    heads = [head for head in heads if isinstance(head.get('num_classes'), int)]
    for key, dataset in used_datasets(cfg, splits):
        try:
            maps = find_maps(dataset, dataset_type(dataset, cfg.get('default_scope')))
        except ValueError:  # reported with the number of classes
            continue
        if maps is None:
            continue
        found = [*_file_problems(maps)]
        if not any(not warning for _, warning in found):
            found += _value_problems(maps, heads, key.startswith('train'))
        for text, warning in found:
            source = f'{key}.data_prefix.seg_map_path = {dataset["data_prefix"]["seg_map_path"]!r}'
            yield Problem(osp.abspath(maps.folders[1]), text, source, _HINT, warning)


def _file_problems(maps: Maps) -> Iterator[tuple[str, bool]]:
    (images, folder), (suffix, ending) = maps.folders, maps.suffixes
    if not maps.pairs:
        others = first_three(sorted({osp.splitext(name)[1] for name in _files(images)}))
        yield f'no image in {images} ends in img_suffix={suffix!r}; files there end in: {others or "none"}', False
    missing = missing_images([osp.relpath(path, folder) for _, path in maps.pairs], folder)
    if missing:
        yield f'{len(missing)} of the {len(maps.pairs)} images have no label map: {first_three(missing)}', False
    used = {path for _, path in maps.pairs}
    stray = [] if maps.listed else [name for name in _files(folder) if osp.join(folder, name) not in used]
    stray = [name for name in stray if name.endswith(ending)]  # Cityscapes has other files beside its label maps
    if stray and maps.pairs:
        yield f'{len(stray)} files have no image that ends in img_suffix={suffix!r}: {first_three(stray)}', True
    if maps.step.get('reduce_zero_label') not in (None, maps.zero):
        yield f'reduce_zero_label is {maps.zero} in the dataset, but {not maps.zero} in its LoadAnnotations', False


def _value_problems(maps: Maps, heads: list, trained_on: bool) -> Iterator[tuple[str, bool]]:
    """Yield what a sample of label maps shows; their values have to be classes or to be ignored by each head."""
    backend, total = maps.step.get('imdecode_backend') or 'pillow', len(maps.pairs)
    places = sorted({round(i) for i in np.linspace(0, total - 1, _SAMPLE)})
    seen = read_maps([maps.pairs[i] for i in places], backend)
    looked = f'{seen.number} of the {total} label maps were looked at'
    for fault, paths in seen.faults.items():
        yield f'{len(paths)} label maps {fault}: {first_three(paths)};\n{looked}', False
    names = dict(enumerate(maps.names or ()))
    number = max([len(names), *(output_classes(head) for head in heads if not names or output_classes(head) == 2)])
    if not number or not seen.values:
        return
    labels = {value: maps.label(value) for value in seen.values}
    ignored = [head.get('ignore_index', 255) for head in heads or ({},)]
    odd = [value for value, label in labels.items() if not 0 <= label < number]
    wrong = [value for value in odd if any(labels[value] != index for index in ignored)]
    if wrong:
        shown = [f'{value} in {len(seen.values[value])} ({seen.values[value][0]})' for value in sorted(wrong)]
        yield f'values are no classes of 0 to {number - 1} and not ignored: {first_three(shown)};\n{looked}', False
    if set(seen.values) == {0, 255} and number > 1 and _only_two(maps, backend):
        yield 'all label maps hold only the values 0 and 255, which is ignored: there is one class to learn', False
        return
    unused = [label for label in range(number) if label not in labels.values()]
    if unused and trained_on:
        shown = [f'{label} ({names.get(label, "")})' for label in unused]
        yield f'{len(unused)} of the {number} classes do not occur: {first_three(shown)};\n{looked}', True


def _only_two(maps: Maps, backend: str) -> bool:
    """Return whether all label maps hold only 0 and 255; the first one with another value ends the search."""
    return all(set(_read(path, backend)[1]) <= {0, 255} for _, path in maps.pairs)
