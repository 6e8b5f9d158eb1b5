"""The operators as functions on tensors. This package needs nothing but torch."""

from mmkron.ops.kronecker import (
    CoefficientBN,
    attend,
    attention_coefficients,
    axis_means,
    dense_attention,
    kronecker_attention_kv,
    kronecker_attention_qkv,
    outer_sum,
    pool_context,
    pooled_attention,
)
from mmkron.ops.lambdas import content_lambda, content_matrix, position_lambda

__all__ = [
    'CoefficientBN',
    'attend',
    'attention_coefficients',
    'axis_means',
    'content_lambda',
    'content_matrix',
    'dense_attention',
    'kronecker_attention_kv',
    'kronecker_attention_qkv',
    'outer_sum',
    'pool_context',
    'pooled_attention',
    'position_lambda',
]
