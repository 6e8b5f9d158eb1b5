"""Content and position lambdas, applied to the queries.

Source: Bello, LambdaNetworks, ICLR 2021 (arXiv 2102.08602), section 3.

A lambda is a k x v matrix that a context makes and that queries multiply. The content lambda is one for the whole map,
``softmax(K)^T V``; the position lambda of query n is ``E_n^T V``, with embeddings that depend on offsets alone. Three
formulations of the latter agree to rounding; :func:`choose_form` takes the one with the least estimated time:

====== ====================================================== ================= ====================================
form   how                                                    multiply-adds     fastest
====== ====================================================== ================= ====================================
conv   a convolution of the values makes all lambdas          H W r^2 k v       few values, small scopes; in exports
dense  coefficients of all pairs by a gathered table          (H W)^2 h (k + v) maps of up to 100 positions
tiled  the same, of a tile of queries at a time, recomputed   H W M h (k + v)   most others, above all in training
====== ====================================================== ================= ====================================

M is the window of a tile of t x t' queries, (r + t - 1) (r + t' - 1) less what the border cuts off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkron.ops.checks import check_device, check_floating
from mmkron.ops.lambdas.heuristics import Problem, candidates, estimate
from mmkron.ops.lambdas.tiled import PositionLambdaTiles, choose_tile
from mmkron.utils.checks import check_choice, check_int

FORMS = ('conv', 'dense', 'tiled')


def content_lambda(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """The content lambda, applied to every query: ``y = softmax(K) V^T`` summed over u, times q.

    Args:
        query: (B, h, k, H, W); a lattice of one dimension, (B, h, k, L), in all arguments alike.
        key: (B, u, k, H', W'), normalised here by softmax over its positions.
        value: (B, u, v, H', W').
        key_mask: bool (B, H', W'), true where a position takes part, as those that are no padding of a batch; all of
            them by default.

    Returns:
        (B, h, v, H, W).

    Raises:
        TypeError: inputs of other dtypes, or a mask that is not bool.
        ValueError: shapes that do not fit, or a mask that leaves a sample without a position.
    """
    _check_operand('query', query, dims=(4, 5))
    _check_operand('key', key, dims=(query.dim(),), like=query)
    _check_fits('key', key, query, {2: 2})
    content = content_matrix(key, value, key_mask)
    with torch.autocast(query.device.type, enabled=False):
        out = torch.matmul(content.transpose(1, 2)[:, None], query.flatten(3).to(content.dtype))
    return out.reshape(*out.shape[:3], *query.shape[3:]).to(query.dtype)


def content_matrix(key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """The content lambda itself, (B, k, v). Arguments and errors are those of :func:`content_lambda`."""
    _check_operand('key', key, dims=(4, 5))
    _check_operand('value', value, dims=(key.dim(),), like=key)
    _check_fits('value', value, key, {1: 1, **{axis: axis for axis in range(3, key.dim())}})
    dtype = compute_dtype(key)
    with torch.autocast(key.device.type, enabled=False):
        keys, values = key.flatten(3).to(dtype), value.flatten(3).to(dtype)
        if key_mask is not None:
            _check_mask(key_mask, key)
            keys = keys.masked_fill(~key_mask.flatten(1)[:, None, None], torch.finfo(dtype).min)
        return torch.matmul(torch.softmax(keys, 3), values.transpose(2, 3)).sum(1)


def position_lambda(
    query: Tensor,
    value: Tensor,
    table: Tensor,
    content: Tensor | None = None,
    stride: int = 1,
    dilation: int = 1,
    form: str | None = None,
) -> Tensor:
    """The position lambda of every query, applied to it: ``y_n = sum_m (q_n . E[m - n]) V_m``, summed over u.

    Positions outside the map count as zero. A table of (2H - 1, 2W - 1) is a global scope; beyond it a table has no
    effect, and on a larger map a global table is a local one. Gradients of first order only, except for the forms
    ``conv`` and ``dense``. Half precision (float16) is computed in float32: with the paper's embeddings, N(0, 1), the
    sums leave little of its range.

    Args:
        query: (B, h, k, H, W); a lattice of one dimension, (B, h, k, L), in all arguments alike.
        value: (B, u, v, H', W') where H is ``ceil(H' / stride)``.
        table: embeddings (u, k, r, r') with odd r and r'; entry ``[.., i, j]`` is for the context at the offset
            ``(i - r // 2, j - r' // 2)`` from the query. (u, k, r) on a lattice of one dimension.
        content: a lambda (B, k, v) that all queries of a sample share and that is added to their own.
        stride: step between queries, in positions of the value.
        dilation: step between the positions that an offset of one stands for.
        form: ``conv``, ``dense`` or ``tiled``; that of :func:`choose_form` by default. ``conv`` alone serves a stride
            and a dilation that are both above 1.

    Returns:
        (B, h, v, H, W).

    Raises:
        TypeError: inputs of other dtypes.
        ValueError: shapes that do not fit, an even scope, or an unknown form.
    """
    check_int('stride', stride)
    check_int('dilation', dilation)
    if form is not None:
        check_choice('form', form, FORMS)
    if form in ('dense', 'tiled') and stride > 1 and dilation > 1:
        raise ValueError(f"form must be 'conv' where stride and dilation are above 1, got {stride} and {dilation}")
    _check_operand('query', query, dims=(4, 5))
    _check_operand('value', value, dims=(query.dim(),), like=query)
    _check_table(query, value, table, stride)
    if content is not None:
        _check_operand('content', content, dims=(3,))
        check_device('content', content, query)
        shape = (query.shape[0], query.shape[2], value.shape[2])
        if not torch.jit.is_tracing() and tuple(content.shape) != shape:
            raise ValueError(f'content must have shape (B, k, v) = {shape}, got {tuple(content.shape)}')
    if query.dim() == 4:
        out = position_lambda(
            query[..., None, :], value[..., None, :], table[..., None, :], content, stride, dilation, form
        )
        return out[..., 0, :]

    steps = (dilation, dilation)
    # Exported graphs keep their sizes free, on which this depends.
    if dilation > 1 and not (torch.jit.is_tracing() or torch.compiler.is_compiling()):
        steps = dilation_steps(value.shape[3:], dilation)
        table = reachable(table, value.shape[3:], dilation)
    form = choose_form(query, value, table, stride, dilation) if form is None else form
    dtype = compute_dtype(query)
    with torch.autocast(query.device.type, enabled=False):
        operands = [x if x is None else x.to(dtype) for x in (query, value, table, content)]
        return _FUNCTIONS[form](*operands, stride, steps).to(query.dtype)


def choose_form(query: Tensor, value: Tensor, table: Tensor, stride: int = 1, dilation: int = 1) -> str:
    """``conv``, ``dense`` or ``tiled``: of those that fit in memory, the one of the least estimated time."""
    # Exported graphs keep their sizes free, and compilers know a convolution.
    if torch.jit.is_tracing() or torch.compiler.is_compiling() or (stride > 1 and dilation > 1):
        return 'conv'
    # The phases of a dilation are samples.
    steps = dilation_steps(value.shape[3:], dilation)
    size = tuple(-(-side // step) for side, step in zip(value.shape[3:], steps))
    heads, depth, intra, width = query.shape[1], query.shape[2], value.shape[1], value.shape[2]
    batch = value.shape[0] * steps[0] * steps[1]
    problem = Problem(batch, heads, depth, width, intra, size, tuple(table.shape[2:]), stride)
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in (query, value, table))
    return min(candidates(problem), key=lambda form: estimate(form, problem, backward))


def position_lambda_conv(
    query: Tensor, value: Tensor, table: Tensor, content: Tensor | None, stride: int, dilation: tuple[int, int]
) -> Tensor:
    """The definition of :func:`position_lambda`: a convolution of the values makes the lambdas, with u input and k
    output channels, the same for each of the v channels."""
    batch, intra, width, *size = value.shape
    maps = value.transpose(1, 2).reshape(batch * width, intra, *size)
    padding = [step * (side // 2) for step, side in zip(dilation, table.shape[2:])]
    lambdas = F.conv2d(maps, table.transpose(0, 1), stride=stride, padding=padding, dilation=dilation)
    lambdas = lambdas.reshape(batch, width, *lambdas.shape[1:])
    if content is not None:
        lambdas = lambdas.add_(content.transpose(1, 2)[..., None, None])
    return torch.stack([(lambdas * head[:, None]).sum(2) for head in query.unbind(1)], 1)


def position_lambda_dense(
    query: Tensor, value: Tensor, table: Tensor, content: Tensor | None, stride: int, dilation: tuple[int, int]
) -> Tensor:
    """:func:`position_lambda` with the embeddings of all pairs, (n, k, u m), in memory."""
    if dilation != (1, 1):
        return _by_phase(position_lambda_dense, query, value, table, content, dilation)
    batch, heads, depth, *size = query.shape
    # Both tables and values reversed: the embeddings of all pairs are then windows that move with the query.
    pad = []
    for axis in (4, 3):
        length, radius = value.shape[axis], table.shape[axis - 1] // 2
        pad += [length - 1 - radius, stride * (query.shape[axis] - 1) - radius]
    table = F.pad(table.flip(2, 3), pad).unfold(2, value.shape[3], stride).unfold(3, value.shape[4], stride)
    pairs = table.permute(2, 3, 1, 0, 4, 5).reshape(size[0] * size[1], depth, -1)
    coefficients = torch.bmm(query.permute(3, 4, 1, 0, 2).reshape(len(pairs), heads * batch, depth), pairs)
    coefficients = coefficients.view(-1, batch, pairs.shape[2]).transpose(0, 1)  # (B, n h, u m)
    values = value.flip(3, 4).transpose(1, 2).flatten(2)
    out = torch.bmm(values, coefficients.transpose(1, 2))
    out = out.view(batch, -1, *size, heads).permute(0, 4, 1, 2, 3)
    if content is not None:
        out = out + torch.matmul(content.transpose(1, 2)[:, None], query.flatten(3)).view(out.shape)
    return out.contiguous()


def position_lambda_tiled(
    query: Tensor, value: Tensor, table: Tensor, content: Tensor | None, stride: int, dilation: tuple[int, int]
) -> Tensor:
    """:func:`position_lambda` by :class:`mmkron.ops.lambdas.tiled.PositionLambdaTiles`."""
    if dilation != (1, 1):
        return _by_phase(position_lambda_tiled, query, value, table, content, dilation)
    size = tuple(value.shape[3:])
    table = reachable(table, size)
    return PositionLambdaTiles.apply(query, value, table, content, stride, choose_tile(size, stride))


_FUNCTIONS = {'conv': position_lambda_conv, 'dense': position_lambda_dense, 'tiled': position_lambda_tiled}


def reachable(table: Tensor, size: Sequence[int], dilation: int = 1) -> Tensor:
    """Return the centre of a table: the offsets that lead from one position of a map (H, W) to another."""
    pad = [min(0, (length - 1) // dilation - side // 2) for side, length in zip(table.shape[2:], size)]
    return F.pad(table, (pad[1], pad[1], pad[0], pad[0])) if any(pad) else table


def dilation_steps(size: Sequence[int], dilation: int) -> tuple[int, int]:
    """Return the dilation along each axis of a map (H, W): 1 where every offset but 0 leads out of the map."""
    height, width = (dilation if dilation < length else 1 for length in size)
    return height, width


def _by_phase(function, query, value, table, content, dilation: tuple[int, int]) -> Tensor:
    """A dilated scope sees positions of one phase only, so the phases are samples of a problem without dilation."""
    (height, width), (down, right) = value.shape[3:], dilation
    pad = (0, -width % right, 0, -height % down)

    def split(x: Tensor) -> Tensor:
        x = F.pad(x, pad).unflatten(4, (-1, right)).unflatten(3, (-1, down))
        return x.permute(4, 6, 0, 1, 2, 3, 5).flatten(0, 2)

    if content is not None:
        content = content.repeat(down * right, 1, 1)
    out = function(split(query), split(value), table, content, 1, (1, 1))
    out = out.unflatten(0, (down, right, -1)).permute(2, 3, 4, 5, 0, 6, 1)
    return out.flatten(5, 6).flatten(3, 4)[..., :height, :width]


def compute_dtype(x: Tensor) -> torch.dtype:
    """What lambdas of ``x`` are computed in: float32 for float16, which their sums may overflow."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if x.dtype == torch.float64:
        return x.dtype
    return torch.float32 if dtype == torch.float16 else dtype


def _check_operand(name: str, x: Tensor, dims: tuple[int, ...], like: Tensor | None = None) -> None:
    if torch.jit.is_tracing():
        return
    check_floating(name, x)
    if x.dim() not in dims or 0 in x.shape:
        allowed = ' or '.join(str(n) for n in dims)
        raise ValueError(f'{name} must have {allowed} dimensions, none of them empty, got shape {tuple(x.shape)}')
    if like is not None and x.dtype != like.dtype:
        raise TypeError(f'{name} must be of type {like.dtype}, got {x.dtype}')
    if like is not None and x.shape[0] != like.shape[0]:
        raise ValueError(f'{name} must have batch size {like.shape[0]}, got shape {tuple(x.shape)}')
    if like is not None:
        check_device(name, x, like)


def _check_fits(name: str, x: Tensor, other: Tensor, axes: dict[int, int]) -> None:
    if not torch.jit.is_tracing() and any(x.shape[a] != other.shape[b] for a, b in axes.items()):
        raise ValueError(f'{name} does not fit: shapes {tuple(x.shape)} and {tuple(other.shape)}')


def _check_table(query: Tensor, value: Tensor, table: Tensor, stride: int) -> None:
    if torch.jit.is_tracing():
        return
    _check_operand('table', table, dims=(query.dim() - 1,))
    check_device('table', table, query)
    if table.shape[:2] != (value.shape[1], query.shape[2]):
        raise ValueError(
            f'table must be for u = {value.shape[1]} (of value) and k = {query.shape[2]} (of query), '
            f'got shape {tuple(table.shape)}'
        )
    if any(side % 2 == 0 for side in table.shape[2:]):
        raise ValueError(f'the scope of table must be odd, got shape {tuple(table.shape)}')
    size = tuple(-(-side // stride) for side in value.shape[3:])
    if tuple(query.shape[3:]) != size:
        raise ValueError(
            f'query must have the positions {size} (value {tuple(value.shape[3:])} at stride {stride}), '
            f'got {tuple(query.shape[3:])}'
        )


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
