"""Transforms of event frames. All frames of a sample are transformed in the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from mmcv.transforms import BaseTransform

from mmkron.registry import TRANSFORMS
from mmkron.utils.checks import check_int, check_number, check_probability

OPERATIONS = ('identity', 'shear_x', 'translate', 'rotate', 'cutout')


def check_frames(frames: object) -> None:
    """Raise TypeError or ValueError unless ``frames`` is a NumPy array (T, C, H, W) with no empty dimension."""
    if not isinstance(frames, np.ndarray):
        raise TypeError(f'img must be frames as a NumPy array, got {type(frames).__name__}')
    if frames.ndim != 4 or 0 in frames.shape:
        raise ValueError(f'img must be frames (T, C, H, W) with no empty dimension, got shape {frames.shape}')


@TRANSFORMS.register_module()
class EventFlip(BaseTransform):
    """Flip the frames of a sample horizontally.

    Args:
        prob: Probability of flipping all frames of a sample.

    Raises:
        TypeError: If ``prob`` is not a number.
        ValueError: If ``prob`` is outside of [0, 1].
    """

    def __init__(self, prob: float = 0.5) -> None:
        check_probability('prob', prob, certain=True)
        self.prob = prob

    def transform(self, results: dict) -> dict:
        check_frames(results['img'])
        results['flip'] = bool(np.random.rand() < self.prob)
        if results['flip']:
            results['img'] = np.ascontiguousarray(results['img'][..., ::-1])
        return results


@TRANSFORMS.register_module()
class EventAugment(BaseTransform):
    """Apply one of five operations to the frames of a sample: identity, shear, translation, rotation or cutout.

    The five are equally likely. Magnitudes are uniform up to the argument, with either sign. Shear and rotation are
    about the center; pixels are sampled from the nearest, and are 0 outside of the frame. The operations and ranges are
    from QKFormer's released recipe (``SNNAugmentWide``); the side of the cutout and the translation along both axes are
    this project's choice.

    Args:
        shear: Maximum shear, in columns per row.
        translate: Maximum translation along each axis, in whole pixels.
        rotate: Maximum rotation in degrees.
        cutout: Maximum side of the square of zeros in pixels, at least 1. The square is clipped to the frame.

    Raises:
        TypeError: If an argument is not a number, or ``translate`` or ``cutout`` is not an int.
        ValueError: If an argument is negative or not finite, or ``cutout`` is 0.
    """

    def __init__(self, shear: float = 0.3, translate: int = 5, rotate: float = 30.0, cutout: int = 30) -> None:
        for name, value in dict(shear=shear, rotate=rotate).items():
            check_number(name, value, finite=False)
            if not 0 <= value < math.inf:
                raise ValueError(f'{name} must be finite and at least 0, got {value!r}')
        check_int('translate', translate, 0)
        check_int('cutout', cutout)
        self.shear, self.translate, self.rotate, self.cutout = shear, translate, rotate, cutout

    def transform(self, results: dict) -> dict:
        frames = results['img']
        check_frames(frames)
        operation = OPERATIONS[np.random.randint(len(OPERATIONS))]
        if operation == 'shear_x':
            frames = shear_x(frames, np.random.uniform(-self.shear, self.shear))
        elif operation == 'translate':
            frames = translate(frames, *np.random.randint(-self.translate, self.translate + 1, 2))
        elif operation == 'rotate':
            frames = rotate(frames, np.random.uniform(-self.rotate, self.rotate))
        elif operation == 'cutout':
            side, (height, width) = np.random.randint(1, self.cutout + 1), frames.shape[-2:]
            frames = cutout(frames, side, np.random.randint(height), np.random.randint(width))
        results['img'] = frames
        return results


def _sample(frames: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Sample frames (T, C, H, W) at the pixels nearest to ``rows`` and ``columns``, (H, W) each; 0 outside."""
    rows, columns = np.floor(rows + 0.5).astype(np.int64), np.floor(columns + 0.5).astype(np.int64)
    height, width = frames.shape[-2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    taken = frames[..., rows.clip(0, height - 1), columns.clip(0, width - 1)]
    return np.where(inside, taken, 0).astype(frames.dtype)


def _middle_grid(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Return the rows (H, 1) and columns (1, W) relative to the center of the frame, and the center."""
    middle_y, middle_x = (frames.shape[-2] - 1) / 2, (frames.shape[-1] - 1) / 2
    rows, columns = np.ogrid[: frames.shape[-2], : frames.shape[-1]]
    return rows - middle_y, columns - middle_x, middle_y, middle_x


def shear_x(frames: np.ndarray, slope: float) -> np.ndarray:
    """Shift each row of (T, C, H, W) to the right by ``slope`` times its distance below the center."""
    rows, columns, middle_y, middle_x = _middle_grid(frames)
    return _sample(frames, rows + middle_y + 0 * columns, columns + middle_x - slope * rows)


def translate(frames: np.ndarray, down: int, right: int) -> np.ndarray:
    """Shift (T, C, H, W) by whole pixels."""
    rows, columns = np.indices(frames.shape[-2:])
    return _sample(frames, rows - down, columns - right)


def rotate(frames: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate (T, C, H, W) counter-clockwise about the center."""
    rows, columns, middle_y, middle_x = _middle_grid(frames)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _sample(frames, cos * rows + sin * columns + middle_y, cos * columns - sin * rows + middle_x)


def cutout(frames: np.ndarray, side: int, row: int, column: int) -> np.ndarray:
    """Set a square of (T, C, H, W) around (row, column), clipped to the frame, to zero."""
    top, left = row - side // 2, column - side // 2
    frames = frames.copy()
    frames[..., max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] = 0
    return frames


@TRANSFORMS.register_module()
class PadFrames(BaseTransform):
    """Pad the frames of a sample with empty frames, or truncate them, to a fixed number.

    Datasets with a ``duration`` need this, as their samples differ in the number of frames.

    Args:
        frames: T of the result.

    Raises:
        TypeError: If ``frames`` is not an int.
        ValueError: If ``frames`` is below 1.
    """

    def __init__(self, frames: int) -> None:
        check_int('frames', frames)
        self.frames = frames

    def transform(self, results: dict) -> dict:
        check_frames(results['img'])
        frames = results['img'][: self.frames]
        missing = self.frames - len(frames)
        if missing:
            frames = np.concatenate([frames, np.zeros((missing, *frames.shape[1:]), frames.dtype)])
        results['img'] = frames
        return results


@TRANSFORMS.register_module()
class PackEventInputs(BaseTransform):
    """Pack a sample for MMPretrain: ``inputs``, (T, C, H, W) float32, and ``data_samples`` with the label.

    :class:`mmkron.models.data_preprocessors.EventDataPreprocessor` batches such samples to (B, T, C, H, W).

    Args:
        meta_keys: Keys of the sample to keep as meta information, if present.

    Raises:
        TypeError: If ``meta_keys`` is not a sequence of names.
    """

    def __init__(self, meta_keys: Sequence[str] = ('sample_idx', 'img_path', 'flip')) -> None:
        if not isinstance(meta_keys, (list, tuple)) or not all(isinstance(key, str) for key in meta_keys):
            raise TypeError(f'meta_keys must be a sequence of names, got {meta_keys!r}')
        self.meta_keys = tuple(meta_keys)

    def transform(self, results: dict) -> dict:
        from mmpretrain.structures import DataSample  # the module works without MMPretrain

        frames = results['img']
        check_frames(frames)
        sample = DataSample(metainfo={key: results[key] for key in self.meta_keys if key in results})
        if 'gt_label' in results:
            sample.set_gt_label(results['gt_label'])
        return dict(inputs=torch.from_numpy(np.ascontiguousarray(frames, np.float32)), data_samples=sample)
