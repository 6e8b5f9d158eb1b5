"""Content lambda: one k x v matrix per sample, made of keys and values.

Source: Bello, LambdaNetworks, ICLR 2021 (arXiv 2102.08602), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkron.ops.checks import check_device
from mmkron.ops.lambdas.operands import check_operand, check_same_sizes, compute_dtype


def content_lambda(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Apply the content lambda of keys and values to every query and return the outputs, not the lambda.

    The output is ``y_n = q_n . sum_u softmax(K_u)^T V_u``; :func:`content_matrix` returns the lambda itself.

    Args:
        query: Queries (B, h, k, H, W), or (B, h, k, L) on a one-dimensional lattice (then all arguments alike).
        key: Keys (B, u, k, H', W'), normalized here by a softmax over their positions.
        value: Values (B, u, v, H', W').
        key_mask: Bool mask (B, H', W'), true where a position takes part, false for example in the padding of a
            batch. All positions by default.

    Returns:
        Outputs (B, h, v, H, W).

    Raises:
        TypeError: If the dtypes of the operands differ, or the mask is not bool.
        ValueError: If shapes do not fit, or the mask leaves a sample without a position.

    Examples:
        >>> query = torch.randn(2, 4, 16, 7, 7)
        >>> key, value = torch.randn(2, 1, 16, 7, 7), torch.randn(2, 1, 32, 7, 7)
        >>> content_lambda(query, key, value).shape
        torch.Size([2, 4, 32, 7, 7])
    """
    check_operand('query', query, dims=(4, 5))
    check_operand('key', key, dims=(query.dim(),), like=query)
    check_same_sizes('key', key, query, 2)
    content = content_matrix(key, value, key_mask)
    with torch.autocast(query.device.type, enabled=False):
        out = torch.matmul(content.transpose(1, 2)[:, None], query.flatten(3).to(content.dtype))
    return out.reshape(*out.shape[:3], *query.shape[3:]).to(query.dtype)


def content_matrix(key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Return the content lambda itself, (B, k, v).

    Arguments and errors are the same as in :func:`content_lambda`.
    """
    check_operand('key', key, dims=(4, 5))
    check_operand('value', value, dims=(key.dim(),), like=key)
    check_same_sizes('value', value, key, 1, *range(3, key.dim()))
    dtype = compute_dtype(key)
    with torch.autocast(key.device.type, enabled=False):
        keys, values = key.flatten(3).to(dtype), value.flatten(3).to(dtype)
        if key_mask is not None:
            _check_mask(key_mask, key)
            keys = keys.masked_fill(~key_mask.flatten(1)[:, None, None], torch.finfo(dtype).min)
        return torch.matmul(torch.softmax(keys, 3), values.transpose(2, 3)).sum(1)


def _check_mask(key_mask: Tensor, key: Tensor) -> None:
    if torch.jit.is_tracing():
        return
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        raise TypeError(f'key_mask must be a bool tensor, got {getattr(key_mask, "dtype", type(key_mask).__name__)}')
    check_device('key_mask', key_mask, key)
    shape = (key.shape[0], *key.shape[3:])
    if tuple(key_mask.shape) != shape:
        raise ValueError(f'key_mask must have shape {shape}, got {tuple(key_mask.shape)}')
    if not bool(key_mask.flatten(1).any(1).all()):
        raise ValueError('key_mask must leave each sample at least one position')
