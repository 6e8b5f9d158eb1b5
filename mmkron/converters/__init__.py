"""Convert public state dicts to the names of mmkron's networks, in memory; tools/model_converters reads and writes."""

from mmkron.converters.lambda_resnet import convert_lambda_networks, convert_resnet, convert_timm
from mmkron.converters.qkformer import convert_qkformer
from mmkron.converters.result import Converted

__all__ = ['Converted', 'convert_lambda_networks', 'convert_qkformer', 'convert_resnet', 'convert_timm']
