"""What a layer gives for a batch without a map, such as the regions of an image in which nothing was found."""

from __future__ import annotations

import torch.nn as nn
from torch import Tensor


def empty_map(layer: nn.Module, channels: int, *inputs: Tensor) -> Tensor:
    """Return a map (0, channels, H, W) of the first input's H, W and dtype.

    Its gradient is zero for all parameters of the layer and empty for the inputs, so that processes that train together
    find a gradient everywhere. Buffers, such as running statistics, stay as they are.
    """
    total = sum(tensor.sum() for tensor in (*inputs, *layer.parameters()))
    return inputs[0].new_zeros(0, channels, *inputs[0].shape[2:]) + 0 * total
