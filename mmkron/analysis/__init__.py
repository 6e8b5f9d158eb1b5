"""Costs in closed form, weights of positions, and activity and energy of spiking networks."""

from __future__ import annotations

import warnings
from typing import Any

from mmkron.analysis.coefficient_maps import PositionWeights, position_weights
from mmkron.analysis.kronecker_cost import AttentionCost, attention_cost
from mmkron.analysis.spike_activity import measure_activity
from mmkron.analysis.spike_energy import LayerActivity, NeuronActivity, Operations, SpikeActivity

__all__ = [
    'AttentionCost',
    'LayerActivity',
    'NeuronActivity',
    'Operations',
    'PositionWeights',
    'SpikeActivity',
    'attention_cost',
    'measure_activity',
    'position_weights',
]

_MOVED = ('Converted', 'convert_lambda_networks', 'convert_qkformer', 'convert_resnet', 'convert_timm')


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from mmkron import converters

    warnings.warn(f'mmkron.analysis.{name} is now mmkron.converters.{name}', DeprecationWarning, stacklevel=2)
    return getattr(converters, name)
