"""Definitions of the operators, written with einsum and loops, that autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Callable[[Tensor], Tensor]


def means(x: Tensor) -> Tensor:
    """Return the means of all columns and of all rows of a map."""
    return torch.cat([x.sum(2) / x.shape[2], x.sum(3) / x.shape[3]], 2)


def positions(x: Tensor) -> Tensor:
    """Return all positions of a map as columns."""
    return x.reshape(*x.shape[:2], -1)


def pooled(x: Tensor) -> Tensor:
    """Return the maxima of 2 x 2 windows; the last ones may be smaller."""
    rows, columns = range(0, x.shape[2], 2), range(0, x.shape[3], 2)
    windows = [x[:, :, i : i + 2, j : j + 2].flatten(2).max(2).values for i in rows for j in columns]
    return torch.stack(windows, 2)


# Reductions of the query and of the context.
MODES: dict[str, tuple[Reduction, Reduction]] = {
    'dense': (positions, positions),
    'pooled': (positions, pooled),
    'kv': (positions, means),
    'qkv': (means, means),
}


def coefficients(query: Tensor, key: Tensor, norm: str = 'softmax', scale: float = 1.0) -> Tensor:
    """Return the coefficients (B, keys, queries)."""
    out = scale * torch.einsum('bdm,bdn->bmn', key, query)
    if norm != 'softmax':
        out = (out - out.mean()) / (out.var(unbiased=False) + 1e-5).sqrt()
    if norm == 'bn':
        return out
    out = (out - out.amax(1, keepdim=True)).exp()
    return out / out.sum(1, keepdim=True)


def attention(query: Tensor, key: Tensor, value: Tensor, norm: str = 'softmax', scale: float = 1.0) -> Tensor:
    """Apply attention to columns."""
    return torch.einsum('bpm,bmn->bpn', value, coefficients(query, key, norm, scale))


def map_attention(
    mode: str, query: Tensor, key: Tensor, value: Tensor, norm: str = 'softmax', scale: float = 1.0
) -> Tensor:
    """Apply the attention of a mode to maps."""
    reduce_query, reduce_context = MODES[mode]
    out = attention(reduce_query(query), reduce_context(key), reduce_context(value), norm, scale)
    height, width = query.shape[2:]
    if mode == 'qkv':
        return out[:, :, :width].unsqueeze(2) + out[:, :, width:].unsqueeze(3)
    return out.reshape(*out.shape[:2], height, width)


def content_matrix(key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Return the content lambdas (B, k, v)."""
    weights = (key.flatten(3) - key.flatten(3).amax(3, keepdim=True)).exp()
    if key_mask is not None:
        weights = weights * key_mask.flatten(1)[:, None, None]
    return torch.einsum('bukm,buvm->bkv', weights / weights.sum(3, keepdim=True), value.flatten(3))


def content_lambda(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Apply the content lambda to the queries."""
    return torch.einsum('bhk...,bkv->bhv...', query, content_matrix(key, value, key_mask))


def position_lambda(
    query: Tensor, value: Tensor, table: Tensor, content: Tensor | None = None, stride: int = 1, dilation: int = 1
) -> Tensor:
    """Add up the lambdas of all entries of the table, shifted over the map, and apply them to the queries."""
    dilation = min(dilation, max(value.shape[3:]))  # a larger one sees nothing but the center, too
    rows, columns = (dilation * (side // 2) for side in table.shape[2:])
    padded = F.pad(value, (columns, columns, rows, rows))
    lambdas = 0 if content is None else content[..., None, None]
    for i in range(table.shape[2]):
        for j in range(table.shape[3]):
            seen = padded[..., dilation * i :, dilation * j :][..., : value.shape[3], : value.shape[4]]
            entry = table[:, :, i, j]
            lambdas = lambdas + torch.einsum('uk,buvxy->bkvxy', entry, seen[..., ::stride, ::stride])
    return torch.einsum('bhkxy,bkvxy->bhvxy', query, lambdas.expand(*lambdas.shape[:3], *query.shape[3:]))


def neurons(x: Tensor, v0: Tensor | None = None, tau: Tensor | float = 2.0, v_threshold: float = 1.0) -> Tensor:
    """Compute LIF neurons with a hard reset to 0 and the surrogate of a sigmoid."""
    v, out = torch.zeros_like(x[0]) if v0 is None else v0, []
    for current in x:
        h = v + (current - v) / tau
        soft = torch.sigmoid(4 * (h - v_threshold))
        s = (h >= v_threshold).to(x.dtype) + (soft - soft.detach())
        out.append(s)
        v = h * (1 - s.detach())
    return torch.stack(out)


def spiking_attention(kind: str, *operands: Tensor, heads: int = 2, v_threshold: float = 0.5) -> Tensor:
    """Apply spiking attention of a kind, token, channel or self, with a scale of 1/8 for the last one."""
    q, k, *v = (x.unflatten(2, (heads, -1)) for x in operands)
    if kind == 'self':
        weights = torch.einsum('tbhcn,tbhcm->tbhnm', q, k)
        out = neurons(0.125 * torch.einsum('tbhnm,tbhcm->tbhcn', weights, v[0]), v_threshold=v_threshold)
    else:
        out = neurons(q.sum(3 if kind == 'token' else 4, keepdim=True), v_threshold=v_threshold) * k
    return out.flatten(2, 3)


def norm_neurons(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply batch norm in training mode and the neurons of four steps."""
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    out = (x - mean) / (var + 1e-5).sqrt() * weight[:, None, None] + bias[:, None, None]
    return neurons(out.reshape(4, -1, *x.shape[1:]))
