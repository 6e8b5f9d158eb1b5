"""A dataset of event camera recordings, or of frames made from them, in one folder per class."""

from __future__ import annotations

import logging
import os
import os.path as osp
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.logging import print_log

from mmkron.datasets.event_datasets import EventDataset, read_list
from mmkron.datasets.events import MOST_FRAMES, Events, read_aedat2, read_aedat3, read_nmnist
from mmkron.registry import DATASETS

AEDAT = ('.aedat', '.aedat2', '.aedat3')
NMNIST = ('.bin',)
FRAMES = ('.npy', '.npz')
SUFFIXES = AEDAT + NMNIST + FRAMES


@DATASETS.register_module()
class EventFolder(EventDataset):
    """Recordings or frames of events in one folder per class, with splits by folders or by lists.

    The suffix of a file determines its format:

    - ``.aedat``, ``.aedat2``, ``.aedat3``: AEDAT 2.0 or 3.1, according to the header.
    - ``.bin``: the format of N-MNIST.
    - ``.npy``, ``.npz``: frames (T, 2, H, W) of numbers, polarity 0 first. An ``.npz`` file contains one array or one
      that is called ``frames``. Frames are not resampled, so T must be ``frames``; with ``duration``, T is arbitrary.

    Hidden files and folders are skipped without a warning, other files with one.

    The label of a sample is the position of its folder's name in the classes. Without ``metainfo``, the classes of all
    splits are the sorted names of the folders in ``data_root/train`` or, with ``ann_file``, in ``data_prefix``.

    Args:
        data_root: Folder of the data.
        data_prefix: Folder of this split below ``data_root``, with the class folders, such as ``train``. With
            ``ann_file``: the folder with the class folders of all splits.
        ann_file: List of this split below ``data_root``, with one ``CLASS/FILE`` below ``data_prefix`` per line.
        size: Side of the sensor or (H, W). AEDAT 2.0 requires 128.
        metainfo: ``dict(classes=...)`` with the names of the folders in the order of their labels.
        **kwargs: See :class:`EventDataset`. ``cache`` is ``.frames`` below ``data_root`` by default.

    Raises:
        TypeError: If ``data_prefix`` or ``ann_file`` is not a str, or the classes are not a sequence of them.
        ValueError: If ``data_prefix`` is not below ``data_root``, a folder is not a class, a class is given twice, a
            recording is present twice, or a list contains another suffix or a file outside of the class folders.
        FileNotFoundError: If there is no recording, or a recording in the list is missing.
    """

    CACHE = '.frames'  # hidden, because it is next to the folders of the classes

    def __init__(
        self,
        data_root: str,
        data_prefix: str = '',
        ann_file: str = '',
        size: int | Sequence[int] = 128,
        metainfo: dict | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in dict(data_prefix=data_prefix, ann_file=ann_file).items():
            if not isinstance(value, str):
                raise TypeError(f'{name} must be a path below data_root, got {value!r}')
        if (
            osp.isabs(data_prefix) or '..' in Path(data_prefix).parts
        ):  # the cache repeats this path below its own folder
            raise ValueError(f'data_prefix must be a folder below data_root, got {data_prefix!r}')
        super().__init__(
            data_root,
            size=size,
            data_prefix=dict(img_path=data_prefix),
            ann_file=ann_file,
            metainfo=metainfo,
            **kwargs,
        )

    def load_data_list(self) -> list[dict]:
        folder = self.data_prefix['img_path']
        classes = self._find_classes(folder)
        self._metainfo['classes'] = classes
        names = self._list_names(folder, classes) if self.ann_file else self._folder_names(folder, classes)
        if not names:
            raise FileNotFoundError(
                f'EventFolder needs class folders with files {", ".join(SUFFIXES)} in {folder!r}, but found none'
            )
        labels = {name: label for label, name in enumerate(classes)}
        samples = [dict(img_path=osp.join(folder, name), gt_label=labels[_class_of(name)]) for name in names]
        found = {_class_of(name) for name in names}
        empty = [name for name in classes if name not in found]
        if empty:
            _warn(f'{len(empty)} of {len(classes)} classes have no recording in {self.ann_file or folder!r}', empty)
        return samples

    def _find_classes(self, folder: str) -> tuple[str, ...]:
        """Return the classes of all splits."""
        classes = self._metainfo.get('classes')
        if classes is None:
            return folder_classes(folder if self.ann_file else osp.join(self.data_root, 'train'))
        if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
            raise TypeError(f'classes of metainfo must be names of folders, got {classes!r}')
        if not classes or len(set(classes)) != len(classes):
            raise ValueError(f'classes of metainfo must be different names of folders, got {classes!r}')
        return tuple(classes)

    def _folder_names(self, folder: str, classes: Sequence[str]) -> list[str]:
        """Return all recordings in the class folders as CLASS/FILE."""
        folders, stray = _entries(folder) if osp.isdir(folder) else ([], [])
        for name in folders:
            if name not in classes:
                raise ValueError(f'{osp.join(folder, name)!r} is not the folder of a class; the classes are {classes}')
        names = []
        for name in folders:
            subfolders, files = _entries(osp.join(folder, name))
            names += [osp.join(name, file) for file in files if _suffix(file) in SUFFIXES]
            stray += [osp.join(name, subfolder) for subfolder in subfolders]
            stray += [osp.join(name, file) for file in files if _suffix(file) not in SUFFIXES]
        if stray:
            _warn(f'{len(stray)} files and folders in {folder!r} are not recordings of a class and are ignored', stray)
        recordings = {osp.splitext(name)[0] for name in names if _suffix(name) not in FRAMES}
        twice = [name for name in names if _suffix(name) in FRAMES and osp.splitext(name)[0] in recordings]
        if twice:
            raise ValueError(
                f'{folder!r} must contain each recording once, but {len(twice)} files of frames have the name of a '
                f'recording: {_first(twice)}; list the files to use in ann_file'
            )
        return names

    def _list_names(self, folder: str, classes: Sequence[str]) -> list[str]:
        """Return the recordings in ``ann_file`` as CLASS/FILE."""
        names = read_list(self.ann_file)
        for name in names:
            if osp.dirname(name) == '' or _class_of(name) not in classes or _suffix(name) not in SUFFIXES:
                raise ValueError(
                    f'{self.ann_file!r} must list files CLASS/FILE with one of the suffixes {SUFFIXES}, got {name!r}; '
                    f'the classes are {classes}'
                )
        missing = [name for name in names if not osp.isfile(osp.join(folder, name))]
        if missing:
            raise FileNotFoundError(
                f'{len(missing)} of {len(names)} files in the list {self.ann_file!r} are missing in {folder!r}: '
                f'{_first(missing)}'
            )
        return names

    def read(self, path: str) -> Events:
        """Return the events of a file.

        Raises:
            ValueError: If the file is damaged, or has the format AEDAT 2.0 and ``size`` is not 128.
        """
        if _suffix(path) in NMNIST:
            return read_nmnist(path, self.size)
        with open(path, 'rb') as file:
            version = file.read(10)
        if version == b'#!AER-DAT3':
            return read_aedat3(path, self.size)
        if self.size != (128, 128):
            raise ValueError(f'size must be 128 for {path!r}, which has the format AEDAT 2.0, got {self.size}')
        return read_aedat2(path)

    def load_frames(self, info: dict) -> np.ndarray:
        """Return the frames of a sample, (T, 2, H, W) float32.

        Raises:
            ValueError: If the file is damaged, or its frames have another shape or are not finite numbers.
        """
        path = info['img_path']
        if _suffix(path) not in FRAMES:
            return super().load_frames(info)
        frames = _load_array(path)
        count = frames.shape[0] if self.frames is None and frames.ndim else self.frames
        if frames.shape != (count, 2, *self.size) or not 0 < count <= MOST_FRAMES:
            wanted = 'T' if self.frames is None else self.frames
            raise ValueError(
                f'frame file {path!r} must have the shape ({wanted}, 2, H, W) with size {self.size}, got {frames.shape}'
            )
        if frames.dtype.kind not in 'biuf':
            raise ValueError(f'frame file {path!r} must contain numbers, got {frames.dtype}')
        with np.errstate(over='ignore'):
            frames = frames.astype(np.float32)
        wrong = ~np.isfinite(frames)
        if wrong.any():
            raise ValueError(
                f'frame file {path!r} must contain finite numbers, got {wrong.sum()} others, first {frames[wrong][0]}'
            )
        return frames


def folder_classes(folder: str) -> tuple[str, ...]:
    """Return the sorted names of the visible folders in a folder.

    Raises:
        FileNotFoundError: If the folder does not exist.
    """
    if not osp.isdir(folder):
        raise FileNotFoundError(
            f'EventFolder reads the classes from the folders in {folder!r}, which does not exist; otherwise pass '
            'metainfo=dict(classes=(...))'
        )
    return tuple(_entries(folder)[0])


def _load_array(path: str) -> np.ndarray:
    """Return the array in a ``.npy`` or ``.npz`` file without unpickling.

    Raises:
        ValueError: If the file cannot be read, or contains several arrays of which none is called ``frames``.
    """
    try:
        # With mmap, an array larger than its file raises an error before memory is allocated.
        loaded = np.load(path, mmap_mode='r', allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded as archive:
            names = archive.files
            if 'frames' not in names and len(names) != 1:
                raise ValueError(f"it must contain one array or one called 'frames', got {names}")
            return archive['frames' if 'frames' in names else names[0]]
    except FileNotFoundError:
        raise
    except Exception as error:  # the type depends on the damaged part of an archive
        raise ValueError(f'frame file {path!r} cannot be read: {error}') from error


def _entries(folder: str) -> tuple[list[str], list[str]]:
    """Return the sorted names of the folders and of the other visible entries in a folder."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith('.'))
    folders = [name for name in names if osp.isdir(osp.join(folder, name))]
    return folders, [name for name in names if name not in set(folders)]


def _suffix(name: str) -> str:
    return osp.splitext(name)[1].lower()


def _class_of(name: str) -> str:
    return name.split(os.sep)[0]


def _first(names: Sequence[str]) -> str:
    return ', '.join(names[:3]) + (', ...' if len(names) > 3 else '')


def _warn(text: str, names: Sequence[str]) -> None:
    print_log(f'{text}: {_first(names)}', logger='current', level=logging.WARNING)
