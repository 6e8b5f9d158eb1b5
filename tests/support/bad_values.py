"""Draw bad values for the arguments of a signature, and judge the errors of its calls."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mmkron

PACKAGE = str(Path(mmkron.__file__).parent)


class _Object:
    def __repr__(self) -> str:
        return '<an object>'


# Values that are tried for every argument whose kind does not allow them.
COMMON = (
    None, False, True, -1, 0, 1, 0.5, 1.5, math.nan, math.inf, -math.inf, 1j, '', '1', 'nonsense', b'1', [], (), {},
    ['1'], [None], {'nonsense': 1}, {1, 2}, _Object(), int, len, torch.ones(2), torch.ones((), dtype=torch.long),
)  # fmt: skip


class Bad(NamedTuple):
    """A bad value; an error must show one of the texts in ``shown``."""

    value: Any
    shown: tuple[str, ...]


class Kind(NamedTuple):
    """Values that an argument may have, as a test, and bad values that only this kind has."""

    allows: Callable[[Any], bool]
    special: tuple[Bad, ...] = ()
    by_type: bool = False  # an error may show the type of a bad value instead

    def draw(self) -> Iterator[Bad]:
        """Yield all bad values of this kind."""
        for value in COMMON:
            if not self.allows(value):
                yield Bad(value, texts(value, self.by_type))
        yield from self.special

    def but(self, *values: Any) -> Kind:
        """Return this kind with further values that it does not allow."""
        made = (value if isinstance(value, Bad) else Bad(value, texts(value)) for value in values)
        return self._replace(special=(*self.special, *made))


def texts(value: Any, by_type: bool = False) -> tuple[str, ...]:
    """Return texts that show a value: its repr, the repr of its only entry, or a tensor's shape and dtype."""
    shown = [repr(value)]
    if isinstance(value, Tensor):
        shown += [str(tuple(value.shape)), str(value.dtype)]
    if isinstance(value, (list, tuple, dict)) and len(value) == 1:  # the entry is bad
        shown += texts(next(iter(value)), by_type)
    return (*shown, *([type(value).__name__] if by_type else []))


def integer(least: int = 1, most: float = math.inf) -> Kind:
    """Allow an int (not a bool) in [least, most]."""
    return Kind(lambda value: type(value) is int and least <= value <= most)


def number(test: Callable[[float], bool] = lambda value: True, *outside: float) -> Kind:
    """Allow a finite int or float that passes ``test``; the numbers ``outside`` do not."""
    kind = Kind(lambda value: type(value) in (int, float) and math.isfinite(value) and test(value))
    return kind.but(*outside)


def choice(*options: Any) -> Kind:
    """Allow some values of exactly their types."""
    return Kind(lambda value: any(type(value) is type(option) and value == option for option in options))


def optional(kind: Kind) -> Kind:
    """Allow None, too."""
    return kind._replace(allows=lambda value: value is None or kind.allows(value))


def sequence_of(item: Kind, *good: Any, fixed: bool = True, empty: bool = False) -> Kind:
    """Allow a list or tuple such as ``good``, of items of a kind; ``fixed`` says that its length matters."""

    def allows(value: Any) -> bool:
        if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(good)):
            return False
        return all(map(item.allows, value)) if value else empty

    # The last item is bad, so that nothing else may stop the call before.
    special = [Bad((*good[:-1], bad.value), (repr((*good[:-1], bad.value)), *bad.shown)) for bad in item.draw()]
    if fixed:
        special += [Bad(value, texts(value)) for value in (good[:-1], (*good, good[-1]))]
    return Kind(allows, tuple(special))


def tensor(good: Tensor, *wrong: Any, batch: int = 0, ranks: bool = True, least_rank: bool = True) -> Kind:
    """Allow a tensor such as ``good``, but not of another type or rank, not an empty one, and not ``wrong`` ones.

    Args:
        good: The tensor.
        *wrong: Further bad values.
        batch: The axis that may be empty, as for a batch without regions.
        ranks: Whether another number of dimensions is bad.
        least_rank: Whether one dimension less is bad.
    """
    dtypes = [dtype for dtype in (torch.bool, torch.long, torch.float32, torch.complex64) if dtype != good.dtype]
    values = [good.to(dtype) for dtype in dtypes]
    values += [good.narrow(axis, 0, 0) for axis in range(good.dim()) if axis != batch]
    values += [good[None]] if ranks else []
    values += [good[0]] if ranks and least_rank else []
    return Kind(lambda value: False, by_type=True).but(*values, *wrong)


FLAG = Kind(lambda value: type(value) is bool)
# Without the values of COMMON.
ANYTHING = Kind(lambda value: True)


class Signature(NamedTuple):
    """A public signature: its call, good arguments, and the kinds of its arguments."""

    call: Callable[..., Any]
    good: Mapping[str, Any]
    kinds: Mapping[str, Kind]


def faults(signature: Signature) -> list[str]:
    """Call a signature with one bad value at a time, and return the errors that are not clear."""
    found = []
    for argument, kind in signature.kinds.items():
        for bad in kind.draw():
            fault = fault_of(signature, argument, bad)
            if fault:
                found.append(f'{argument}={short(bad.value)}: {fault}')
    return found


def fault_of(signature: Signature, argument: str, bad: Bad) -> str | None:
    """Return the fault of the error for a bad value, or None if it is clear.

    A clear error is exactly a ValueError or a TypeError that a statement of the package raises, with a message that
    names the argument as a whole word and shows the value.
    """
    try:
        signature.call(**{**signature.good, argument: bad.value})
    except Exception as error:
        message = f'{type(error).__name__}: {error}'
        if type(error) not in (ValueError, TypeError):
            return f'of another type: {message}'
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not last.filename.startswith(PACKAGE) or not (last.line or '').startswith('raise '):
            return f'not raised by mmkron: {message}'
        if not re.search(rf'(?<!\w){re.escape(argument)}(?!\w)', message):
            return f'the argument is not named: {message}'
        return None if any(text in message for text in bad.shown) else f'the value is not shown: {message}'
    return 'accepted'


def short(value: Any) -> str:
    """Return a value for a message."""
    return f'tensor {value.dtype} {tuple(value.shape)}' if isinstance(value, Tensor) else repr(value)[:100]
