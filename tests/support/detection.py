"""Samples and losses of detectors of MMDetection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def detection_sample(size: tuple[int, int], boxes: Sequence[tuple[int, ...]], labels: Sequence[int] = (3,)) -> Any:
    """Return a sample of an image of ``size`` with boxes (x1, y1, x2, y2), which their masks fill."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    masks = np.zeros((len(boxes), *size), np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes):
        mask[top:bottom, left:right] = 1
    shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), size)
    sample = DetDataSample(metainfo=dict(shapes, scale_factor=(1.0, 1.0)))
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor(boxes, dtype=torch.float), labels=torch.tensor(labels), masks=BitmapMasks(masks, *size)
    )
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
    return sample


def total_loss(losses: dict[str, Any]) -> Tensor:
    """Return the sum of the losses, of which a detector may have a list with one per pyramid level."""
    values = [v for value in losses.values() for v in (value if isinstance(value, list) else [value])]
    return sum(v.sum() for v in values if v.requires_grad)
