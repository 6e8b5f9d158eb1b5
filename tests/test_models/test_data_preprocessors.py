"""EventDataPreprocessor: batches of frames (B, T, C, H, W) and mixing."""

import numpy as np
import pytest
import torch
from mmpretrain.structures import DataSample

from mmkron.registry import MODELS
from support.errors import raises

SHAPE = (3, 2, 8, 10)  # T, C, H, W


def build(**kwargs):
    return MODELS.build(dict(type='mmkron.EventDataPreprocessor', num_classes=4, **kwargs))


def batch_of(count=4):
    """Return samples of which number i has the value i + 1 everywhere and the class i."""
    inputs = [torch.full(SHAPE, i + 1, dtype=torch.float32) for i in range(count)]
    return dict(inputs=inputs, data_samples=[DataSample().set_gt_label(i) for i in range(count)])


def test_batches_without_mixing():
    torch.manual_seed(0)
    frames = [torch.randint(0, 9, SHAPE) for _ in range(2)]
    samples = [DataSample().set_gt_label(i) for i in (1, 3)]
    for inputs in (frames, torch.stack(frames)):
        batch = build()(dict(inputs=inputs, data_samples=samples), training=True)
        assert batch['inputs'].dtype == torch.float32
        torch.testing.assert_close(batch['inputs'], torch.stack(frames).float())
        assert [int(sample.gt_label) for sample in batch['data_samples']] == [1, 3]
    padded = build(pad_size_divisor=16)(dict(inputs=frames), training=False)['inputs']
    assert padded.shape == (2, 3, 2, 16, 16)
    torch.testing.assert_close(padded[..., :8, :10], torch.stack(frames).float())
    assert padded.sum() == sum(each.sum() for each in frames)


@pytest.mark.parametrize('name', ['CutMix', 'ResizeMix'])
def test_mixing_cuts_height_and_width(name):
    """All frames and polarities get the same rectangle of another sample, and labels its share."""
    mixed = 0
    for seed in range(20):
        np.random.seed(seed)
        torch.manual_seed(seed)
        data = batch_of()
        out = build(batch_augments=dict(augments=dict(type=name, alpha=1.0)))(data, training=True)
        frames_of_samples = out['inputs'].round(decimals=3)  # ResizeMix interpolates
        for i, (frames, sample) in enumerate(zip(frames_of_samples, out['data_samples'])):
            np.testing.assert_array_equal(frames, frames[:1, :1].expand(SHAPE))
            cut = (frames[0, 0] != i + 1).numpy()
            rows, columns = cut.any(1), cut.any(0)
            np.testing.assert_array_equal(cut, rows[:, None] & columns)
            other = frames[0, 0][torch.from_numpy(cut)].unique()
            assert len(other) <= 1
            if len(other):
                mixed += 1
                share = cut.mean()
                expected = torch.zeros(4)
                expected[i] += 1 - share
                expected[int(other) - 1] += share
                torch.testing.assert_close(sample.gt_score, expected, check_dtype=False, atol=1e-6, rtol=0)
                assert rows.sum() * columns.sum() == cut.sum()
    assert mixed > 20


def test_mixup_is_a_weighted_sum():
    np.random.seed(0)
    torch.manual_seed(0)
    out = build(batch_augments=dict(augments=dict(type='Mixup', alpha=0.5)))(batch_of(), training=True)
    values = torch.arange(1.0, 5)
    for frames, sample in zip(out['inputs'], out['data_samples']):
        torch.testing.assert_close(frames, (sample.gt_score * values).sum().expand(SHAPE))
    unmixed = build(batch_augments=dict(augments=dict(type='Mixup', alpha=0.5)))(batch_of(), training=False)
    torch.testing.assert_close(unmixed['inputs'][:, 0, 0, 0, 0], values)


def test_inputs_that_are_no_frames():
    frames = torch.zeros(SHAPE)
    for inputs in ([frames[0]], [frames, frames[:2]], [frames, frames[:, :1]], frames):
        with raises(ValueError, 'inputs'):
            build()(dict(inputs=inputs), training=False)
    with raises(TypeError, 'inputs', 'ndarray'):
        build()(dict(inputs=[frames.numpy()]), training=False)
