"""Networks and their parts. Importing this module registers them and requires none of the host libraries.

Components that subclass a host's class, such as the decode heads, are imported on first access.
"""

from typing import Any

from mmkron.layers import KroneckerAttention2d, LambdaLayer
from mmkron.models.backbones import KANet, LambdaMobileNetV2, LambdaResNet, QKFormer
from mmkron.models.necks import GlobalAveragePoolingDropout, KroneckerNeck, SpikeRateNeck
from mmkron.registry import MODELS

# Without the heads, because a star import must not require MMSegmentation.
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
