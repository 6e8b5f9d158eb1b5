"""Layers with parameters: the operators of :mod:`mmkron.ops` with their linear maps."""

from mmkron.layers.kronecker_attention import KroneckerAttention2d
from mmkron.layers.lambda_layer import LambdaLayer
from mmkron.layers.neuron import LIF
from mmkron.layers.spiking import (
    ChannelQKAttention,
    SpikingConv,
    SpikingMLP,
    SpikingPatchEmbed,
    SpikingSelfAttention,
    TokenQKAttention,
)

__all__ = [
    'LIF',
    'ChannelQKAttention',
    'KroneckerAttention2d',
    'LambdaLayer',
    'SpikingConv',
    'SpikingMLP',
    'SpikingPatchEmbed',
    'SpikingSelfAttention',
    'TokenQKAttention',
]
