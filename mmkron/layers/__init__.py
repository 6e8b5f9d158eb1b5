"""Layers with parameters: the operators of :mod:`mmkron.ops` with their linear maps."""

from mmkron.layers.kronecker_attention import KroneckerAttention2d
from mmkron.layers.lambda_layer import LambdaLayer

__all__ = ['KroneckerAttention2d', 'LambdaLayer']
