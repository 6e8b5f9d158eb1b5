"""Costs of the operators in closed form, and what their coefficients mean for single positions."""

from mmkron.analysis.coefficient_maps import PositionWeights, position_weights
from mmkron.analysis.kronecker_cost import AttentionCost, attention_cost

__all__ = ['AttentionCost', 'PositionWeights', 'attention_cost', 'position_weights']
