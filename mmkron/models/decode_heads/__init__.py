"""Decode heads for MMSegmentation. Importing this module imports MMSegmentation."""

from mmkron.models.decode_heads.aspp_v2_head import ASPPV2Head
from mmkron.models.decode_heads.kao_head import KAOHead

__all__ = ['ASPPV2Head', 'KAOHead']
