"""Transforms of frames of events against plain loops, and the sample that MMPretrain gets."""

import math

import numpy as np
import pytest
import torch
from mmengine.registry import TRANSFORMS

from mmkron.datasets import EventAugment, EventFlip, PackEventInputs, PadFrames
from mmkron.datasets import event_transforms as et
from support.errors import raises

SHAPE = (3, 2, 7, 10)


@pytest.fixture
def frames():
    return np.random.default_rng(0).integers(1, 9, SHAPE).astype(np.float32)


def moved(frames, source):
    """Move pixels by loops; ``source(row, column)`` returns the exact position that a pixel comes from."""
    out = np.zeros_like(frames)
    height, width = frames.shape[-2:]
    for row in range(height):
        for column in range(width):
            y, x = (math.floor(value + 0.5) for value in source(row, column))
            if 0 <= y < height and 0 <= x < width:
                out[..., row, column] = frames[..., y, x]
    return out


@pytest.mark.parametrize('slope', [0.0, 0.3, -0.21, 1.0])
def test_shear(frames, slope):
    expected = moved(frames, lambda row, column: (row, column - slope * (row - 3)))
    np.testing.assert_array_equal(et.shear_x(frames, slope), expected)


@pytest.mark.parametrize(('down', 'right'), [(0, 0), (2, -3), (-5, 5), (7, 0)])
def test_translate(frames, down, right):
    expected = moved(frames, lambda row, column: (row - down, column - right))
    np.testing.assert_array_equal(et.translate(frames, down, right), expected)


@pytest.mark.parametrize('degrees', [0.0, 11.0, -30.0])
def test_rotate(frames, degrees):
    angle = math.radians(degrees)

    def source(row, column):
        place = complex(column - 4.5, -(row - 3)) * complex(math.cos(angle), -math.sin(angle))
        return 3 - place.imag, 4.5 + place.real

    np.testing.assert_array_equal(et.rotate(frames, degrees), moved(frames, source))


def test_rotate_by_a_right_angle(frames):
    square = frames[..., :7]
    np.testing.assert_array_equal(et.rotate(square, 90), np.rot90(square, axes=(-2, -1)))


@pytest.mark.parametrize(('side', 'row', 'column'), [(1, 3, 4), (4, 0, 9), (30, 3, 4), (3, 6, 0)])
def test_cutout(frames, side, row, column):
    out, source = et.cutout(frames, side, row, column), frames.copy()
    rows, columns = np.indices(SHAPE[-2:])
    top, left = row - side // 2, column - side // 2
    inside = (rows >= top) & (rows < top + side) & (columns >= left) & (columns < left + side)
    np.testing.assert_array_equal(out, np.where(inside, 0, frames))
    np.testing.assert_array_equal(frames, source)


def test_flip(frames):
    """All frames of a sample are flipped, in about ``prob`` of the samples."""
    for prob, flipped in ((0, False), (1, True)):
        results = EventFlip(prob)(dict(img=frames))
        assert results['flip'] is flipped
        np.testing.assert_array_equal(results['img'], frames[..., ::-1] if flipped else frames)
        assert results['img'].flags.c_contiguous
    np.random.seed(0)
    assert 0.4 < np.mean([EventFlip()(dict(img=frames))['flip'] for _ in range(500)]) < 0.6


def test_augment(frames, monkeypatch):
    """Operations are equally likely, with magnitudes over the whole range; frames are transformed alike, in a copy."""
    equal, source = np.repeat(frames[:1], 3, axis=0), frames.copy()
    np.random.seed(0)
    for _ in range(50):
        out = EventAugment()(dict(img=equal))['img']
        assert (out.shape, out.dtype) == (SHAPE, np.float32)
        np.testing.assert_array_equal(out, np.repeat(out[:1], 3, axis=0))
        EventAugment()(dict(img=frames))
    np.testing.assert_array_equal(frames, source)

    calls = {name: [] for name in et.OPERATIONS[1:]}
    for name, values in calls.items():
        monkeypatch.setattr(et, name, lambda frames, *args, values=values: values.append(args) or frames)
    np.random.seed(0)
    for _ in range(2000):
        EventAugment()(dict(img=frames))
    assert all(330 < len(values) < 470 for values in calls.values())
    assert 330 < 2000 - sum(map(len, calls.values())) < 470
    for name, most in (('shear_x', 0.3), ('rotate', 30)):
        (values,) = zip(*calls[name])
        assert -most <= min(values) < -0.9 * most
        assert 0.9 * most < max(values) <= most
    for values in zip(*calls['translate']):
        assert set(values) == set(range(-5, 6))
    sides, rows, columns = zip(*calls['cutout'])
    assert (set(sides), set(rows), set(columns)) == (set(range(1, 31)), set(range(7)), set(range(10)))


def test_pad_frames(frames):
    np.testing.assert_array_equal(PadFrames(3)(dict(img=frames))['img'], frames)
    np.testing.assert_array_equal(PadFrames(2)(dict(img=frames))['img'], frames[:2])
    padded = PadFrames(5)(dict(img=frames))['img']
    np.testing.assert_array_equal(padded, np.concatenate([frames, np.zeros((2, *SHAPE[1:]), np.float32)]))
    assert padded.dtype == np.float32


def test_pack(frames):
    packed = PackEventInputs()(dict(img=frames[..., ::-1].astype(np.uint8), gt_label=4, sample_idx=7, other=1))
    assert set(packed) == {'inputs', 'data_samples'}
    assert packed['inputs'].dtype == torch.float32
    np.testing.assert_array_equal(packed['inputs'].numpy(), frames[..., ::-1])
    assert packed['data_samples'].gt_label.tolist() == [4]
    assert packed['data_samples'].metainfo == dict(sample_idx=7)
    assert 'gt_label' not in PackEventInputs()(dict(img=frames))['data_samples']


@pytest.mark.parametrize('name', ['EventFlip', 'EventAugment', 'PadFrames', 'PackEventInputs'])
def test_bad_frames(name):
    step = TRANSFORMS.build(dict(type=f'mmkron.{name}', **(dict(frames=2) if name == 'PadFrames' else {})))
    with raises(TypeError, 'img', 'list'):
        step(dict(img=[1]))
    for shape in ((2, 8, 8), (0, 2, 8, 8)):
        with raises(ValueError, 'img', shape):
            step(dict(img=np.zeros(shape, np.float32)))
