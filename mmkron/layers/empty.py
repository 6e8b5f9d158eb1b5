"""Output of a layer for an empty batch, such as the regions of an image without objects."""

from __future__ import annotations

import torch.nn as nn
from torch import Tensor


def empty_map(layer: nn.Module, channels: int, *inputs: Tensor) -> Tensor:
    """Return an empty map (0, channels, H, W) with the size and dtype of the first input.

    In the backward pass all parameters of the layer get zero gradients, as distributed training requires. Buffers, such
    as running statistics, do not change.
    """
    total = sum(tensor.sum() for tensor in (*inputs, *layer.parameters()))
    return inputs[0].new_zeros(0, channels, *inputs[0].shape[2:]) + 0 * total
