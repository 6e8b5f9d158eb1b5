"""The digits dataset: its split and its pixels."""

from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_digits

from mmkron.datasets import Digits


def test_split():
    """Disjoint, complete, stratified, the same at every call."""
    train, val = Digits('train'), Digits('val')
    assert (len(train), len(val)) == (1347, 450)
    rows = [
        {sample['sample_idx'] for sample in map(dataset.get_data_info, range(len(dataset)))} for dataset in (train, val)
    ]
    source = load_digits()
    indices = [[d.load_data_list()[i] for i in range(len(d))] for d in (train, val)]
    images = [{sample['img'].tobytes() for sample in samples} for samples in indices]
    assert len(rows[0]) == 1347
    assert not images[0] & images[1]
    counts = Counter(sample['gt_label'] for sample in indices[1])
    assert set(counts) == set(range(10))
    assert max(abs(counts[c] - 450 * (source.target == c).mean()) for c in range(10)) <= 1
    assert [s['gt_label'] for s in Digits('val').load_data_list()] == [s['gt_label'] for s in indices[1]]


def test_pixels():
    source = load_digits()
    brightest = 0
    lookup = {
        np.rint(image * 255 / 16).astype(np.uint8).tobytes(): target
        for image, target in zip(source.images, source.target)
    }
    for sample in Digits('val').load_data_list():
        assert sample['img'].shape == (8, 8)
        assert sample['img'].dtype == np.uint8
        assert lookup[sample['img'].tobytes()] == sample['gt_label']
        brightest = max(brightest, sample['img'].max())
    assert brightest == 255


def test_bad_split():
    with pytest.raises(ValueError, match=r"split must be one of \('train', 'val'\), got 'test'"):
        Digits('test')
