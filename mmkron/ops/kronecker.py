"""Kronecker attention on feature maps, with the dense and the pooled attention it is compared with.

Source: Gao, Wang and Ji, Kronecker Attention Networks, KDD 2020 (arXiv 2007.08442), section 3.4.

All four operators share one core, :func:`attend`, and differ in what they hand it as query, key and value:

========== ============================ =========================== =========================
operator   query                        key and value               coefficients
========== ============================ =========================== =========================
dense      every position, ``H W``      every position, ``H' W'``   ``H W x H' W'``
pooled     every position               2 x 2 max pooled positions  ``H W x H' W' / 4``
KV         every position               row and column means        ``H W x (H' + W')``
QKV        row and column means         row and column means        ``(H + W) x (H' + W')``
========== ============================ =========================== =========================

Section 2 of the paper defines the coefficients by the plain inner product, so ``scale`` is 1 unless it is given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkron.ops.checks import check_columns, check_floating, check_map
from mmkron.ops.coefficient_bn import CoefficientBN, check_coefficient_bn
from mmkron.utils.checks import check_choice, check_number, resolve_size

NORMS = ('softmax', 'bn_softmax', 'bn')

# Where another form gets faster (benchmarks/kronecker.md): from this many keys on, torch's tiled attention; from this
# many keys a channel on, the statistics of the coefficients from second moments.
TILED_MIN_KEYS = 768
MOMENTS_MIN_KEYS_PER_CHANNEL = 4
# Coefficients that the CPU makes at a time without a graph: a few megabytes, which its caches hold.
CHUNK_COEFFICIENTS = 2**19


def dense_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """Attention of every position to every position (the non-local operator, section 2.2).

    Args:
        query: map (B, C, H, W).
        key: map (B, C, H', W'); the query by default.
        value: map (B, Cv, H', W'); the query by default.
        norm: how the coefficients are normalised: ``softmax`` over the keys, ``bn_softmax`` (batch normalisation of
            the coefficients as one channel, then softmax), or ``bn`` (batch normalisation alone).
        scale: factor on the coefficients before they are normalised.
        bn: parameters and statistics of the batch normalisation; batch statistics without parameters by default.

    Returns:
        Map (B, Cv, H, W).

    Raises:
        TypeError: an input that is no floating-point tensor; inputs of different dtypes.
        ValueError: inputs that are not maps, are empty or do not fit each other; an unknown ``norm``.

    From ``TILED_MIN_KEYS`` keys on this is torch's tiled attention, which on the CPU has no second derivative.
    """
    key, value = _check_maps(query, key, value)
    out = attend(query.flatten(2), key.flatten(2), value.flatten(2), norm, scale, bn)
    return out.reshape(*out.shape[:2], *query.shape[2:])


def pooled_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """:func:`dense_attention` whose key and value are 2 x 2 max pooled (the subsampled non-local operator).

    Odd maps are pooled with a last partial window, so that every position counts. Arguments, shapes and errors are
    those of :func:`dense_attention`.
    """
    key, value = _check_maps(query, key, value)
    out = attend(query.flatten(2), pool_context(key), pool_context(value), norm, scale, bn)
    return out.reshape(*out.shape[:2], *query.shape[2:])


def kronecker_attention_kv(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """KAO_KV: every position attends to the row and column means, ``O = C softmax(C^T X)``.

    Cost H W (H' + W') (C + Cv) multiply-adds. Arguments, shapes and errors are those of :func:`dense_attention`.
    """
    key, value = _check_maps(query, key, value)
    key_means = full_means(key)
    value_means = key_means if value is key else full_means(value)
    out = attend(query.flatten(2), key_means, value_means.to(value.dtype), norm, scale, bn)
    return out.reshape(*out.shape[:2], *query.shape[2:])


def kronecker_attention_qkv(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """KAO_QKV: the means attend to the means, ``[H~, L~] = C softmax(C^T C)``; the output is their outer sum.

    Cost (H + W) (H' + W') (C + Cv) multiply-adds. Every channel of the output is a row term plus a column term.
    Arguments, shapes and errors are those of :func:`dense_attention`.
    """
    key, value = _check_maps(query, key, value)
    query_means = full_means(query)
    key_means = query_means if key is query else full_means(key)
    value_means = key_means if value is key else full_means(value)
    out = attend(query_means, key_means, value_means.to(value.dtype), norm, scale, bn)
    return outer_sum(out, query.shape[2:])


def axis_means(x: Tensor) -> Tensor:
    """``C = [H^T, L^T]``: the mean over the rows, then the mean over the columns.

    Args:
        x: map (B, C, H, W).

    Returns:
        (B, C, W + H): W means over the height, then H means over the width.

    Raises:
        TypeError, ValueError: ``x`` is not a floating-point map, or empty.
    """
    check_map('x', x)
    return full_means(x).to(x.dtype)


def full_means(x: Tensor) -> Tensor:
    """As :func:`axis_means`, but in float32 where ``x`` is half precision: softmax needs the differences of products,
    which are less than the rounding of the means makes of them."""
    dtype = torch.float32 if _is_half(x) else x.dtype
    # The gradient of a sum is a view, that of a mean a map: dividing the small side saves two passes over maps.
    return torch.cat([x.sum(dim, dtype=dtype) / x.shape[dim] for dim in (2, 3)], 2)


def pool_context(x: Tensor) -> Tensor:
    """2 x 2 max pooling with a last partial window: map (B, C, H, W) -> (B, C, ceil(H / 2) * ceil(W / 2)).

    ``torch.export`` with dynamic sizes keeps their parity (torch's pooling guards on it).

    Raises:
        TypeError, ValueError: ``x`` is not a floating-point map, or empty.
    """
    check_map('x', x)
    return F.max_pool2d(x, 2, ceil_mode=True).flatten(2)


def outer_sum(y: Tensor, size: tuple[int, int]) -> Tensor:
    """Outer sum of the two parts of ``y``, ordered as :func:`axis_means` orders them.

    Args:
        y: (B, C, W + H).
        size: (H, W).

    Returns:
        Map (B, C, H, W) with ``out[..., i, j] = y[..., W + i] + y[..., j]``.

    Raises:
        TypeError, ValueError: ``y`` or ``size`` is of another type, or they do not fit each other.
    """
    if not torch.jit.is_tracing():
        check_floating('y', y)
        if y.dim() != 3 or 0 in y.shape[1:] or y.shape[2] != sum(resolve_size('size', size)):
            raise ValueError(f'y must have shape (B, C, W + H) for size={size!r}, got {tuple(y.shape)}')
    width = size[1]
    return y[:, :, None, :width] + y[:, :, width:, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norm: str = 'softmax',
    scale: float = 1.0,
    bn: CoefficientBN | None = None,
) -> Tensor:
    """``O = V norm(scale * K^T Q)`` (equation 1), the core of the four operators; :func:`attend_plain` defines it.

    Batch normalisation before softmax acts only through its scale, because softmax cancels a shift, and the scale
    can be applied to the keys. The variance that it needs follows from second moments of the columns, at a cost of
    (n + m) d^2; so where there are many more keys than channels, the coefficients are never normalised in memory.
    Without softmax the product is linear and ``(V K^T) Q`` needs no coefficients at all.

    Args:
        query: n columns, (B, d, n).
        key: m columns, (B, d, m).
        value: m columns, (B, p, m).
        norm, scale, bn: as in :func:`dense_attention`.

    Returns:
        (B, p, n).

    Raises:
        TypeError: an argument of another type; operands of different dtypes.
        ValueError: an unknown ``norm``; operands without columns or that do not fit each other; a ``scale`` that is not
            finite; parameters, momentum or eps of ``bn`` that batch normalization of one channel cannot have.

    The coefficients are float32 where operands are half precision, also under autocast: products of half-precision
    operands may leave its range, and softmax needs their differences. Of query and key, either may be float32 then.
    """
    check_floating('value', value)
    check_columns(query, key, value)
    _check_settings(norm, scale, bn)
    if norm == 'softmax':
        return _softmax_attend(query, key, value, scale)

    bn = CoefficientBN() if bn is None else bn
    use_batch = bn.training or bn.running_var is None
    if use_batch and key.shape[2] < MOMENTS_MIN_KEYS_PER_CHANNEL * key.shape[1]:
        return attend_plain(query, key, value, norm, scale, bn)

    if use_batch:
        mean, var = coefficient_moments(query, key, scale)
        _update_running(bn, mean, var, query.shape[0] * query.shape[2] * key.shape[2])
    else:
        mean, var = bn.running_mean, bn.running_var
    # The gain alone may be too small for half precision; with the keys it is not.
    gain = torch.rsqrt(_full(var) + bn.eps)
    if bn.weight is not None:
        gain = gain * bn.weight
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
    """The definition of :func:`attend`, with the coefficients (B, m, n) in memory."""
    with torch.autocast(query.device.type, enabled=False):
        out = torch.bmm(_full(value), attention_coefficients(query, key, norm, scale, bn).to(_full(value).dtype))
    return out.to(value.dtype)


def attention_coefficients(
    query: Tensor, key: Tensor, norm: str = 'softmax', scale: float = 1.0, bn: CoefficientBN | None = None
) -> Tensor:
    """Return the normalized coefficients ``norm(scale * K^T Q)`` of :func:`attend`, in float32 or wider.

    Arguments and errors are those of :func:`attend`.

    Returns:
        (B, m, n): one column for each query.
    """
    check_columns(query, key)
    _check_settings(norm, scale, bn)
    # Products may leave the range of half precision.
    with torch.autocast(query.device.type, enabled=False):
        coefficients = torch.bmm(_full(key).transpose(1, 2), _full(query)) * scale
        if norm == 'softmax':
            return torch.softmax(coefficients, 1)
        bn = CoefficientBN() if bn is None else bn
        use_batch = bn.training or bn.running_var is None
        weight, bias, *running = (x if x is None else x.to(coefficients.dtype) for x in bn[:4])
        coefficients = F.batch_norm(coefficients[:, None], *running, weight, bias, use_batch, bn.momentum, bn.eps)[:, 0]
        for buffer, updated in zip(bn[2:4], running):
            if bn.training and buffer is not None and buffer.dtype != updated.dtype:
                buffer.copy_(updated)
        return torch.softmax(coefficients, 1) if norm == 'bn_softmax' else coefficients


def coefficient_moments(query: Tensor, key: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of all coefficients ``scale * K^T Q`` of a batch, without the coefficients.

    With the keys centred per sample, the variance is the mean over the samples of ``<Cov(K), Q Q^T / n>`` (within a
    query) plus the variance of ``mean(K) . q`` (between queries); both terms are sums of squares, so nothing cancels.

    Args:
        query: (B, d, n).
        key: (B, d, m).
        scale: factor on the coefficients.

    Returns:
        Two tensors of shape (1,), in float32 or wider.
    """
    with torch.autocast(query.device.type, enabled=False):
        query, key = _full(query), _full(key)
        key_mean = key.mean(2, keepdim=True)
        centred = key - key_mean
        key_cov = torch.bmm(centred, centred.transpose(1, 2)) / key.shape[2]
        query_moment = torch.bmm(query, query.transpose(1, 2)) / query.shape[2]
        per_query = torch.bmm(key_mean.transpose(1, 2), query)
        within = (key_cov * query_moment).sum() / query.shape[0]
        var = within + per_query.var(unbiased=False)
        return (scale * per_query.mean()).reshape(1), (scale**2 * var).reshape(1)


def _update_running(bn: CoefficientBN, mean: Tensor, var: Tensor, count: int) -> None:
    if not bn.training:
        return
    unbiased = var * (count / (count - 1))
    with torch.no_grad():
        for buffer, value in ((bn.running_mean, mean), (bn.running_var, unbiased)):
            if buffer is not None:
                buffer.lerp_(value.to(buffer.dtype), bn.momentum)


def _softmax_attend(query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0) -> Tensor:
    # A traced graph gets the two products: cost counters and exporters know them, and their sizes stay free.
    exporting = torch.jit.is_tracing() or getattr(torch.compiler, 'is_exporting', bool)()
    tiled = not exporting and key.shape[2] >= TILED_MIN_KEYS and key.shape[1] == value.shape[1]
    # Torch's attention has the coefficients in float32 already.
    halves = sum(map(_is_half, (query, key, value)))
    if 0 < halves < 3 or (not tiled and (halves or torch.is_autocast_enabled(query.device.type))):
        with torch.autocast(query.device.type, enabled=False):
            return _softmax_attend(_full(query), _full(key), _full(value), scale).to(value.dtype)
    if tiled:
        if scale < 0:  # of which torch's attention knows nothing
            key, scale = -key, -scale
        operands = (x.transpose(1, 2).contiguous()[:, None] for x in (query, key, value))
        return F.scaled_dot_product_attention(*operands, scale=scale)[:, 0].transpose(1, 2).to(value.dtype)
    key = key if scale == 1.0 else key * scale
    graph = exporting or torch.is_grad_enabled() or torch.compiler.is_compiling()
    if graph or query.device.type != 'cpu':
        return torch.bmm(value, torch.softmax(torch.bmm(key.transpose(1, 2), query), 1))
    return _softmax_attend_in_place(query, key, value)


def _softmax_attend_in_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Without a graph: softmax writes over its input, and one buffer serves a few samples after the other."""
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


def _is_half(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def _full(x: Tensor) -> Tensor:
    return x.float() if _is_half(x) else x


def _check_maps(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fills in the defaults and raises on maps that do not fit each other."""
    key = query if key is None else key
    value = query if value is None else value
    check_map('query', query)
    check_map('key', key, query.shape[1], like=query)
    check_map('value', value, like=query)
    if not torch.jit.is_tracing() and key.shape[2:] != value.shape[2:]:
        raise ValueError(f'key and value must have equal map sizes, got {tuple(key.shape)} and {tuple(value.shape)}')
    return key, value


def _check_settings(norm: str, scale: float, bn: CoefficientBN | None) -> None:
    """Raise unless the settings are as :func:`attend` documents them."""
    check_choice('norm', norm, NORMS)
    check_number('scale', scale)
    if bn is not None:
        check_coefficient_bn(bn)
