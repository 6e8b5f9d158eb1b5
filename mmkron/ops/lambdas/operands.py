"""Checks and the computing precision that content and position lambdas share."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkron.ops.checks import check_device, check_floating


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which lambdas of ``x`` are computed: float32 for float16, which their sums may overflow."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if x.dtype == torch.float64:
        return x.dtype
    return torch.float32 if dtype == torch.float16 else dtype


def check_operand(name: str, x: Tensor, dims: tuple[int, ...], like: Tensor | None = None) -> None:
    """Raise TypeError or ValueError unless ``x`` is a non-empty floating-point tensor that fits ``like``.

    Args:
        name: Name of the argument.
        x: The operand.
        dims: Allowed numbers of dimensions.
        like: Operand whose dtype, batch size and device ``x`` must have.
    """
    if torch.jit.is_tracing():
        return
    check_floating(name, x)
    if x.dim() not in dims or 0 in x.shape:
        allowed = ' or '.join(str(n) for n in dims)
        raise ValueError(f'{name} must have {allowed} dimensions, none of them empty, got shape {tuple(x.shape)}')
    if like is None:
        return
    if x.dtype != like.dtype:
        raise TypeError(f'{name} must be of type {like.dtype}, got {x.dtype}')
    if x.shape[0] != like.shape[0]:
        raise ValueError(f'{name} must have batch size {like.shape[0]}, got shape {tuple(x.shape)}')
    check_device(name, x, like)


def check_same_sizes(name: str, x: Tensor, other: Tensor, *axes: int) -> None:
    """Raise ValueError unless ``x`` and ``other`` have the same sizes along ``axes``."""
    if not torch.jit.is_tracing() and any(x.shape[axis] != other.shape[axis] for axis in axes):
        raise ValueError(f'{name} does not fit: shapes {tuple(x.shape)} and {tuple(other.shape)}')
