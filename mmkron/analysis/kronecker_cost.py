"""Cost of the four attention operators in closed form: what the paper's comparison on simulated data counts.

Source: Kronecker Attention Networks (KDD 2020), sections 3.4 and 4.2. ``held`` gives the memory savings that the paper
states for 56 x 56 with 8 channels (96.18 % for KV, 99.73 % for QKV); the paper does not say what it counts.
"""

from __future__ import annotations

from typing import NamedTuple

from mmkron.utils.checks import check_choice, check_int, resolve_size

MODES = ('dense', 'pooled', 'kv', 'qkv')


class AttentionCost(NamedTuple):
    """Cost for a whole batch.

    Attributes:
        madds: multiply-adds of the two products.
        coefficients: entries of the coefficient matrix.
        held: numbers in memory while the output is written (times 4 for bytes in float32): the output with the
            coefficients; for QKV, whose outer sum comes after the coefficients are gone, with the means of the context
            and the attended means.
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
    """Cost of an operator of :mod:`mmkron.ops` without linear maps and means.

    Args:
        mode: ``dense``, ``pooled``, ``kv`` or ``qkv``.
        size: (H, W) of the query.
        channels: channels of query and key.
        value_channels: channels of the value. Defaults to ``channels``.
        context_size: (H', W') of key and value. Defaults to ``size``.
        batch: number of samples.

    Raises:
        TypeError, ValueError: an unknown ``mode``, or a size or number that is not a positive int.
    """
    check_choice('mode', mode, MODES)
    value_channels = channels if value_channels is None else value_channels
    for name, number in dict(channels=channels, value_channels=value_channels, batch=batch).items():
        check_int(name, number)
    height, width = resolve_size('size', size)
    context_height, context_width = resolve_size('context_size', size if context_size is None else context_size)
    queries = height + width if mode == 'qkv' else height * width
    keys = {
        'dense': context_height * context_width,
        'pooled': -(-context_height // 2) * -(-context_width // 2),
        'kv': context_height + context_width,
        'qkv': context_height + context_width,
    }[mode]
    coefficients = batch * queries * keys
    output = batch * value_channels * height * width
    means = batch * (keys * channels + queries * value_channels)
    return AttentionCost(
        madds=coefficients * (channels + value_channels),
        coefficients=coefficients,
        held=output + (means if mode == 'qkv' else coefficients),
    )
