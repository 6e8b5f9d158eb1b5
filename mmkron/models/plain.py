"""Parts for plain PyTorch, where no host library adds a neck and a head to a backbone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch.nn as nn
from torch import Tensor

from mmkron.models.backbones.base import Backbone
from mmkron.utils.checks import check_int


class Select(nn.Module):
    """Pick one map of a backbone's tuple, for use in ``nn.Sequential``.

    Args:
        index: Position in the tuple; negatives count from the end.

    Raises:
        TypeError: If ``index`` is not an int.
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
    """Classify images by a backbone: the mean of its last map over the positions, then a linear layer.

    The names of the weights are those of MMPretrain's ``ImageClassifier`` with ``LinearClsHead``, so the ``state_dict``
    of a checkpoint that was trained there loads.

    Args:
        backbone: One of :mod:`mmkron.models.backbones`; of :class:`mmkron.models.QKFormer` with ``out_mode='mean'``.
        num_classes: Number of classes.

    Raises:
        TypeError: If ``backbone`` is not a backbone of mmkron or ``num_classes`` is not an int.
        ValueError: If ``num_classes`` is less than 1 or the backbone returns the maps of every time step.

    Examples:
        >>> import torch
        >>> from mmkron.models import KANet
        >>> Classifier(KANet('kanet-kv', widen_factor=0.25), 10)(torch.randn(2, 3, 64, 64)).shape
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
        """Return the logits (B, num_classes) for an input of the backbone, such as images (B, C, H, W)."""
        return self.head(self.backbone(x)[-1].mean((2, 3)))
