"""Costs of the operators in closed form."""

from mmkron.analysis.kronecker_cost import AttentionCost, attention_cost

__all__ = ['AttentionCost', 'attention_cost']
