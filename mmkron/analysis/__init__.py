"""Costs in closed form, what coefficients mean for positions, energy of spikes, weights of other libraries."""

from mmkron.analysis.coefficient_maps import PositionWeights, position_weights
from mmkron.analysis.converted import Converted
from mmkron.analysis.kronecker_cost import AttentionCost, attention_cost
from mmkron.analysis.lambda_weights import convert_lambda_networks, convert_resnet, convert_timm
from mmkron.analysis.qkformer_weights import convert_qkformer
from mmkron.analysis.spike_energy import LayerActivity, NeuronActivity, Operations, SpikeActivity, measure_activity

__all__ = [
    'AttentionCost',
    'Converted',
    'LayerActivity',
    'NeuronActivity',
    'Operations',
    'PositionWeights',
    'SpikeActivity',
    'attention_cost',
    'convert_lambda_networks',
    'convert_qkformer',
    'convert_resnet',
    'convert_timm',
    'measure_activity',
    'position_weights',
]
