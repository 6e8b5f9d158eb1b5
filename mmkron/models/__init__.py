"""Networks and their parts. Importing this module registers them; it needs none of the host libraries."""

from mmkron.layers import KroneckerAttention2d
from mmkron.models.backbones import KANet
from mmkron.models.necks import GlobalAveragePoolingDropout

__all__ = ['GlobalAveragePoolingDropout', 'KANet', 'KroneckerAttention2d']
