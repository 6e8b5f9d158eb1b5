"""Position lambda: definition, formulations, and the choice between them.

Source: Bello, LambdaNetworks, ICLR 2021 (arXiv 2102.08602), section 3.

The position lambda of query n is the k x v matrix ``E_n^T V``, with embeddings E that depend on offsets alone. Three
formulations of its product with the query agree to rounding; :func:`choose_form` selects one:

====== ===================================================== ================= ====================================
form   method                                                multiply-adds     fastest for
====== ===================================================== ================= ====================================
conv   a convolution of the values gives all lambdas         H W r^2 k v       few values, small scopes; exports
dense  coefficients of all pairs from a gathered table       (H W)^2 h (k + v) maps of up to 100 positions
tiled  coefficients of one tile of queries at a time,        H W M h (k + v)   most others, above all in training
       recomputed in the backward pass
====== ===================================================== ================= ====================================

M is the window of a tile of t x t' queries, (r + t - 1) (r' + t' - 1) less what the border cuts off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkron.ops.checks import check_device
from mmkron.ops.lambdas.heuristics import Problem, fastest_form
from mmkron.ops.lambdas.operands import check_operand, compute_dtype
from mmkron.ops.lambdas.tiled import PositionLambdaTiles, choose_tile
from mmkron.utils.checks import check_choice, check_int

FORMS = ('conv', 'dense', 'tiled')


def position_lambda(
    query: Tensor,
    value: Tensor,
    table: Tensor,
    content: Tensor | None = None,
    stride: int = 1,
    dilation: int = 1,
    form: str | None = None,
) -> Tensor:
    """Apply the position lambda of every query to the query and return the outputs, not the lambdas.

    The output is ``y_n = sum_m (q_n . E[m - n]) V_m``, summed over u. Positions outside the map count as zero. A table
    of (2H - 1, 2W - 1) is a global scope; entries beyond it have no effect, and on a larger map a global table is a
    local one. The form ``tiled`` has gradients of first order only. Half precision (float16) is computed in float32:
    with the paper's embeddings, N(0, 1), the sums come close to the limit of its range.

    Args:
        query: Queries (B, h, k, H, W), or (B, h, k, L) on a one-dimensional lattice (then all arguments alike).
        value: Values (B, u, v, H', W') where H is ``ceil(H' / stride)``.
        table: Embeddings (u, k, r, r') with odd r and r'; entry ``[.., i, j]`` is for the context at the offset
            ``(i - r // 2, j - r' // 2)`` from the query. (u, k, r) on a one-dimensional lattice.
        content: Lambda (B, k, v) that all queries of a sample share, added to their own.
        stride: Step between queries, in positions of the value.
        dilation: Step between neighboring entries of the table, in positions of the value.
        form: ``conv``, ``dense`` or ``tiled``; the form of :func:`choose_form` by default. Only ``conv`` supports a
            stride and a dilation that are both above 1.

    Returns:
        Outputs (B, h, v, H, W).

    Raises:
        TypeError: If the dtypes of query and value differ, or an operand is not a floating-point tensor.
        ValueError: If shapes do not fit, a side of the scope is even, or the form is unknown.

    Examples:
        >>> query, value = torch.randn(2, 4, 16, 14, 14), torch.randn(2, 1, 32, 14, 14)
        >>> table = torch.randn(1, 16, 23, 23)
        >>> position_lambda(query, value, table).shape
        torch.Size([2, 4, 32, 14, 14])
    """
    _check_steps(stride, dilation, form)
    _check_operands(query, value, table, content, stride)
    if query.dim() == 4:
        line = (x[..., None, :] for x in (query, value, table))
        return position_lambda(*line, content, stride, dilation, form)[..., 0, :]
    dilations = (dilation, dilation)
    # Exported graphs keep their sizes free, on which this depends.
    if dilation > 1 and not (torch.jit.is_tracing() or torch.compiler.is_compiling()):
        dilations = dilation_steps(value.shape[3:], dilation)
        table = reachable(table, value.shape[3:], dilation)
    form = choose_form(query, value, table, stride, dilation) if form is None else form
    dtype = compute_dtype(query)
    with torch.autocast(query.device.type, enabled=False):
        operands = [x if x is None else x.to(dtype) for x in (query, value, table, content)]
        return _FUNCTIONS[form](*operands, stride, dilations).to(query.dtype)


def choose_form(query: Tensor, value: Tensor, table: Tensor, stride: int = 1, dilation: int = 1) -> str:
    """Return ``conv``, ``dense`` or ``tiled``: the form expected to be fastest among those that fit in memory."""
    # Exported graphs keep their sizes free, and compilers know a convolution.
    if torch.jit.is_tracing() or torch.compiler.is_compiling() or (stride > 1 and dilation > 1):
        return 'conv'
    # The phases of a dilation are samples.
    steps = dilation_steps(value.shape[3:], dilation)
    problem = Problem(
        batch=value.shape[0] * steps[0] * steps[1],
        heads=query.shape[1],
        depth=query.shape[2],
        width=value.shape[2],
        intra=value.shape[1],
        size=tuple(-(-side // step) for side, step in zip(value.shape[3:], steps)),
        scope=tuple(table.shape[2:]),
        stride=stride,
    )
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in (query, value, table))
    return fastest_form(problem, backward)


def position_lambda_conv(
    query: Tensor, value: Tensor, table: Tensor, content: Tensor | None, stride: int, dilation: tuple[int, int]
) -> Tensor:
    """Compute :func:`position_lambda` by its definition.

    A convolution of the values gives the lambdas, with u input and k output channels, the same for each of the v
    channels.
    """
    batch, intra, width, *size = value.shape
    maps = value.transpose(1, 2).reshape(batch * width, intra, *size)
    padding = [step * (side // 2) for step, side in zip(dilation, table.shape[2:])]
    lambdas = F.conv2d(maps, table.transpose(0, 1), stride=stride, padding=padding, dilation=dilation)
    lambdas = lambdas.reshape(batch, width, *lambdas.shape[1:])  # (B, v, k, H, W)
    if content is not None:
        lambdas = lambdas.add_(content.transpose(1, 2)[..., None, None])
    return torch.stack([(lambdas * head[:, None]).sum(2) for head in query.unbind(1)], 1)


def position_lambda_dense(
    query: Tensor, value: Tensor, table: Tensor, content: Tensor | None, stride: int, dilation: tuple[int, int]
) -> Tensor:
    """Compute :func:`position_lambda` with the embeddings of all pairs, (n, k, u m), in memory."""
    if dilation != (1, 1):
        return _by_phase(position_lambda_dense, query, value, table, content, dilation)
    batch, heads, depth, *size = query.shape
    # With table and values reversed, the embeddings of all pairs are windows that move with the query.
    pad = []
    for axis in (4, 3):
        length, radius = value.shape[axis], table.shape[axis - 1] // 2
        pad += [length - 1 - radius, stride * (query.shape[axis] - 1) - radius]
    table = F.pad(table.flip(2, 3), pad).unfold(2, value.shape[3], stride).unfold(3, value.shape[4], stride)
    pairs = table.permute(2, 3, 1, 0, 4, 5).reshape(size[0] * size[1], depth, -1)
    # (n, h B, k) x (n, k, u m) -> (n, h B, u m)
    coefficients = torch.bmm(query.permute(3, 4, 1, 0, 2).reshape(len(pairs), heads * batch, depth), pairs)
    coefficients = coefficients.view(-1, batch, pairs.shape[2]).transpose(0, 1)  # (B, n h, u m)
    values = value.flip(3, 4).transpose(1, 2).flatten(2)
    out = torch.bmm(values, coefficients.transpose(1, 2))  # (B, v, u m) x (B, u m, n h) -> (B, v, n h)
    out = out.view(batch, -1, *size, heads).permute(0, 4, 1, 2, 3)
    if content is not None:
        out = out + torch.matmul(content.transpose(1, 2)[:, None], query.flatten(3)).view(out.shape)
    return out.contiguous()


def position_lambda_tiled(
    query: Tensor, value: Tensor, table: Tensor, content: Tensor | None, stride: int, dilation: tuple[int, int]
) -> Tensor:
    """Compute :func:`position_lambda` by :class:`mmkron.ops.lambdas.tiled.PositionLambdaTiles`."""
    if dilation != (1, 1):
        return _by_phase(position_lambda_tiled, query, value, table, content, dilation)
    size = tuple(value.shape[3:])
    table = reachable(table, size)
    return PositionLambdaTiles.apply(query, value, table, content, stride, choose_tile(size, stride))


_FUNCTIONS = {'conv': position_lambda_conv, 'dense': position_lambda_dense, 'tiled': position_lambda_tiled}


def reachable(table: Tensor, size: Sequence[int], dilation: int = 1) -> Tensor:
    """Return the center of a table: the offsets between two positions of a map (H, W)."""
    pad = [min(0, (length - 1) // dilation - side // 2) for side, length in zip(table.shape[2:], size)]
    return F.pad(table, (pad[1], pad[1], pad[0], pad[0])) if any(pad) else table


def dilation_steps(size: Sequence[int], dilation: int) -> tuple[int, int]:
    """Return the dilation along each axis of a map (H, W): 1 where every offset but 0 leads out of the map."""
    height, width = (dilation if dilation < length else 1 for length in size)
    return height, width


def _by_phase(
    function: Callable[..., Tensor],
    query: Tensor,
    value: Tensor,
    table: Tensor,
    content: Tensor | None,
    dilation: tuple[int, int],
) -> Tensor:
    """Compute a dilated position lambda phase by phase.

    A dilated scope sees positions of one phase only, so the phases are samples of a problem without dilation.
    """
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


def _check_steps(stride: int, dilation: int, form: str | None) -> None:
    check_int('stride', stride)
    check_int('dilation', dilation)
    if form is not None:
        check_choice('form', form, FORMS)
    if form in ('dense', 'tiled') and stride > 1 and dilation > 1:
        raise ValueError(f"form must be 'conv' where stride and dilation are above 1, got {stride} and {dilation}")


def _check_operands(query: Tensor, value: Tensor, table: Tensor, content: Tensor | None, stride: int) -> None:
    if torch.jit.is_tracing():
        return
    check_operand('query', query, dims=(4, 5))
    check_operand('value', value, dims=(query.dim(),), like=query)
    check_operand('table', table, dims=(query.dim() - 1,))
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
    if content is not None:
        check_operand('content', content, dims=(3,))
        check_device('content', content, query)
        shape = (query.shape[0], query.shape[2], value.shape[2])
        if tuple(content.shape) != shape:
            raise ValueError(f'content must have shape (B, k, v) = {shape}, got {tuple(content.shape)}')
