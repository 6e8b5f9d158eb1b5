"""Every public signature of mmkron: how it is called, good arguments for it, and what each argument may be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mmkron import layers, ops
from support.bad_values import FLAG, Bad, Kind, Signature, choice, integer, number, optional, sequence_of, tensor

# Results, which no caller makes, and classes without arguments of their own.
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

# What an argument of this name is, unless a signature has an entry of its own; after that its type hint decides.
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
    """Return a signature; kinds that are not its own follow from the names and hints of its parameters.

    Args:
        call: The function or class.
        good: Arguments by name.
        more: Names of arguments that it takes by ``**kwargs``.
        **own: Kinds of arguments.
    """
    kinds = dict(own)
    for name, parameter in inspect.signature(call).parameters.items():
        kind = NAMES.get(name, HINTS.get(parameter.annotation))
        if name not in kinds and kind is not None and parameter.kind is not parameter.VAR_KEYWORD:
            kinds[name] = kind
    kinds.update({name: NAMES.get(name, FLAG) for name in more if name not in kinds})
    return Signature(call, good, kinds)


def add(name: str) -> Callable[[Callable[[], Signature]], Callable[[], Signature]]:
    """Register a function that makes a signature, under a public name or one that begins with it and a dot."""

    def register(make: Callable[[], Signature]) -> Callable[[], Signature]:
        SIGNATURES[name] = make
        return make

    return register


def filled(*shape: int) -> Tensor:
    """Return a tensor of different values."""
    return torch.linspace(-1, 1, math.prod(shape)).reshape(shape)


def spikes(*shape: int) -> Tensor:
    """Return a tensor of zeros and ones."""
    return (torch.arange(math.prod(shape)) % 3 == 0).float().reshape(shape)


# --------------------------------------------------------------------------------------------------------- operators


def attention(call: Callable[..., Any]) -> Signature:
    good = dict(query=filled(2, 4, 3, 5), key=filled(2, 4, 2, 3), value=filled(2, 3, 2, 3))
    return signature(
        call,
        good,
        query=tensor(good['query']),
        key=optional(tensor(good['key'], filled(2, 5, 2, 3), filled(3, 4, 2, 3), good['key'].double())),
        value=optional(tensor(good['value'], filled(2, 3, 2, 4), filled(3, 3, 2, 3), good['value'].double())),
        bn=NONE,
    )


for _name in ('dense_attention', 'pooled_attention', 'kronecker_attention_kv', 'kronecker_attention_qkv'):
    add(_name)(partial(attention, getattr(ops, _name)))


def columns(call: Callable[..., Any], *names: str) -> Signature:
    x = filled(2, 4, 6)
    key = tensor(x, filled(2, 5, 6), filled(3, 4, 6), x.double())
    value = tensor(x, filled(2, 4, 5), filled(3, 4, 6), x.double())
    kinds = dict(query=tensor(x), key=key, value=value)
    return signature(call, dict.fromkeys(names, x), **{name: kinds[name] for name in names}, bn=NONE)


add('attend')(partial(columns, ops.attend, 'query', 'key', 'value'))
add('attention_coefficients')(partial(columns, ops.attention_coefficients, 'query', 'key'))


@add('CoefficientBN')
def coefficient_bn() -> Signature:
    def call(**fields: Any) -> Tensor:
        return ops.attend(x, x, x, 'bn', bn=ops.CoefficientBN(**fields))

    x, one = filled(2, 4, 6), torch.ones(1)
    parameter = tensor(one, torch.ones(2), batch=-1, least_rank=False)
    good = dict(weight=one, bias=one, running_mean=one.clone(), running_var=one.clone())
    kinds = dict(weight=optional(parameter), bias=optional(parameter), running_mean=parameter, running_var=parameter)
    share = number(lambda value: 0 <= value <= 1)
    return signature(call, good, **kinds, training=FLAG, momentum=share, eps=POSITIVE)


for _name in ('axis_means', 'pool_context'):
    add(_name)(partial(signature, getattr(ops, _name), dict(x=filled(2, 4, 3, 5)), x=tensor(filled(2, 4, 3, 5))))


@add('outer_sum')
def outer_sum() -> Signature:
    y = filled(2, 4, 8)
    return signature(ops.outer_sum, dict(y=y, size=(3, 5)), y=tensor(y, filled(2, 4, 7)), size=SIDES.but((3, 4), 5))


@add('content_lambda')
def content_lambda() -> Signature:
    good = dict(query=filled(2, 3, 4, 3, 5), key=filled(2, 1, 4, 3, 5), value=filled(2, 1, 2, 3, 5))
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    return signature(
        ops.content_lambda,
        good,
        query=tensor(good['query'], least_rank=False),
        key=tensor(good['key'], filled(2, 1, 3, 3, 5), good['key'].double()),
        value=tensor(good['value'], filled(2, 2, 2, 3, 5), filled(3, 1, 2, 3, 5), good['value'].double()),
        key_mask=optional(tensor(mask)),
    )


@add('content_matrix')
def content_matrix() -> Signature:
    kinds = content_lambda().kinds
    good = dict(key=filled(2, 1, 4, 3, 5), value=filled(2, 1, 2, 3, 5))
    key = tensor(good['key'], least_rank=False)
    return signature(ops.content_matrix, good, key=key, value=kinds['value'], key_mask=kinds['key_mask'])


@add('position_lambda')
def position_lambda() -> Signature:
    good = dict(query=filled(2, 3, 4, 3, 5), value=filled(2, 1, 2, 3, 5), table=filled(1, 4, 3, 3))
    content = filled(2, 4, 2)
    return signature(
        ops.position_lambda,
        dict(**good, content=content),
        query=tensor(good['query'], Bad(filled(2, 3, 4, 3, 4), ('(3, 4)',)), least_rank=False),
        value=tensor(good['value'], filled(3, 1, 2, 3, 5), good['value'].double()),
        table=tensor(good['table'], filled(1, 4, 3, 2), filled(2, 4, 3, 3), batch=-1),
        content=optional(tensor(content, filled(2, 4, 3))),
        form=optional(choice('conv', 'dense', 'tiled')),
    )


@add('lif')
def lif() -> Signature:
    good = dict(x=filled(4, 2, 3), v0=filled(2, 3))
    x = tensor(good['x'], good['x'][:0], torch.tensor(1.0), batch=1, ranks=False)
    x = x._replace(allows=lambda value: isinstance(value, Tensor) and value.is_floating_point())
    return signature(ops.lif, good, x=x, v0=optional(tensor(good['v0'], filled(3, 2))))


def spike_operands(call: Callable[..., Any], names: str) -> Signature:
    x = spikes(2, 3, 4, 5)
    kinds = {name: tensor(x, spikes(2, 3, 4, 6), x.double(), x[:0], batch=1) for name in names}
    kinds[names[0]] = tensor(x, x[:0], batch=1)
    good = dict(dict.fromkeys(names, x), heads=2)
    return signature(call, good, NEURON, **kinds, heads=COUNT.but(3))


add('token_qk_attention')(partial(spike_operands, ops.token_qk_attention, 'qk'))
add('channel_qk_attention')(partial(spike_operands, ops.channel_qk_attention, 'qk'))
add('spiking_self_attention')(partial(spike_operands, ops.spiking_self_attention, 'qkv'))


# ------------------------------------------------------------------------------------------------------------ layers


@add('LIF')
def lif_layer() -> Signature:
    return signature(layers.LIF, {}, kind=choice('lif', 'plif', 'if'))


@add('LIF.plif')
def plif_layer() -> Signature:
    plif = NAMES['tau'].but(1, 1.0)
    return signature(partial(layers.LIF, kind='plif'), {}, kind=choice('lif', 'plif', 'if'), tau=plif)


@add('LIF.forward')
def lif_forward() -> Signature:
    kinds = lif().kinds
    return signature(layers.LIF().forward, lif().good, x=kinds['x'], v0=kinds['v0'])


@add('SpikingConv')
def spiking_conv() -> Signature:
    return signature(layers.SpikingConv, dict(in_channels=3, channels=4), kernel_size=COUNT.but(2))


def step_maps(layer: nn.Module) -> Signature:
    x = spikes(2, 2, 4, 3, 3)
    return signature(layer.forward, dict(x=x), x=tensor(x, spikes(2, 2, 5, 3, 3), x[:0], batch=1))


add('SpikingConv.forward')(lambda: step_maps(layers.SpikingConv(4, 4)))
add('SpikingMLP.forward')(lambda: step_maps(layers.SpikingMLP(4, 8)))
add('SpikingPatchEmbed.forward')(lambda: step_maps(layers.SpikingPatchEmbed(4, (4,), (True,))))


@add('SpikingConv.forward of an image')
def image_forward() -> Signature:
    x = spikes(2, 4, 3, 3)
    return signature(
        layers.SpikingConv(4, 4).forward, dict(x=x, steps=2), x=tensor(x, spikes(2, 5, 3, 3)), steps=optional(COUNT)
    )


for _name in ('TokenQKAttention', 'ChannelQKAttention', 'SpikingSelfAttention'):
    _layer = getattr(layers, _name)
    add(_name)(partial(signature, _layer, dict(channels=4, heads=2), heads=COUNT.but(3)))
    add(f'{_name}.forward')(lambda layer=_layer: step_maps(layer(4, 2)))


@add('SpikingMLP')
def spiking_mlp() -> Signature:
    return signature(layers.SpikingMLP, dict(channels=4, hidden=8))


@add('SpikingPatchEmbed')
def patch_embed() -> Signature:
    good = dict(in_channels=3, widths=(4, 4), pools=(True, False))
    return signature(
        layers.SpikingPatchEmbed,
        good,
        widths=sequence_of(COUNT, 4, 4),
        pools=sequence_of(FLAG, True, False),
        shortcut_from=integer(0, 1).but(2),
        mode=choice('aba', 'pa'),
    )


@add('KroneckerAttention2d')
def kronecker_layer() -> Signature:
    good = dict(channels=4, maps='qkv', in_channels=None)
    return signature(layers.KroneckerAttention2d, good, channels=COUNT)


@add('KroneckerAttention2d.in_channels')
def kronecker_plugin() -> Signature:
    good = dict(channels=None, in_channels=4)
    return signature(layers.KroneckerAttention2d, good, in_channels=COUNT)


@add('KroneckerAttention2d.forward')
def kronecker_forward(method: str = 'forward') -> Signature:
    layer = layers.KroneckerAttention2d(4, context_channels=3, key_channels=4, maps='kv')
    good = dict(x=filled(2, 4, 3, 5), context=filled(2, 3, 2, 3))
    wrong = filled(2, 4, 2, 3), filled(3, 3, 2, 3), good['context'].double()
    context = optional(tensor(good['context'], *wrong))
    return signature(getattr(layer, method), good, x=tensor(good['x'], filled(2, 3, 3, 5)), context=context)


add('KroneckerAttention2d.coefficients')(partial(kronecker_forward, 'coefficients'))


@add('LambdaLayer')
def lambda_layer() -> Signature:
    good = dict(dim=8, scope=3, heads=2)
    return signature(
        layers.LambdaLayer,
        good,
        dim=COUNT,
        dim_out=optional(COUNT).but(7),
        heads=COUNT.but(3),
        scope=COUNT.but(2),
        feat_size=NONE,
        in_channels=NONE,
    )


@add('LambdaLayer.in_channels')
def lambda_plugin() -> Signature:
    kinds = {**lambda_layer().kinds, 'dim': NONE, 'in_channels': COUNT}
    return signature(layers.LambdaLayer, dict(in_channels=8, scope=3, heads=2), **kinds)


@add('LambdaLayer.feat_size')
def global_lambda_layer() -> Signature:
    kinds = {**lambda_layer().kinds, 'scope': NONE, 'feat_size': SIDES}
    return signature(layers.LambdaLayer, dict(dim=8, scope=None, heads=2, feat_size=(3, 4)), **kinds)


@add('LambdaLayer.forward')
def lambda_forward() -> Signature:
    x, mask = filled(2, 8, 3, 4), torch.ones(2, 3, 4, dtype=torch.bool)
    forward = layers.LambdaLayer(8, scope=3, heads=2).forward
    return signature(forward, dict(x=x), x=tensor(x, filled(2, 7, 3, 4)), key_mask=optional(tensor(mask)))
