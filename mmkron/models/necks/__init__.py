"""Necks between a backbone and a head of the hosts."""

from mmkron.models.necks.kronecker import KroneckerNeck
from mmkron.models.necks.pooling import GlobalAveragePoolingDropout
from mmkron.models.necks.spike_rate import SpikeRateNeck

__all__ = ['GlobalAveragePoolingDropout', 'KroneckerNeck', 'SpikeRateNeck']
