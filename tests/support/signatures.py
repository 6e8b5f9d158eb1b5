"""The public signatures of operators and layers: calls, good arguments, and the kind of each argument."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmkron import layers, ops
from support.bad_values import FLAG, Bad, Kind, Signature, choice, integer, number, optional, sequence_of, tensor

# Results, which no caller constructs, and classes without arguments of their own.
NO_ARGUMENTS = (
    'AttentionCost', 'CheckpointHook', 'Converted', 'DeterministicResumeHook', 'LoadImageFromFile', 'NeuronActivity',
    'Operations', 'PositionWeights',
)  # fmt: skip

COUNT = integer(1)
POSITIVE = number(lambda value: value > 0)
PROBABILITY = number(lambda value: 0 <= value < 1)
NORM = choice('softmax', 'bn_softmax', 'bn')
NONE = choice(None)
LEVELS = Kind(lambda value: type(value) is int and -1 <= value <= 1).but((0, 0), (0, 9), 9, -9, [True])
SIDES = sequence_of(COUNT, 3, 4)._replace(allows=COUNT.allows)
CONFIG = NONE.but(dict(typ='BN'), dict(type='Nonsense'), dict(type=3))
SETTINGS = Kind(lambda value: value is None or value == {})

# The kind of an argument by its name, unless a signature has its own entry; otherwise its type hint decides.
NAMES: dict[str, Kind] = dict(
    norm=NORM,
    coefficient_norm=NORM,
    attention_norm=NORM,
    mode=choice('kv', 'qkv', 'dense', 'pooled'),
    tau=number(lambda value: value >= 1).but(math.inf),
    v_threshold=POSITIVE,
    attention_threshold=POSITIVE,
    v_reset=optional(number(lambda value: value < 1)),
    surrogate=choice('sigmoid', 'atan'),
    alpha=optional(POSITIVE),
    maps=choice('').but('qq', 'qw'),
    norm_cfg=CONFIG.but(dict(type='BN', nonsense=1), dict(type='GN')),
    act_cfg=CONFIG.but(dict(type='ReLU', nonsense=1)),
    init_cfg=CONFIG.but(dict(type='Constant', nonsense=1), [dict(type='Nonsense')], [3]),
    neuron_cfg=SETTINGS,
    lambda_cfg=SETTINGS.but(dict(dim=8)),
    drop_path_rate=PROBABILITY,
    stem_stride=choice(1, 2),
    widen_factor=POSITIVE,
    frozen_stages=integer(-1, 1).but(9),
    out_indices=LEVELS,
    embed_mode=choice('aba', 'pa'),
    size=SIDES,
)
HINTS = {
    'bool': FLAG,
    'int': COUNT,
    'int | None': optional(COUNT),
    'float': number(),
    'float | None': optional(number()),
}
NEURON = ('tau', 'v_reset', 'decay_input', 'detach_reset', 'surrogate', 'alpha')

SIGNATURES: dict[str, Callable[[], Signature]] = {}


def signature(call: Callable[..., Any], good: Mapping[str, Any], more: tuple[str, ...] = (), **own: Kind) -> Signature:
    """Return a signature; kinds that it does not list follow from the names and hints of its parameters.

    Args:
        call: The function or class.
        good: Arguments by name.
        more: Names of arguments that it accepts as ``**kwargs``.
        **own: Kinds of arguments.
    """
    kinds = dict(own)
    for name, parameter in inspect.signature(call).parameters.items():
        kind = NAMES.get(name, HINTS.get(parameter.annotation))
        if name not in kinds and kind is not None and parameter.kind is not parameter.VAR_KEYWORD:
            kinds[name] = kind
    kinds.update({name: NAMES.get(name, FLAG) for name in more if name not in kinds})
    return Signature(call, good, kinds)


def add(name: str, call: Callable[..., Any], good: Mapping[str, Any], /, *more: str, **own: Kind) -> None:
    """Register a signature under a public name, or a name that begins with it and a dot."""
    SIGNATURES[name] = lambda: signature(call, good, more, **own)


def add_later(name: str, make: Callable[[], Signature]) -> None:
    """Register a signature whose call is expensive to build or needs a host."""
    SIGNATURES[name] = make


def filled(*shape: int) -> Tensor:
    """Return a tensor of different values."""
    return torch.linspace(-1, 1, math.prod(shape)).reshape(shape)


def spikes(*shape: int) -> Tensor:
    """Return a tensor of zeros and ones."""
    return (torch.arange(math.prod(shape)) % 3 == 0).float().reshape(shape)


# --------------------------------------------------------------------------------------------------------- operators

_q, _k, _v = filled(2, 4, 3, 5), filled(2, 4, 2, 3), filled(2, 3, 2, 3)
for _name in ('dense_attention', 'pooled_attention', 'kronecker_attention_kv', 'kronecker_attention_qkv'):
    add(
        _name,
        getattr(ops, _name),
        dict(query=_q, key=_k, value=_v),
        query=tensor(_q),
        key=optional(tensor(_k, filled(2, 5, 2, 3), filled(3, 4, 2, 3), _k.double())),
        value=optional(tensor(_v, filled(2, 3, 2, 4), filled(3, 3, 2, 3), _v.double())),
        bn=NONE,
    )

_columns = filled(2, 4, 6)
_kinds = dict(
    query=tensor(_columns),
    key=tensor(_columns, filled(2, 5, 6), filled(3, 4, 6), _columns.double()),
    value=tensor(_columns, filled(2, 4, 5), filled(3, 4, 6), _columns.double()),
)
for _name, _operands in (('attend', ('query', 'key', 'value')), ('attention_coefficients', ('query', 'key'))):
    add(
        _name,
        getattr(ops, _name),
        dict.fromkeys(_operands, _columns),
        bn=NONE,
        **{key: _kinds[key] for key in _operands},
    )


def attend_with(**fields: Any) -> Tensor:
    """Compute attention with a batch norm of coefficients."""
    return ops.attend(_columns, _columns, _columns, 'bn', bn=ops.CoefficientBN(**fields))


_one = torch.ones(1)
_parameter = tensor(_one, torch.ones(2), batch=-1, least_rank=False)
add(
    'CoefficientBN',
    attend_with,
    dict(weight=_one, bias=_one, running_mean=_one.clone(), running_var=_one.clone()),
    weight=optional(_parameter),
    bias=optional(_parameter),
    running_mean=_parameter,
    running_var=_parameter,
    training=FLAG,
    momentum=number(lambda value: 0 <= value <= 1),
    eps=POSITIVE,
)

for _name in ('axis_means', 'pool_context'):
    add(_name, getattr(ops, _name), dict(x=_q), x=tensor(_q))
add(
    'outer_sum',
    ops.outer_sum,
    dict(y=filled(2, 4, 8), size=(3, 5)),
    y=tensor(filled(2, 4, 8), filled(2, 4, 7)),
    size=SIDES.but((3, 4), 5),
)

_q, _k, _v = filled(2, 3, 4, 3, 5), filled(2, 1, 4, 3, 5), filled(2, 1, 2, 3, 5)
_kinds = dict(
    value=tensor(_v, filled(2, 2, 2, 3, 5), filled(3, 1, 2, 3, 5), _v.double()),
    key_mask=optional(tensor(torch.ones(2, 3, 5, dtype=torch.bool))),
)
add('content_matrix', ops.content_matrix, dict(key=_k, value=_v), key=tensor(_k, least_rank=False), **_kinds)
add(
    'content_lambda',
    ops.content_lambda,
    dict(query=_q, key=_k, value=_v),
    query=tensor(_q, least_rank=False),
    key=tensor(_k, filled(2, 1, 3, 3, 5), _k.double()),
    **_kinds,
)
add(
    'position_lambda',
    ops.position_lambda,
    dict(query=_q, value=_v, table=filled(1, 4, 3, 3), content=filled(2, 4, 2)),
    query=tensor(_q, Bad(filled(2, 3, 4, 3, 4), ('(3, 4)',)), least_rank=False),
    value=tensor(_v, filled(3, 1, 2, 3, 5), _v.double()),
    table=tensor(filled(1, 4, 3, 3), filled(1, 4, 3, 2), filled(2, 4, 3, 3), batch=-1),
    content=optional(tensor(filled(2, 4, 2), filled(2, 4, 3))),
    form=optional(choice('conv', 'dense', 'tiled')),
)

_currents = filled(4, 2, 3)
_kinds = dict(
    x=tensor(_currents, _currents[:0], torch.tensor(1.0), batch=1, ranks=False)._replace(
        allows=lambda value: isinstance(value, Tensor) and value.is_floating_point()
    ),
    v0=optional(tensor(filled(2, 3), filled(3, 2))),
)
add('lif', ops.lif, dict(x=_currents, v0=filled(2, 3)), **_kinds)
add('LIF.forward', layers.LIF().forward, dict(x=_currents, v0=filled(2, 3)), **_kinds)

_x = spikes(2, 3, 4, 5)
_other = tensor(_x, spikes(2, 3, 4, 6), _x.double(), _x[:0], batch=1)
for _name, _operands in (
    ('token_qk_attention', 'qk'),
    ('channel_qk_attention', 'qk'),
    ('spiking_self_attention', 'qkv'),
):
    _kinds = {**dict.fromkeys(_operands, _other), 'q': tensor(_x, _x[:0], batch=1), 'heads': COUNT.but(3)}
    add(_name, getattr(ops, _name), dict(dict.fromkeys(_operands, _x), heads=2), *NEURON, **_kinds)


# ------------------------------------------------------------------------------------------------------------ layers

_neurons = choice('lif', 'plif', 'if')
add('LIF', layers.LIF, {}, kind=_neurons)
add('LIF.plif', partial(layers.LIF, kind='plif'), {}, kind=_neurons, tau=NAMES['tau'].but(1, 1.0))
add('SpikingConv', layers.SpikingConv, dict(in_channels=3, channels=4), kernel_size=COUNT.but(2))
add('SpikingMLP', layers.SpikingMLP, dict(channels=4, hidden=8))
add(
    'SpikingPatchEmbed',
    layers.SpikingPatchEmbed,
    dict(in_channels=3, widths=(4, 4), pools=(True, False)),
    widths=sequence_of(COUNT, 4, 4),
    pools=sequence_of(FLAG, True, False),
    shortcut_from=integer(0, 1).but(2),
    mode=choice('aba', 'pa'),
)
_modules = dict(
    SpikingConv=layers.SpikingConv(4, 4),
    SpikingMLP=layers.SpikingMLP(4, 8),
    SpikingPatchEmbed=layers.SpikingPatchEmbed(4, (4,), (True,)),
)
for _name in ('TokenQKAttention', 'ChannelQKAttention', 'SpikingSelfAttention'):
    add(_name, getattr(layers, _name), dict(channels=4, heads=2), heads=COUNT.but(3))
    _modules[_name] = getattr(layers, _name)(4, 2)
_x = spikes(2, 2, 4, 3, 3)
for _name, _module in _modules.items():
    add(f'{_name}.forward', _module.forward, dict(x=_x), x=tensor(_x, spikes(2, 2, 5, 3, 3), _x[:0], batch=1))
add(
    'SpikingConv.forward of an image',
    layers.SpikingConv(4, 4).forward,
    dict(x=_x[0], steps=2),
    x=tensor(_x[0], spikes(2, 5, 3, 3)),
    steps=optional(COUNT),
)

add('KroneckerAttention2d', layers.KroneckerAttention2d, dict(channels=4, maps='qkv', in_channels=None), channels=COUNT)
add(
    'KroneckerAttention2d.in_channels',
    layers.KroneckerAttention2d,
    dict(channels=None, in_channels=4),
    in_channels=COUNT,
)
_layer = layers.KroneckerAttention2d(4, context_channels=3, key_channels=4, maps='kv')
_x, _context = filled(2, 4, 3, 5), filled(2, 3, 2, 3)
_kinds = dict(
    x=tensor(_x, filled(2, 3, 3, 5)),
    context=optional(tensor(_context, filled(2, 4, 2, 3), filled(3, 3, 2, 3), _context.double())),
)
add('KroneckerAttention2d.forward', _layer.forward, dict(x=_x, context=_context), **_kinds)
add('KroneckerAttention2d.coefficients', _layer.coefficients, dict(x=_x, context=_context), **_kinds)

_good = dict(dim=8, scope=3, heads=2)
_kinds = dict(
    dim=COUNT, dim_out=optional(COUNT).but(7), heads=COUNT.but(3), scope=COUNT.but(2), feat_size=NONE, in_channels=NONE
)
add('LambdaLayer', layers.LambdaLayer, _good, **_kinds)
add(
    'LambdaLayer.in_channels',
    layers.LambdaLayer,
    dict(in_channels=8, scope=3, heads=2),
    **{**_kinds, 'dim': NONE, 'in_channels': COUNT},
)
add(
    'LambdaLayer.feat_size',
    layers.LambdaLayer,
    {**_good, 'scope': None, 'feat_size': (3, 4)},
    **{**_kinds, 'scope': NONE, 'feat_size': SIDES},
)
_x = filled(2, 8, 3, 4)
add(
    'LambdaLayer.forward',
    layers.LambdaLayer(**_good).forward,
    dict(x=_x),
    x=tensor(_x, filled(2, 7, 3, 4)),
    key_mask=optional(tensor(torch.ones(2, 3, 4, dtype=torch.bool))),
)
