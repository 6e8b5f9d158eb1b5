"""The digits dataset: its split and its pixels."""

from collections import Counter

import numpy as np
from sklearn.datasets import load_digits

from mmkron.datasets import Digits


def test_split():
    """The split is disjoint, complete, stratified, and equal at every call."""
    train, val = Digits('train').load_data_list(), Digits('val').load_data_list()
    assert (len(Digits('train')), len(Digits('val'))) == (len(train), len(val)) == (1347, 450)
    rows = [{sample['sample_idx'] for sample in samples} for samples in (train, val)]
    assert not rows[0] & rows[1]
    assert rows[0] | rows[1] == set(range(1797))
    images = [{sample['img'].tobytes() for sample in samples} for samples in (train, val)]
    assert not images[0] & images[1]
    counts = Counter(sample['gt_label'] for sample in val)
    target = load_digits().target
    assert all(abs(counts[c] - 450 * (target == c).mean()) <= 1 for c in range(10))
    assert [s['sample_idx'] for s in Digits('val').load_data_list()] == [s['sample_idx'] for s in val]


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


def test_class_of_a_sample():
    dataset = Digits('val')
    assert [dataset.get_cat_ids(i) for i in range(5)] == [[s['gt_label']] for s in dataset.load_data_list()[:5]]
