"""Attention of columns to columns: the core of the operators in :mod:`mmkron.ops.kronecker`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkron.ops.checks import check_columns, check_floating
from mmkron.ops.coefficient_bn import CoefficientBN, check_coefficient_bn
from mmkron.utils.checks import check_choice, check_number

NORMS = ('softmax', 'bn_softmax', 'bn')

# Where another form becomes faster (benchmarks/kronecker.md): torch's tiled attention from this many keys on, and the
# statistics of the coefficients by second moments from this many keys per channel on.
TILED_MIN_KEYS = 768
MOMENTS_MIN_KEYS_PER_CHANNEL = 4
# Coefficients that the CPU computes at a time without a graph: a few megabytes, which fit in its caches.
CHUNK_COEFFICIENTS = 2**19


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """Return ``O = V norm(scale * K^T Q)`` (equation 1), the core of the four operators.

    :func:`attend_plain` is the definition. Batch normalization before softmax acts only through its gain, because
    softmax cancels a shift, and the gain can be applied to the keys. The variance follows from second moments of the
    columns, at a cost of (n + m) d^2; so with many more keys than channels, the coefficients are never normalized in
    memory. Without softmax the product is linear, and ``(V K^T) Q`` needs no coefficients.

    With half-precision operands, the coefficients are float32, also under autocast: their range may exceed half
    precision, and softmax needs their differences. Either of query and key may then be float32.

    Args:
        query: n columns, (B, d, n).
        key: m columns, (B, d, m).
        value: m columns, (B, p, m).
        norm: Normalization of the coefficients, as in :func:`mmkron.ops.dense_attention`.
        scale: Factor on the coefficients before their normalization.
        bn: Parameters and statistics of the batch normalization.

    Returns:
        (B, p, n).

    Raises:
        TypeError: If an operand is not a floating-point tensor, or if the dtypes of the operands differ.
        ValueError: If ``norm`` is unknown, the operands have no columns or do not fit each other, ``scale`` is not
            finite, or a field of ``bn`` does not fit batch normalization of one channel.
    """
    check_floating('value', value)
    check_columns(query, key, value)
    _check_settings(norm, scale, bn)
    if norm == 'softmax':
        return _softmax_attend(query, key, value, scale)

    bn = CoefficientBN() if bn is None else bn
    use_batch = _uses_batch_statistics(bn)
    if use_batch and key.shape[2] < MOMENTS_MIN_KEYS_PER_CHANNEL * key.shape[1]:
        return attend_plain(query, key, value, norm, scale, bn)

    if use_batch:
        mean, var = coefficient_moments(query, key, scale)
        _update_running(bn, mean, var, query.shape[0] * query.shape[2] * key.shape[2])
    else:
        mean, var = bn.running_mean, bn.running_var
    gain = torch.rsqrt(_full(var) + bn.eps)
    if bn.weight is not None:
        gain = gain * bn.weight
    # The gain alone may be too small for half precision, the keys with it are not.
    keys = _full(key) * (gain * scale)
    with torch.autocast(query.device.type, enabled=False):
        queries, values = _full(query), _full(value)
        if norm == 'bn_softmax':
            return _softmax_attend(queries, keys, values).to(value.dtype)
        shift = -gain * mean if bn.bias is None else bn.bias - gain * mean
        out = torch.bmm(torch.bmm(values, keys.transpose(1, 2)), queries) + shift * values.sum(2, keepdim=True)
    return out.to(value.dtype)


def attend_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """Return :func:`attend` by its definition, with the coefficients (B, m, n) in memory."""
    with torch.autocast(query.device.type, enabled=False):
        out = torch.bmm(_full(value), attention_coefficients(query, key, norm, scale, bn).to(_full(value).dtype))
    return out.to(value.dtype)


def attention_coefficients(
    query: Tensor, key: Tensor, norm: str = 'softmax', scale: float = 1.0, bn: CoefficientBN | None = None
) -> Tensor:
    """Return the normalized coefficients ``norm(scale * K^T Q)`` of :func:`attend`, in float32 or wider.

    Arguments and errors are as in :func:`attend`.

    Returns:
        (B, m, n): one column for each query.
    """
    check_columns(query, key)
    _check_settings(norm, scale, bn)
    # Products may exceed the range of half precision.
    with torch.autocast(query.device.type, enabled=False):
        coefficients = torch.bmm(_full(key).transpose(1, 2), _full(query)) * scale
        if norm == 'softmax':
            return torch.softmax(coefficients, 1)
        bn = CoefficientBN() if bn is None else bn
        use_batch = _uses_batch_statistics(bn)
        weight, bias, *running = (x if x is None else x.to(coefficients.dtype) for x in bn[:4])
        coefficients = F.batch_norm(coefficients[:, None], *running, weight, bias, use_batch, bn.momentum, bn.eps)[:, 0]
        for buffer, updated in zip(bn[2:4], running):
            if bn.training and buffer is not None and buffer.dtype != updated.dtype:
                buffer.copy_(updated)
        return torch.softmax(coefficients, 1) if norm == 'bn_softmax' else coefficients


def coefficient_moments(query: Tensor, key: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of all coefficients ``scale * K^T Q`` of a batch, without the coefficients.

    With the keys centered per sample, the variance is the mean over the samples of ``<Cov(K), Q Q^T / n>`` (within a
    query) plus the variance of ``mean(K) . q`` (between queries); both terms are sums of squares, so nothing cancels.

    Args:
        query: (B, d, n).
        key: (B, d, m).
        scale: Factor on the coefficients.

    Returns:
        Two tensors of shape (1,), in float32 or wider.
    """
    with torch.autocast(query.device.type, enabled=False):
        query, key = _full(query), _full(key)
        key_mean = key.mean(2, keepdim=True)
        centered = key - key_mean
        key_cov = torch.bmm(centered, centered.transpose(1, 2)) / key.shape[2]
        query_moment = torch.bmm(query, query.transpose(1, 2)) / query.shape[2]
        per_query = torch.bmm(key_mean.transpose(1, 2), query)
        within = (key_cov * query_moment).sum() / query.shape[0]
        var = within + per_query.var(unbiased=False)
        return (scale * per_query.mean()).reshape(1), (scale**2 * var).reshape(1)


def _uses_batch_statistics(bn: CoefficientBN) -> bool:
    return bn.training or bn.running_var is None


def _update_running(bn: CoefficientBN, mean: Tensor, var: Tensor, count: int) -> None:
    if not bn.training:
        return
    unbiased = var * (count / (count - 1))
    with torch.no_grad():
        for buffer, value in ((bn.running_mean, mean), (bn.running_var, unbiased)):
            if buffer is not None:
                buffer.lerp_(value.to(buffer.dtype), bn.momentum)


def _softmax_attend(query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0) -> Tensor:
    # A traced graph has the two products: cost counters and exporters know them, and their sizes stay free.
    exporting = torch.jit.is_tracing() or _is_exporting()
    tiled = not exporting and key.shape[2] >= TILED_MIN_KEYS and key.shape[1] == value.shape[1]
    # Torch's attention computes the coefficients in float32 already.
    halves = sum(map(is_half, (query, key, value)))
    if 0 < halves < 3 or (not tiled and (halves or torch.is_autocast_enabled(query.device.type))):
        with torch.autocast(query.device.type, enabled=False):
            return _softmax_attend(_full(query), _full(key), _full(value), scale).to(value.dtype)
    if tiled:
        if scale < 0:  # which torch's attention does not support
            key, scale = -key, -scale
        operands = (x.transpose(1, 2).contiguous()[:, None] for x in (query, key, value))
        return F.scaled_dot_product_attention(*operands, scale=scale)[:, 0].transpose(1, 2).to(value.dtype)
    key = key if scale == 1.0 else key * scale
    graph = exporting or torch.is_grad_enabled() or torch.compiler.is_compiling()
    if graph or query.device.type != 'cpu':
        return torch.bmm(value, torch.softmax(torch.bmm(key.transpose(1, 2), query), 1))
    return _softmax_attend_in_place(query, key, value)


def _softmax_attend_in_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend without a graph: softmax overwrites its input, and one buffer serves a few samples after the other."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    samples = max(1, CHUNK_COEFFICIENTS // (keys * queries))
    if samples >= batch:
        coefficients = torch.bmm(key.transpose(1, 2), query)
        return torch.bmm(value, torch.softmax(coefficients, 1, out=coefficients))
    buffer = query.new_empty(samples, keys, queries)
    out = query.new_empty(batch, value.shape[1], queries)
    for start in range(0, batch, samples):
        part = slice(start, start + samples)
        coefficients = buffer[: min(samples, batch - start)]
        torch.bmm(key[part].transpose(1, 2), query[part], out=coefficients)
        torch.softmax(coefficients, 1, out=coefficients)
        torch.bmm(value[part], coefficients, out=out[part])
    return out


def _is_exporting() -> bool:
    # PyTorch 2.6 and earlier have no such function.
    return hasattr(torch.compiler, 'is_exporting') and torch.compiler.is_exporting()


def is_half(x: Tensor) -> bool:
    """Return whether ``x`` is in half precision."""
    return x.dtype in (torch.float16, torch.bfloat16)


def _full(x: Tensor) -> Tensor:
    return x.float() if is_half(x) else x


def _check_settings(norm: str, scale: float, bn: CoefficientBN | None) -> None:
    """Raise TypeError or ValueError unless the settings are as documented in :func:`attend`."""
    check_choice('norm', norm, NORMS)
    check_number('scale', scale)
    if bn is not None:
        check_coefficient_bn(bn)
