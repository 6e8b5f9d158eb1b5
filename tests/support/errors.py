"""Check an error by its type, the argument that it names and the value that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_UNSET = object()


@contextmanager
def raises(kind: type[Exception], argument: str, value: Any = _UNSET) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error of exactly this type that names ``argument`` and, if given, shows ``value``.

    Args:
        kind: Type of the error; a subclass does not count.
        argument: A name, key or path that the message must contain as a whole word.
        value: The bad value. The message must contain its ``repr`` or its ``str``.

    Yields:
        The information of pytest on the error.

    Example:
        >>> with raises(ValueError, 'heads', 3):
        ...     raise ValueError('heads must divide the channels, got heads=3 and 64 channels')
    """
    with pytest.raises(kind) as info:
        yield info
    message = str(info.value)
    assert info.type is kind, f'{info.type.__name__} instead of {kind.__name__}: {message}'
    assert re.search(rf'(?<!\w){re.escape(argument)}(?!\w)', message), f'{argument!r} is not named: {message}'
    assert value is _UNSET or repr(value) in message or str(value) in message, f'{value!r} is not shown: {message}'
