"""Checks of arguments: each raises one error that names the argument, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    choices = tuple(choices)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f'{name} must be one of {choices}, got {value!r}')


def check_flags(**flags: Any) -> None:
    """Raise ValueError unless each of the arguments is True or False."""
    for name, value in flags.items():
        check_choice(name, value, (True, False))


def check_int(name: str, value: Any, least: int = 1) -> None:
    """Raises TypeError unless ``value`` is an int (and no bool), ValueError if it is below ``least``."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f'{name} must be an int, got {value!r}')
    if value < least:
        raise ValueError(f'{name} must be at least {least}, got {value!r}')


def check_number(name: str, value: Any, above: float | None = None, finite: bool = True) -> None:
    """Raise TypeError unless ``value`` is an int or float, ValueError unless it is finite and greater than ``above``.

    ``finite=False`` allows infinity (and NaN).
    """
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) or isinstance(value, bool):
        raise TypeError(f'{name} must be a number, got {value!r}')
    if finite and not -math.inf < value < math.inf:
        raise ValueError(f'{name} must be finite, got {value!r}')
    if above is not None and not value > above:
        raise ValueError(f'{name} must be greater than {above}, got {value!r}')


def check_probability(name: str, value: Any, certain: bool = False) -> None:
    """Raise TypeError unless ``value`` is a number, ValueError unless it is in [0, 1), or in [0, 1] if ``certain``."""
    check_number(name, value, finite=False)
    if not (0 <= value < 1 or (certain and value == 1)):
        raise ValueError(f'{name} must be in {"[0, 1]" if certain else "[0, 1)"}, got {value!r}')


def check_sequence(name: str, value: Any, length: int | None = None) -> None:
    """Raise TypeError unless ``value`` is a sequence (not a string), ValueError if it is empty or not of ``length``."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f'{name} must be a sequence, got {value!r}')
    if not value or (length is not None and len(value) != length):
        raise ValueError(f'{name} must have {"at least one" if length is None else length} entries, got {value!r}')


def check_ints(name: str, value: Any, length: int | None = None) -> None:
    """Raise TypeError or ValueError unless ``value`` is a sequence of ints of at least 1, of ``length`` if given."""
    check_sequence(name, value, length)
    for item in value:
        check_int(name, item)


def check_choices(name: str, value: Any, choices: Iterable[Any], length: int | None = None) -> None:
    """Raise TypeError or ValueError unless ``value`` is a sequence of some of ``choices``, of ``length`` if given."""
    check_sequence(name, value, length)
    for item in value:
        check_choice(name, item, choices)


def check_keys(name: str, value: Any, keys: Iterable[str]) -> None:
    """Raise TypeError unless ``value`` is a dict or None, ValueError if it has other keys than ``keys``."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise TypeError(f'{name} must be a dict or None, got {value!r}')
    keys = tuple(keys)
    if any(key not in keys for key in value):
        raise ValueError(f'{name} must have keys of {keys}, got {dict(value)!r}')


def check_floating(name: str, x: Any) -> None:
    """Raises TypeError unless ``x`` is a floating-point tensor."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f'{name} must be a floating-point tensor, got {got}')


def check_map(
    name: str, x: Any, channels: int | None = None, like: Tensor | None = None, empty_batch: bool = False
) -> None:
    """Raises unless ``x`` is a non-empty floating-point map (B, C, H, W).

    Args:
        name: what the message calls it.
        x: the input.
        channels: the channels that it must have.
        like: a map whose batch size, dtype and device it must have.
        empty_batch: Whether B may be 0.

    Raises:
        TypeError: no tensor, no floating-point tensor, or of another dtype than ``like``.
        ValueError: of other dimensions, channels or batch size, on another device, or empty.
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
    """Raise unless the columns of an attention fit each other: products in place would not tell.

    Args:
        query: (B, d, n).
        key: (B, d, m).
        value: (B, p, m), or None where there is none.

    Raises:
        TypeError: an operand that is not a floating-point tensor; float64 beside a narrower type.
        ValueError: other shapes, an empty dimension, or operands on different devices.
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
    """Raise TypeError or ValueError unless ``x`` is a map (T, B, ``channels``, H, W), without T for given ``steps``."""
    if torch.jit.is_tracing():
        return
    if steps is not None:
        check_int('steps', steps)
    check_floating(name, x)
    layout = ('T', 'B', channels, 'H', 'W')[steps is not None :]
    if x.dim() != len(layout) or x.shape[-3] != channels or 0 in (x.shape[0], *x.shape[-3:]):
        raise ValueError(f'{name} must have shape {layout} for steps={steps}, none empty, got {tuple(x.shape)}')


def resolve_indices(name: str, indices: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Sorted, non-negative indices below ``count``; negatives count from the end, the argument is left as it is.

    Raises:
        TypeError: neither an int nor a sequence of ints.
        ValueError: none, an index out of range, or one that stands twice.
    """
    items = [indices] if isinstance(indices, int) else list(indices) if isinstance(indices, Sequence) else None
    if items is None or not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
        raise TypeError(f'{name} must be an int or a sequence of ints, got {indices!r}')
    if not all(-count <= i < count for i in items):
        raise ValueError(f'{name} must be in [{-count}, {count - 1}], got {indices!r}')
    resolved = sorted({i % count for i in items})
    if not resolved or len(resolved) != len(items):
        raise ValueError(f'{name} must name at least one, and each once; got {indices!r}')
    return tuple(resolved)


def resolve_size(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """(H, W) of a side or of (H, W).

    Raises:
        TypeError: a side that is no int.
        ValueError: another number of sides than one or two, or one below 1.
    """
    is_sequence = isinstance(size, Sequence) and not isinstance(size, (str, bytes))
    sides = tuple(size) if is_sequence else (size, size)
    if len(sides) != 2:
        raise ValueError(f'{name} must be a side or (H, W), got {size!r}')
    for side in sides:
        check_int(name, side)
    return sides
