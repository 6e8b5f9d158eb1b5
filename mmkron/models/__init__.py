"""Networks and their parts. Importing this module registers them and needs no host library.

The decode heads derive from MMSegmentation's base class, so they are imported on first use.
"""

from __future__ import annotations

from typing import Any

from mmkron.layers import KroneckerAttention2d, LambdaLayer
from mmkron.models.backbones import KANet, LambdaMobileNetV2, LambdaResNet, QKFormer
from mmkron.models.necks import GlobalAveragePoolingDropout, KroneckerNeck, SpikeRateNeck
from mmkron.registry import MODELS

# Without the heads, so that a star import does not need MMSegmentation.
__all__ = [
    'GlobalAveragePoolingDropout',
    'KANet',
    'KroneckerAttention2d',
    'KroneckerNeck',
    'LambdaLayer',
    'LambdaMobileNetV2',
    'LambdaResNet',
    'QKFormer',
    'SpikeRateNeck',
]


def __getattr__(name: str) -> Any:
    if name in MODELS.NEEDS_HOST:
        return MODELS.get(name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted({*globals(), *MODELS.NEEDS_HOST})
