"""Checks of arguments. Each error names the argument, its value and the allowed values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def _is_number(value: Any, types: tuple[type, ...], symbolic: tuple[str, ...]) -> bool:
    """Return whether ``value`` is a number of ``types`` or a symbolic number of torch, without importing torch."""
    if isinstance(value, types):
        return not isinstance(value, bool)
    return type(value).__module__ == 'torch' and type(value).__name__ in symbolic


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    choices = tuple(choices)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f'{name} must be one of {choices}, got {value!r}')


def check_flags(**flags: Any) -> None:
    """Raise ValueError unless each argument is True or False."""
    for name, value in flags.items():
        check_choice(name, value, (True, False))


def check_int(name: str, value: Any, least: int = 1) -> None:
    """Raise TypeError unless ``value`` is an int (not a bool), ValueError if it is below ``least``."""
    if not _is_number(value, (int,), ('SymInt',)):
        raise TypeError(f'{name} must be an int, got {value!r}')
    if value < least:
        raise ValueError(f'{name} must be at least {least}, got {value!r}')


def check_number(name: str, value: Any, above: float | None = None, finite: bool = True) -> None:
    """Raise TypeError unless ``value`` is an int or float, ValueError unless it is finite and greater than ``above``.

    ``finite=False`` allows infinity (and NaN).
    """
    if not _is_number(value, (int, float), ('SymInt', 'SymFloat')):
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
    """Raise TypeError or ValueError unless ``value`` is a sequence of positive ints, of ``length`` if given."""
    check_sequence(name, value, length)
    for item in value:
        check_int(name, item)


def check_choices(name: str, value: Any, choices: Iterable[Any], length: int | None = None) -> None:
    """Raise TypeError or ValueError unless ``value`` is a sequence of ``choices``, of ``length`` if given."""
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


def resolve_indices(name: str, indices: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return the indices as a sorted tuple of non-negative ints below ``count``; negative ones count from the end.

    Raises:
        TypeError: If ``indices`` is neither an int nor a sequence of ints.
        ValueError: If there is no index, or an index is out of range or repeated.
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
    """Return ``size``, given as one side or as (H, W), as (H, W).

    Raises:
        TypeError: If a side is not an int.
        ValueError: If ``size`` is a sequence of another length than 2, or a side is below 1.
    """
    is_sequence = isinstance(size, Sequence) and not isinstance(size, (str, bytes))
    sides = tuple(size) if is_sequence else (size, size)
    if len(sides) != 2:
        raise ValueError(f'{name} must be a side or (H, W), got {size!r}')
    for side in sides:
        check_int(name, side)
    return sides
