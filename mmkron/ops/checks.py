"""Checks of tensors. Each error names the argument, its value and the allowed values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmkron.utils.checks import check_int


def check_floating(name: str, x: Any) -> None:
    """Raise TypeError unless ``x`` is a floating-point tensor."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f'{name} must be a floating-point tensor, got {got}')


def check_map(
    name: str, x: Any, channels: int | None = None, like: Tensor | None = None, empty_batch: bool = False
) -> None:
    """Raise TypeError or ValueError unless ``x`` is a non-empty floating-point map (B, C, H, W).

    Args:
        name: Name of the argument in error messages.
        x: The input.
        channels: Required number of channels. None accepts any.
        like: Map whose batch size, dtype and device are required. None accepts any.
        empty_batch: Whether B may be 0.

    Raises:
        TypeError: If ``x`` is not a floating-point tensor, or its dtype differs from ``like``.
        ValueError: If ``x`` is empty or not 4-dimensional, or its channels, batch size or device differ.
    """
    if torch.jit.is_tracing():
        return
    check_floating(name, x)
    if x.dim() != 4 or 0 in x.shape[1 if empty_batch else 0 :]:
        raise ValueError(f'{name} must be a map (B, C, H, W) with no empty dimension, got shape {tuple(x.shape)}')
    if channels is not None and x.shape[1] != channels:
        raise ValueError(f'{name} must have {channels} channels, got shape {tuple(x.shape)}')
    if like is not None and x.shape[0] != like.shape[0]:
        raise ValueError(f'{name} must have batch size {like.shape[0]}, got shape {tuple(x.shape)}')
    if like is not None and x.dtype != like.dtype:
        raise TypeError(f'{name} must be of type {like.dtype}, got {x.dtype}')
    if like is not None:
        check_device(name, x, like)


def check_device(name: str, x: Tensor, like: Tensor) -> None:
    """Raise ValueError unless ``x`` is on the device of ``like``."""
    if x.device != like.device:
        raise ValueError(f'{name} must be on {like.device}, as the other operands, got {x.device}')


def check_columns(query: Tensor, key: Tensor, value: Tensor | None = None) -> None:
    """Raise TypeError or ValueError unless the columns of an attention fit each other.

    In-place products would not raise an error of their own.

    Args:
        query: Columns (B, d, n).
        key: Columns (B, d, m).
        value: Columns (B, p, m), or None.

    Raises:
        TypeError: If an operand is not a floating-point tensor, or only some of the operands are float64.
        ValueError: If a shape does not fit, a dimension is empty, or the operands are on different devices.
    """
    if torch.jit.is_tracing():
        return
    operands = {'query': query, 'key': key, 'value': key if value is None else value}
    for name, x in operands.items():
        check_floating(name, x)
        if x.dim() != 3 or 0 in x.shape:
            raise ValueError(f'{name} must be columns (B, d, n) with no empty dimension, got shape {tuple(x.shape)}')
        if (x.dtype == torch.float64) != (query.dtype == torch.float64):
            raise TypeError(f'{name} must be of type {query.dtype}, as query, got {x.dtype}')
        check_device(name, x, query)
    if query.shape[:2] != key.shape[:2]:
        raise ValueError(f'key must have the shape {tuple(query.shape[:2])} of query, got {tuple(key.shape)}')
    if value is not None and value.shape[::2] != key.shape[::2]:
        raise ValueError(f'value must fit key of shape {tuple(key.shape)}, got {tuple(value.shape)}')


def check_steps_map(name: str, x: Any, channels: int, steps: int | None) -> None:
    """Raise TypeError or ValueError unless ``x`` is a map (T, B, channels, H, W), without T if ``steps`` is given."""
    if torch.jit.is_tracing():
        return
    if steps is not None:
        check_int('steps', steps)
    check_floating(name, x)
    layout = ('T', 'B', channels, 'H', 'W')[steps is not None :]
    if x.dim() != len(layout) or x.shape[-3] != channels or 0 in (x.shape[0], *x.shape[-3:]):
        raise ValueError(f'{name} must have shape {layout} for steps={steps}, none empty, got {tuple(x.shape)}')
