"""Cost of the four attention operators in closed form, as in the paper's comparison on simulated data.

Source: Kronecker Attention Networks (KDD 2020), sections 3.4 and 4.2. ``held`` reproduces the memory savings that the
paper states for 56 x 56 with 8 channels (96.18 % for KV, 99.73 % for QKV); the paper does not define its count.
"""

from __future__ import annotations

from typing import NamedTuple

from mmkron.ops.kronecker import MODES
from mmkron.utils.checks import check_choice, check_int, resolve_size


class AttentionCost(NamedTuple):
    """Cost for a whole batch.

    Attributes:
        madds: Multiply-adds of the two products.
        coefficients: Entries of the coefficient matrix.
        held: Peak number of values in memory while the output is written (times 4 for bytes in float32): the output
            with the coefficients; for QKV, whose outer sum follows after the coefficients are freed, with the means of
            the context and the attended means.
    """

    madds: int
    coefficients: int
    held: int


def attention_cost(
    mode: str,
    size: tuple[int, int],
    channels: int,
    value_channels: int | None = None,
    context_size: tuple[int, int] | None = None,
    batch: int = 1,
) -> AttentionCost:
    """Return the cost of an operator of :mod:`mmkron.ops` without linear maps and means.

    Args:
        mode: ``'dense'``, ``'pooled'``, ``'kv'`` or ``'qkv'``.
        size: (H, W) of the query.
        channels: Channels of query and key.
        value_channels: Channels of the value. Defaults to ``channels``.
        context_size: (H', W') of key and value. Defaults to ``size``.
        batch: Number of samples.

    Raises:
        TypeError: If a number or a side is not an int.
        ValueError: If ``mode`` is unknown, or a number or a side is less than 1.

    Examples:
        >>> attention_cost('dense', (56, 56), 8).coefficients, attention_cost('qkv', (56, 56), 8).coefficients
        (9834496, 12544)
    """
    check_choice('mode', mode, MODES)
    value_channels = channels if value_channels is None else value_channels
    check_int('channels', channels)
    check_int('value_channels', value_channels)
    check_int('batch', batch)
    height, width = resolve_size('size', size)
    context_size = (height, width) if context_size is None else resolve_size('context_size', context_size)
    reduction = MODES[mode]
    queries, keys = reduction.query.count((height, width)), reduction.context.count(context_size)
    coefficients = batch * queries * keys
    output = batch * value_channels * height * width
    means = batch * (keys * channels + queries * value_channels)
    return AttentionCost(
        madds=coefficients * (channels + value_channels),
        coefficients=coefficients,
        held=output + (means if reduction.query.means else coefficients),
    )
