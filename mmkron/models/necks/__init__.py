"""Necks: what stands between a backbone and the host's head."""

from mmkron.models.necks.kronecker import KroneckerNeck
from mmkron.models.necks.pooling import GlobalAveragePoolingDropout

__all__ = ['GlobalAveragePoolingDropout', 'KroneckerNeck']
