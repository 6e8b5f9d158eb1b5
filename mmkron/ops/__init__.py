"""The operators as functions on tensors. This package needs nothing but torch."""

from mmkron.ops.coefficient_bn import CoefficientBN
from mmkron.ops.column_attention import attend, attention_coefficients
from mmkron.ops.kronecker import (
    axis_means,
    dense_attention,
    kronecker_attention_kv,
    kronecker_attention_qkv,
    outer_sum,
    pool_context,
    pooled_attention,
)
from mmkron.ops.lambdas import content_lambda, content_matrix, position_lambda
from mmkron.ops.neurons.lif import lif
from mmkron.ops.spiking import channel_qk_attention, spiking_self_attention, token_qk_attention

__all__ = [
    'CoefficientBN',
    'attend',
    'attention_coefficients',
    'axis_means',
    'channel_qk_attention',
    'content_lambda',
    'content_matrix',
    'dense_attention',
    'kronecker_attention_kv',
    'kronecker_attention_qkv',
    'lif',
    'outer_sum',
    'pool_context',
    'pooled_attention',
    'position_lambda',
    'spiking_self_attention',
    'token_qk_attention',
]
