"""Handwritten digits of scikit-learn: 1,797 real images for demos and tests without a download."""

from __future__ import annotations

from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset

from mmkron.registry import DATASETS
from mmkron.utils.checks import check_choice

SPLITS = ('train', 'val')
VAL_SIZE = 450


@DATASETS.register_module()
class Digits(BaseDataset):
    """Scans of handwritten digits, 8 x 8 pixels, in a fixed stratified split: 1,347 for training, 450 for validation.

    A sample holds ``img``, (8, 8) uint8 with ink at 255, and ``gt_label``, 0 to 9. Source: the test set of Alpaydin
    and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998, as in ``sklearn.datasets.load_digits``.

    Args:
        split: ``train`` or ``val``.
        **kwargs: Arguments of :class:`mmengine.dataset.BaseDataset`, such as ``pipeline``.

    Raises:
        ValueError: If ``split`` is unknown.
    """

    METAINFO = dict(classes=tuple('0123456789'))

    def __init__(self, split: str = 'train', **kwargs: Any) -> None:
        check_choice('split', split, SPLITS)
        self.split = split
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict]:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        rows = np.arange(len(images))
        train, val = train_test_split(rows, test_size=VAL_SIZE, stratify=digits.target, random_state=0)
        chosen = sorted(train if self.split == 'train' else val)
        return [dict(img=images[i], gt_label=int(digits.target[i]), sample_idx=int(i)) for i in chosen]

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the class of a sample, as ``ClassBalancedDataset`` requires."""
        return [int(self.get_data_info(idx)['gt_label'])]
