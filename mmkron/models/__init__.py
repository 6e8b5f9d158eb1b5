"""Networks and their parts. Importing this module registers them; it needs none of the host libraries.

The heads derive from MMSegmentation's class, so they are imported when they are first asked for.
"""

from typing import Any

from mmkron.layers import KroneckerAttention2d, LambdaLayer
from mmkron.models.backbones import KANet, LambdaMobileNetV2, LambdaResNet, QKFormer
from mmkron.models.necks import GlobalAveragePoolingDropout, KroneckerNeck, SpikeRateNeck
from mmkron.registry import MODELS

# Without the heads: a star import must not need MMSegmentation.
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
