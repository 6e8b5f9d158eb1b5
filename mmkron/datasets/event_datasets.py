"""CIFAR10-DVS and DVS128 Gesture: frames of event counts, integrated once and cached."""

from __future__ import annotations

import logging
import os
import os.path as osp
import re
import uuid
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.logging import print_log

from mmkron.datasets.events import Events, check_segments, read_aedat2, read_aedat3, to_frames
from mmkron.registry import DATASETS
from mmkron.utils.checks import check_choice, resolve_size

SPLITS = ('train', 'test')
SPLIT_RULES = ('lexicographic', 'tebn')
SAMPLES_A_CLASS = 1000  # of CIFAR10-DVS


class EventDataset(BaseDataset):
    """Base class of event datasets: frames (T, 2, H, W) of float32 counts, polarity 0 first, and their class.

    The pipeline gets a sample as ``img`` and ``gt_label``, with ``img_path``, the file of events, and ``sample_idx``. A
    subclass implements ``load_data_list`` and ``read``. If a file holds several samples, each has a ``start`` and an
    ``end`` in microseconds. Loading a sample raises ValueError, with file and byte, if its file is damaged, and OSError
    if the cache cannot be written.

    Args:
        data_root: Folder of the files.
        frames: T, or None with ``duration``.
        by: How events are assigned to frames, ``number`` or ``time``. See :func:`mmkron.datasets.events.to_frames`.
        duration: Duration of a frame in microseconds, instead of ``frames``. T then differs between samples, see
            :class:`mmkron.datasets.PadFrames`.
        cache: Folder for the frames of each sample. Defaults to ``frames`` below ``data_root``; False disables the
            cache. A cached file that is damaged, older than its events or from another recording is rebuilt.
        size: Side of the sensor or (H, W).
        **kwargs: Arguments of :class:`mmengine.dataset.BaseDataset`, such as ``pipeline`` and ``test_mode``.

    Raises:
        TypeError: If a path is not a string, or a number is not an int.
        ValueError: If ``by`` is unknown, a number is out of range, or not exactly one of ``frames`` and ``duration`` is
            given.
        FileNotFoundError: If files are missing. The message names the expected files.
    """

    CACHE = 'frames'  # folder below data_root

    def __init__(
        self,
        data_root: str,
        frames: int | None = 16,
        by: str = 'number',
        duration: int | None = None,
        cache: str | bool | None = None,
        size: int | Sequence[int] = 128,
        **kwargs: Any,
    ) -> None:
        check_segments(frames, by, duration)
        if not isinstance(data_root, (str, os.PathLike)) or not data_root:
            raise TypeError(f'data_root must be the path of a folder, got {data_root!r}')
        if cache is True or not (cache is None or cache is False or (isinstance(cache, (str, os.PathLike)) and cache)):
            raise TypeError(f'cache must be a folder, None for one below data_root, or False for none, got {cache!r}')
        self.frames, self.by, self.duration, self.size = frames, by, duration, resolve_size('size', size)
        data_root = osp.expanduser(data_root)
        rule = f'duration{duration}' if duration is not None else f'{by}{frames}'
        folder = osp.join(data_root, self.CACHE) if cache is None else cache
        self.cache = None if cache is False else osp.join(osp.expanduser(folder), rule)
        super().__init__(data_root=data_root, **kwargs)

    def read(self, path: str) -> Events:
        """Read the events of a file."""
        raise NotImplementedError

    def siblings(self, info: dict) -> list[dict]:
        """Return all samples of the file that holds a sample."""
        return [info]

    def prepare_data(self, idx: int) -> Any:
        info = self.get_data_info(idx)
        info['img'] = self.load_frames(info)
        return self.pipeline(info)

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the class of a sample, as ``ClassBalancedDataset`` requires."""
        return [int(self.get_data_info(idx)['gt_label'])]

    def load_frames(self, info: dict) -> np.ndarray:
        """Load the frames of a sample, (T, 2, H, W) float32, from the cache or else from the events."""
        frames = self._load_cached(info)
        if frames is None:
            events = self.read(info['img_path'])
            frames = self._integrate(info, events)
            if frames is None:
                window = f' from {info["start"]} to {info["end"]} us' if 'start' in info else ''
                raise ValueError(f'event file {info["img_path"]!r} is damaged: it has no event{window}')
            if self.cache is not None:
                self._save(info, frames)
                # Reading a long recording once for each of its samples would take most of the first epoch.
                for other in self.siblings(info):
                    if self._load_cached(other) is None:
                        self._save(other, self._integrate(other, events))
        return frames

    def _integrate(self, info: dict, events: Events) -> np.ndarray | None:
        part = events.between(info['start'], info['end']) if 'start' in info else events
        try:
            return to_frames(part, self.size, self.frames, self.by, self.duration) if len(part.t) else None
        except ValueError as error:
            raise ValueError(f'event file {info["img_path"]!r}: {error}') from error

    def _cache_path(self, info: dict) -> str:
        # With its suffix: a.aedat and a.aedat3 are two recordings.
        name = osp.relpath(info['img_path'], self.data_root)
        window = f'_{info["start"]}-{info["end"]}' if 'start' in info else ''
        return osp.join(self.cache, f'{name}{window}.npz')

    def _load_cached(self, info: dict) -> np.ndarray | None:
        if self.cache is None:
            return None
        path = self._cache_path(info)
        try:
            if osp.getmtime(path) < osp.getmtime(info['img_path']):
                return None
            with np.load(path, allow_pickle=False) as archive:
                # Folders may share a cache, and a file may be replaced by an older one.
                if archive['source'].tolist() != _fingerprint(info['img_path']):
                    return None
                frames = archive['frames']
        except Exception:  # a cached file with any defect is rebuilt
            return None
        count = frames.shape[0] if self.frames is None and frames.ndim else self.frames
        if frames.shape != (count, 2, *self.size) or frames.dtype.kind != 'u' or not count:
            return None
        return frames.astype(np.float32)

    def _save(self, info: dict, frames: np.ndarray | None) -> None:
        """Write the counts, if any, atomically: another process never sees a partial file."""
        if frames is None:
            return
        path = self._cache_path(info)
        part = f'{path}.{uuid.uuid4().hex}.part'
        counts = frames.astype(np.min_scalar_type(int(frames.max())))
        try:
            os.makedirs(osp.dirname(path), exist_ok=True)
            with open(part, 'wb') as file:
                np.savez_compressed(file, frames=counts, source=_fingerprint(info['img_path']))
            os.replace(part, path)
        except OSError as error:
            raise OSError(
                f'frames cannot be cached as {path!r} ({error}); set cache to a folder or to False'
            ) from error
        finally:
            if osp.exists(part):
                os.remove(part)


def _fingerprint(path: str) -> list[int]:
    """Return the length of a file and a checksum of its two ends."""
    size = osp.getsize(path)
    with open(path, 'rb') as file:
        ends = file.read(4096)
        file.seek(max(0, size - 4096))
        ends += file.read()
    return [size, zlib.crc32(ends)]


def read_list(path: str) -> list[str]:
    """Return the recordings that a list names, one per line, as normalized paths below its data set's folder.

    Raises:
        ValueError: If the list is empty, or names a recording outside of the folder or twice.
    """
    # File names are bytes; those that are not UTF-8 are kept as they are.
    with open(path, encoding='utf-8-sig', errors='surrogateescape') as file:
        lines = [line.strip() for line in file if line.strip()]
    if not lines:
        raise ValueError(f'{path!r} must name one recording per line, but it is empty')
    names: set[str] = set()
    for line in lines:
        name = osp.normpath(line)
        # Frames are cached under the same name in another folder.
        if osp.isabs(line) or '..' in Path(line).parts or name in names:
            raise ValueError(f'{path!r} must name recordings below data_root, each once, got {line!r}')
        names.add(name)
    return [osp.normpath(line) for line in lines]


@DATASETS.register_module()
class CIFAR10DVS(EventDataset):
    """CIFAR10-DVS: images of CIFAR-10 that move in front of a sensor, 1,000 recordings of each class.

    The dataset has no official split. ``lexicographic``, used for QKFormer's accuracies, sorts the files of a class by
    name as text and takes the first 90 % for training and the others for testing. ``tebn`` takes the files numbered 0
    to 99 for testing; accuracies are said to be higher there than on a random split. The format is described in
    :func:`mmkron.datasets.events.read_aedat2`.

    Args:
        data_root: Folder with one folder per class, such as ``airplane/cifar10_airplane_0.aedat``. Hidden files are
            ignored.
        split: ``train`` or ``test``.
        split_rule: ``lexicographic`` or ``tebn``.
        **kwargs: See :class:`EventDataset`.

    Raises:
        TypeError, ValueError, FileNotFoundError: See :class:`EventDataset`.
    """

    METAINFO = dict(
        classes=('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck'),
    )

    def __init__(self, data_root: str, split: str = 'train', split_rule: str = 'lexicographic', **kwargs: Any) -> None:
        check_choice('split', split, SPLITS)
        check_choice('split_rule', split_rule, SPLIT_RULES)
        self.split, self.split_rule = split, split_rule
        super().__init__(data_root, **kwargs)

    def read(self, path: str) -> Events:
        return read_aedat2(path)

    def load_data_list(self) -> list[dict]:
        samples, missing, short = [], [], []
        for label, name in enumerate(self.METAINFO['classes']):
            folder = osp.join(self.data_root, name)
            files = sorted(os.listdir(folder)) if osp.isdir(folder) else []
            files = [file for file in files if file.endswith('.aedat') and not file.startswith('.')]
            if not files:
                missing.append(osp.join(folder, '*.aedat'))
            elif len(files) != SAMPLES_A_CLASS:
                short.append(f'{name} {len(files)}')
            samples += [dict(img_path=osp.join(folder, file), gt_label=label) for file in self._choose(folder, files)]
        if missing:
            raise FileNotFoundError(
                'CIFAR10DVS needs one folder per class with files such as airplane/cifar10_airplane_0.aedat below '
                f'data_root; nothing is found for {", ".join(missing)}'
            )
        if short:
            text = f'CIFAR10-DVS has {SAMPLES_A_CLASS} recordings per class, but found: {", ".join(short)}'
            print_log(text, logger='current', level=logging.WARNING)
        return samples

    def _choose(self, folder: str, files: list[str]) -> list[str]:
        if self.split_rule == 'lexicographic':
            train = len(files) * 9 // 10
            return files[:train] if self.split == 'train' else files[train:]
        chosen = []
        for file in files:
            number = re.search(r'_(\d+)\.aedat$', file)
            if not number:
                path = osp.join(folder, file)
                raise ValueError(f"split_rule 'tebn' needs names that end in _NUMBER.aedat, got {path!r}")
            if (int(number[1]) < 100) == (self.split == 'test'):
                chosen.append(file)
        return chosen


@DATASETS.register_module()
class DVS128Gesture(EventDataset):
    """DVS128 Gesture: hand and arm gestures of 11 classes in front of a sensor, several in each recording.

    The split is the official one, by recordings and so by persons. If windows of a recording overlap, as some do, an
    event in the overlap belongs to both. The format is described in :func:`mmkron.datasets.events.read_aedat3`.

    Args:
        data_root: Folder with ``trials_to_train.txt`` and ``trials_to_test.txt``, which name one recording per line,
            such as ``user01_fluorescent.aedat``, and with these recordings and their labels, such as
            ``user01_fluorescent_labels.csv``. After a header, each line of labels has the class, 1 to 11, and the start
            and end of a gesture in microseconds.
        split: ``train`` or ``test``.
        **kwargs: See :class:`EventDataset`.

    Raises:
        TypeError, ValueError, FileNotFoundError: See :class:`EventDataset`. Also ValueError if a list of recordings is
            empty, or names one outside of ``data_root`` or twice, or if labels cannot be parsed.
    """

    METAINFO = dict(
        classes=(
            'hand clapping',
            'right hand wave',
            'left hand wave',
            'right arm clockwise',
            'right arm counter-clockwise',
            'left arm clockwise',
            'left arm counter-clockwise',
            'arm roll',
            'air drums',
            'air guitar',
            'other gestures',
        ),
    )

    def __init__(self, data_root: str, split: str = 'train', **kwargs: Any) -> None:
        check_choice('split', split, SPLITS)
        self.split = split
        super().__init__(data_root, **kwargs)

    def read(self, path: str) -> Events:
        return read_aedat3(path, self.size)

    def siblings(self, info: dict) -> list[dict]:
        return self._windows[info['img_path']]

    def load_data_list(self) -> list[dict]:
        trials = osp.join(self.data_root, f'trials_to_{self.split}.txt')
        names = read_list(trials) if osp.isfile(trials) else []
        pairs = [(osp.join(self.data_root, name), self._labels_of(name)) for name in names]
        wanted = [path for pair in pairs for path in pair] or [trials]
        missing = [path for path in wanted if not osp.isfile(path)]
        if missing:
            more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
            raise FileNotFoundError(
                'DVS128Gesture needs trials_to_train.txt, trials_to_test.txt and, for each recording that they name, '
                'such as user01_fluorescent.aedat, that file and user01_fluorescent_labels.csv below data_root; '
                f'missing: {", ".join(missing[:3])}{more}'
            )
        self._windows = defaultdict(list)
        for path, labels in pairs:
            for label, start, end in _read_labels(labels, len(self.METAINFO['classes'])):
                self._windows[path].append(dict(img_path=path, gt_label=label, start=start, end=end))
        return [info for windows in self._windows.values() for info in windows]

    def _labels_of(self, name: str) -> str:
        return osp.join(self.data_root, f'{osp.splitext(name)[0]}_labels.csv')


def _read_labels(path: str, classes: int) -> list[tuple[int, int, int]]:
    """Return (class from 0, start, end) of each gesture in a recording."""
    windows = []
    with open(path, encoding='utf-8-sig', errors='replace') as file:
        for number, line in enumerate(file, 1):
            cells = [cell.strip() for cell in line.split(',')]
            if not line.strip() or (number == 1 and not cells[0].isdigit()):
                continue
            label, start, end = map(int, cells) if len(cells) == 3 and all(map(str.isdecimal, cells)) else (0, 0, 0)
            if not 1 <= label <= classes or not start < end:
                raise ValueError(
                    f'{path!r}, line {number}: expected the class, 1 to {classes}, and a start before an end in '
                    f'microseconds, got {line.strip()!r}'
                )
            windows.append((label - 1, start, end))
    if not windows:
        raise ValueError(f'{path!r} must have a line for each gesture after its header, but it has none')
    return windows
