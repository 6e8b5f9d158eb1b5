"""Backbones, and the base class that each derives from."""

from mmkron.models.backbones.base import Backbone
from mmkron.models.backbones.kanet import KANet
from mmkron.models.backbones.lambda_mobilenet_v2 import LambdaMobileNetV2
from mmkron.models.backbones.lambda_resnet import LambdaResNet
from mmkron.models.backbones.qkformer import QKFormer

__all__ = ['Backbone', 'KANet', 'LambdaMobileNetV2', 'LambdaResNet', 'QKFormer']
