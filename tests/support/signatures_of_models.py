"""The public signatures of networks and their parts, of the analysis, the transforms and the hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from mmkron import analysis, converters, datasets, layers, models
from mmkron.engine.hooks import PreemptionHook, ResumeHook
from mmkron.registry import MODELS
from support.bad_values import (
    ANYTHING,
    FLAG,
    Bad,
    Kind,
    Signature,
    choice,
    integer,
    number,
    optional,
    sequence_of,
    tensor,
)
from support.signatures import (
    COUNT,
    LEVELS,
    NAMES,
    NONE,
    POSITIVE,
    PROBABILITY,
    SETTINGS,
    SIDES,
    add,
    add_later,
    filled,
    signature,
    spikes,
)

# --------------------------------------------------------------------------------------------------------- backbones

LAYOUT = (('BaseSkip', 1, 8, 1, 1), ('AttnSkip', 2, 8, 1, 2))
KANET = dict(arch=dict(layout=LAYOUT, attention='kv'), widen_factor=0.25)
LAMBDA_RESNET = dict(
    stage_blocks=(1, 1, 1, 1), stage_layers='CCCL', base_channels=4, lambda_cfg=dict(scope=3, dim_key=2)
)
QKFORMER_ARCH = dict(
    dims=(8, 8), depths=(1, 1), heads=2, mlp_ratio=1.0, steps=2, attentions=('qkta', 'ssa'),
    stem=dict(widths=(8,), pools=(True,)), pools=(True, False),
)  # fmt: skip
ARCH = Kind(lambda value: False)


add('KANet', models.KANet, KANET, arch=ARCH)
add(
    'KANet.arch',
    lambda layout, attention: models.KANet(dict(layout=layout, attention=attention), 0.25),
    KANET['arch'],
    layout=ARCH.but(Bad(['Base', 1, 8, 1, 1], ("'Base'",)), [('Base', 1, 8, 1)]),
    attention=NAMES['mode'],
)


def kanet_row(module: str, expansion: int, channels: int, repeats: int, stride: int) -> nn.Module:
    """Build a KANet whose layout is one row."""
    return models.KANet(dict(layout=[(module, expansion, channels, repeats, stride)], attention='kv'))


add(
    'KANet.row',
    kanet_row,
    dict(module='AttnSkip', expansion=2, channels=8, repeats=1, stride=1),
    module=choice('Base', 'BaseSkip', 'Attn', 'AttnSkip'),
    expansion=COUNT.but(1),
    stride=choice(1, 2),
)
_blocks = sequence_of(integer(1, 17), 1, 3, fixed=False, empty=True).but((0,), (18,))
add('LambdaMobileNetV2', models.LambdaMobileNetV2, dict(widen_factor=0.1, out_indices=1), lambda_blocks=_blocks)

RESNET_KINDS = dict(
    depth=choice(50),
    stage_layers=optional(choice('CCCL')).but('CCC', 'CCCX'),
    stage_blocks=optional(sequence_of(COUNT, 1, 1, 1, 1)),
    lambda_blocks=NONE,
    skeleton=Kind(lambda value: False).but(dict(stem_channels=(8,))),
    img_size=NONE.but(32),
    in_channels=COUNT,
)
_stages = sequence_of(sequence_of(integer(1, 1), 1, fixed=False, empty=True), (), (), (), (1,))
add('LambdaResNet', models.LambdaResNet, LAMBDA_RESNET, **RESNET_KINDS)
add(
    'LambdaResNet.lambda_blocks',
    models.LambdaResNet,
    {**LAMBDA_RESNET, 'stage_layers': None, 'lambda_blocks': ((), (), (), (1,))},
    **{**RESNET_KINDS, 'stage_layers': NONE, 'lambda_blocks': optional(_stages), 'lambda_cfg': SETTINGS},
)
add(
    'LambdaResNet.img_size',
    models.LambdaResNet,
    {**LAMBDA_RESNET, 'lambda_cfg': dict(scope=None, dim_key=2), 'img_size': 32},
    **{**RESNET_KINDS, 'img_size': SIDES},
)


def lambda_resnet_of(stem_channels: Any, max_pool: bool, avg_down: bool, lambda_pool: int) -> nn.Module:
    """Build a LambdaResNet with a skeleton."""
    cfg = dict(stem_channels=stem_channels, max_pool=max_pool, avg_down=avg_down, lambda_pool=lambda_pool)
    return models.LambdaResNet(**{**LAMBDA_RESNET, 'skeleton': cfg})


add(
    'LambdaResNet.skeleton',
    lambda_resnet_of,
    dict(stem_channels=(8,), max_pool=True, avg_down=True, lambda_pool=2),
    stem_channels=sequence_of(COUNT, 8, fixed=False),
    lambda_pool=choice(2, 3),
)

_attentions = sequence_of(choice('qkta', 'qkca', 'ssa'), 'qkta', 'ssa')
add(
    'QKFormer',
    models.QKFormer,
    dict(arch=QKFORMER_ARCH),
    arch=ARCH,
    attentions=optional(_attentions),
    mlp_ratio=optional(POSITIVE),
    out_mode=choice('mean', 'folded', 'steps'),
)
add(
    'QKFormer.arch',
    lambda **arch: models.QKFormer(arch),
    QKFORMER_ARCH,
    dims=sequence_of(COUNT, 8, 8, fixed=False).but((8, 7)),
    depths=sequence_of(COUNT, 1, 1),
    heads=COUNT.but(3),
    mlp_ratio=POSITIVE,
    steps=COUNT,
    attentions=_attentions,
    stem=ARCH.but(dict(widths=(7,), pools=(True,)), Bad(dict(widths=8, pools=(True,)), ('got 8',))),
    pools=sequence_of(FLAG, True, False),
)


def image_forward(network: Callable[..., nn.Module], **kwargs: Any) -> Signature:
    """Return the signature of a network's forward."""
    x = filled(2, 3, 32, 32)
    kind = tensor(x, filled(2, 4, 32, 32), ranks=False).but(x[0])
    return signature(network(**kwargs).eval().forward, dict(x=x), x=kind)


add_later('KANet.forward', partial(image_forward, models.KANet, **KANET))
add_later(
    'LambdaMobileNetV2.forward', partial(image_forward, models.LambdaMobileNetV2, widen_factor=0.1, out_indices=0)
)
add_later('LambdaResNet.forward', partial(image_forward, models.LambdaResNet, **LAMBDA_RESNET))
add_later('QKFormer.forward', partial(image_forward, models.QKFormer, arch=QKFORMER_ARCH))


# --------------------------------------------------------------------------------------------------- necks and heads


def level_maps(neck: nn.Module, *wrong: Any, shape: tuple[int, ...] = (2, 4, 3, 3)) -> Signature:
    """Return the signature of the forward of a neck or head."""
    x = spikes(*shape)
    bad = [x.long(), x[..., :0], x[None], *wrong]
    kind = ARCH.but(*(Bad([value], (str(tuple(value.shape)), str(value.dtype))) for value in bad))
    return signature(neck.forward, dict(inputs=[x]), inputs=kind._replace(by_type=True))


_widths = sequence_of(COUNT, 8, 4, fixed=False)
add('KroneckerNeck', models.KroneckerNeck, dict(in_channels=(8, 4)), in_channels=_widths, levels=optional(LEVELS))
add('SpikeRateNeck', models.SpikeRateNeck, {})
add_later('KroneckerNeck.forward', lambda: level_maps(models.KroneckerNeck((4,)), spikes(2, 5, 3, 3)))
add_later('SpikeRateNeck.forward', lambda: level_maps(models.SpikeRateNeck(), spikes(2, 4, 3), shape=(2, 2, 4, 3, 3)))
# These need a host.
add_later(
    'GlobalAveragePoolingDropout', lambda: signature(models.GlobalAveragePoolingDropout, {}, drop_rate=PROBABILITY)
)
add_later('GlobalAveragePoolingDropout.forward', lambda: level_maps(models.GlobalAveragePoolingDropout()))
add_later(
    'KAOHead',
    lambda: signature(partial(models.KAOHead, num_classes=3), dict(in_channels=4, channels=4), in_channels=COUNT),
)
add_later(
    'ASPPV2Head',
    lambda: signature(
        models.ASPPV2Head,
        dict(in_channels=4, num_classes=3),
        in_channels=COUNT,
        dilations=sequence_of(COUNT, 1, 2, fixed=False),
        dropout_ratio=PROBABILITY,
    ),
)
add_later('KAOHead.forward', lambda: level_maps(models.KAOHead(4, 4, num_classes=3).eval()))
add_later('ASPPV2Head.forward', lambda: level_maps(models.ASPPV2Head(4, num_classes=3).eval()))


# ------------------------------------------------------------------------------------------ analysis and converters

add('attention_cost', analysis.attention_cost, dict(mode='kv', size=(3, 4), channels=2), context_size=optional(SIDES))
add(
    'position_weights',
    analysis.position_weights,
    dict(coefficients=filled(2, 7, 12), mode='kv', size=(3, 4), position=(1, 2)),
    coefficients=tensor(filled(2, 7, 12), filled(2, 6, 12)),
    position=sequence_of(integer(0), 1, 2).but((3, 0), (0, 4), (-1, 0)),
    context_size=optional(SIDES),
)
add(
    'measure_activity',
    analysis.measure_activity,
    dict(model=layers.SpikingConv(4, 4).eval(), batches=[spikes(2, 2, 4, 3, 3)]),
    model=ARCH.but(Bad(nn.Conv2d(4, 4, 1).eval(), ('no spiking layer',)), Bad(nn.ReLU(), ('training',))),
    batches=Kind(lambda value: isinstance(value, (list, tuple, set, torch.Tensor))).but(Bad([], ('empty',))),
    forward=optional(Kind(callable)),
)
_activity = analysis.measure_activity(layers.SpikingConv(4, 4).eval(), [spikes(2, 2, 4, 3, 3)])
_convention = choice('paper', 'strict', 'events')
add('LayerActivity.operations', _activity.layers[0].operations, dict(convention='paper'), convention=_convention)
add('SpikeActivity.total', _activity.total, dict(convention='paper'), convention=_convention, stage=choice(None, ''))

_state = Kind(lambda value: False, by_type=True).but({1: torch.ones(1)})
_weights = dict(named=torch.ones(1))
_resnet = {'conv1.weight': torch.ones(1)}
_states = dict(state_dict=_state, target=_state)
for _call in (converters.convert_timm, converters.convert_qkformer):
    add(_call.__name__, _call, dict(state_dict=_weights, target=_weights), **_states)
add(
    'convert_resnet',
    converters.convert_resnet,
    dict(state_dict=_resnet, target={'stem.0.conv.weight': torch.ones(1)}),
    **_states,
)
_maps = {f'to_{part}.weight': filled(2, 3, 1, 1) for part in 'qkv'}
_maps['rel_pos_emb'] = filled(3, 3, 2, 1)
add('convert_lambda_networks', converters.convert_lambda_networks, dict(state_dict=_maps), state_dict=_state)


# ------------------------------------------------------------------------------------------------ datasets and hooks

_text = Kind(lambda value: isinstance(value, str))
_amount = number(lambda value: value >= 0)
add('EventFlip', datasets.EventFlip, {}, prob=number(lambda value: 0 <= value <= 1))
add('EventAugment', datasets.EventAugment, {}, shear=_amount, rotate=_amount, translate=integer(0))
add('PadFrames', datasets.PadFrames, dict(frames=4))
add('Digits', partial(datasets.Digits, lazy_init=True), {}, split=choice('train', 'val'))
add('PackEventInputs', datasets.PackEventInputs, {}, meta_keys=sequence_of(_text, 'flip', fixed=False, empty=True))


def add_events(call: type, **own: Kind) -> None:
    """Register a dataset of events."""
    path = Kind(lambda value: isinstance(value, str) and value)
    add(
        call.__name__,
        partial(call, lazy_init=True),
        dict(data_root='nowhere', frames=16, by='number', duration=None, cache=None),
        data_root=path,
        frames=COUNT,
        by=choice('number', 'time'),
        duration=NONE.but(5),
        cache=Kind(lambda value: value is None or value is False or path.allows(value)),
        **own,
    )


_split = choice('train', 'test')
add_events(datasets.CIFAR10DVS, split=_split, split_rule=choice('lexicographic', 'tebn'))
add_events(datasets.DVS128Gesture, split=_split)
# MMEngine checks metainfo, and its classes are checked with the data.
add_events(datasets.EventFolder, data_prefix=_text.but('/elsewhere', '../b'), ann_file=_text, metainfo=ANYTHING)
add_later(
    'EventDataPreprocessor',
    lambda: signature(
        MODELS.get('EventDataPreprocessor'),
        dict(num_classes=10),
        num_classes=optional(COUNT),
        batch_augments=SETTINGS.but(dict(nonsense=1)),
    ),
)

_signals = sequence_of(choice('SIGTERM', 'SIGUSR1'), 'SIGTERM', fixed=False, empty=True).but(['SIGKILL'])
add('PreemptionHook', PreemptionHook, {}, signals=_signals)
add('ResumeHook', ResumeHook, {}, signals=_signals)
