"""Classifier and other parts for plain PyTorch, without a host library."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch.nn as nn
from torch import Tensor

from mmkron.models.backbones.base import Backbone
from mmkron.utils.checks import check_int


class Select(nn.Module):
    """Module that returns one map of a backbone's tuple, for use in ``nn.Sequential``.

    Args:
        index: Position in the tuple. Negative indices count from the end.

    Raises:
        TypeError: If ``index`` is not an int.

    Examples:
        >>> import torch
        >>> Select(-1)((torch.zeros(2, 8, 4, 4), torch.zeros(2, 16, 2, 2))).shape
        torch.Size([2, 16, 2, 2])
    """

    def __init__(self, index: int = -1) -> None:
        super().__init__()
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f'index must be an int, got {index!r}')
        self.index = index

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return the map at ``index``.

        Raises:
            ValueError: If there are fewer maps.
        """
        if not -len(maps) <= self.index < len(maps):
            raise ValueError(f'index must be in [{-len(maps)}, {len(maps) - 1}], got {self.index}')
        return maps[self.index]

    def extra_repr(self) -> str:
        return str(self.index)


class Classifier(nn.Module):
    """Image classifier: a backbone, global average pooling of its last map, and a linear layer.

    The weights are named as in MMPretrain's ``ImageClassifier`` with ``LinearClsHead``, so the ``state_dict`` of a
    checkpoint that was trained with MMPretrain loads.

    Args:
        backbone: One of :mod:`mmkron.models.backbones`. A :class:`mmkron.models.QKFormer` needs ``out_mode='mean'``.
        num_classes: Number of classes.

    Raises:
        TypeError: If the backbone is not one of mmkron's, or ``num_classes`` is not an int.
        ValueError: If ``num_classes`` is below 1, or the backbone returns maps of each step.

    Examples:
        >>> import torch
        >>> from mmkron.models import KANet
        >>> Classifier(KANet('kanet-kv'), num_classes=10)(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """

    def __init__(self, backbone: Backbone, num_classes: int) -> None:
        super().__init__()
        if not isinstance(backbone, Backbone):
            raise TypeError(f'backbone must be a backbone of mmkron, got {type(backbone).__name__}')
        check_int('num_classes', num_classes)
        out_mode = getattr(backbone, 'out_mode', 'mean')
        if out_mode != 'mean':
            raise ValueError(f"out_mode of the backbone must be 'mean', got {out_mode!r}")
        self.backbone = backbone
        self.head = nn.Sequential(OrderedDict(fc=nn.Linear(backbone.out_channels[-1], num_classes)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of an input of the backbone, such as images (B, C, H, W)."""
        return self.head(self.backbone(x)[-1].mean((2, 3)))
