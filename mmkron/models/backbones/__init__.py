"""Backbones, and the base class that each derives from."""

from mmkron.models.backbones.base import Backbone
from mmkron.models.backbones.kanet import KANet

__all__ = ['Backbone', 'KANet']
