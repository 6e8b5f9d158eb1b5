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


@add('KANet')
def kanet() -> Signature:
    return signature(models.KANet, KANET, arch=ARCH)


@add('KANet.arch')
def kanet_arch() -> Signature:
    rows = Kind(lambda value: False).but(Bad(['Base', 1, 8, 1, 1], ("'Base'",)), [('Base', 1, 8, 1)])
    return signature(
        lambda layout, attention: models.KANet(dict(layout=layout, attention=attention), 0.25),
        KANET['arch'],
        layout=rows,
        attention=NAMES['mode'],
    )


@add('KANet.row')
def kanet_row() -> Signature:
    def call(module: str, expansion: int, channels: int, repeats: int, stride: int) -> nn.Module:
        return models.KANet(dict(layout=[(module, expansion, channels, repeats, stride)], attention='kv'))

    good = dict(module='AttnSkip', expansion=2, channels=8, repeats=1, stride=1)
    module = choice('Base', 'BaseSkip', 'Attn', 'AttnSkip')
    return signature(call, good, module=module, expansion=COUNT.but(1), stride=choice(1, 2))


@add('LambdaMobileNetV2')
def lambda_mobilenet() -> Signature:
    blocks = sequence_of(integer(1, 17), 1, 3, fixed=False, empty=True).but((0,), (18,))
    return signature(models.LambdaMobileNetV2, dict(widen_factor=0.1, out_indices=1), lambda_blocks=blocks)


RESNET_KINDS = dict(
    depth=choice(50),
    stage_layers=optional(choice('CCCL')).but('CCC', 'CCCX'),
    stage_blocks=optional(sequence_of(COUNT, 1, 1, 1, 1)),
    lambda_blocks=NONE,
    skeleton=Kind(lambda value: False).but(dict(stem_channels=(8,))),
    img_size=NONE.but(32),
    in_channels=COUNT,
)


@add('LambdaResNet')
def lambda_resnet() -> Signature:
    return signature(models.LambdaResNet, LAMBDA_RESNET, **RESNET_KINDS)


@add('LambdaResNet.lambda_blocks')
def placed_lambda_resnet() -> Signature:
    good = {**LAMBDA_RESNET, 'stage_layers': None, 'lambda_blocks': ((), (), (), (1,))}
    stage = sequence_of(integer(1, 1), 1, fixed=False, empty=True)
    kinds = {**RESNET_KINDS, 'stage_layers': NONE, 'lambda_blocks': optional(sequence_of(stage, (), (), (), (1,)))}
    return signature(models.LambdaResNet, good, **kinds, lambda_cfg=SETTINGS)


@add('LambdaResNet.img_size')
def global_lambda_resnet() -> Signature:
    good = {**LAMBDA_RESNET, 'lambda_cfg': dict(scope=None, dim_key=2), 'img_size': 32}
    return signature(models.LambdaResNet, good, **{**RESNET_KINDS, 'img_size': SIDES})


@add('LambdaResNet.skeleton')
def skeleton() -> Signature:
    def call(stem_channels: Any, max_pool: bool, avg_down: bool, lambda_pool: int) -> nn.Module:
        cfg = dict(stem_channels=stem_channels, max_pool=max_pool, avg_down=avg_down, lambda_pool=lambda_pool)
        return models.LambdaResNet(**{**LAMBDA_RESNET, 'skeleton': cfg})

    good = dict(stem_channels=(8,), max_pool=True, avg_down=True, lambda_pool=2)
    return signature(call, good, stem_channels=sequence_of(COUNT, 8, fixed=False), lambda_pool=choice(2, 3))


@add('QKFormer')
def qkformer() -> Signature:
    return signature(
        models.QKFormer,
        dict(arch=QKFORMER_ARCH),
        arch=ARCH,
        attentions=optional(sequence_of(choice('qkta', 'qkca', 'ssa'), 'qkta', 'ssa')),
        mlp_ratio=optional(POSITIVE),
        out_mode=choice('mean', 'folded', 'steps'),
    )


@add('QKFormer.arch')
def qkformer_arch() -> Signature:
    return signature(
        lambda **arch: models.QKFormer(arch),
        QKFORMER_ARCH,
        dims=sequence_of(COUNT, 8, 8, fixed=False).but((8, 7)),
        depths=sequence_of(COUNT, 1, 1),
        heads=COUNT.but(3),
        mlp_ratio=POSITIVE,
        steps=COUNT,
        attentions=sequence_of(choice('qkta', 'qkca', 'ssa'), 'qkta', 'ssa'),
        stem=Kind(lambda value: False).but(
            dict(widths=(7,), pools=(True,)), Bad(dict(widths=8, pools=(True,)), ('got 8',))
        ),
        pools=sequence_of(FLAG, True, False),
    )


def image_forward(model: nn.Module) -> Signature:
    x = filled(2, 3, 32, 32)
    return signature(model.eval().forward, dict(x=x), x=tensor(x, filled(2, 4, 32, 32), ranks=False).but(x[0]))


add('KANet.forward')(lambda: image_forward(models.KANet(**KANET)))
add('LambdaMobileNetV2.forward')(lambda: image_forward(models.LambdaMobileNetV2(widen_factor=0.1, out_indices=0)))
add('LambdaResNet.forward')(lambda: image_forward(models.LambdaResNet(**LAMBDA_RESNET)))
add('QKFormer.forward')(lambda: image_forward(models.QKFormer(QKFORMER_ARCH)))


# --------------------------------------------------------------------------------------------------- necks and heads


@add('KroneckerNeck')
def kronecker_neck() -> Signature:
    good = dict(in_channels=(8, 4))
    return signature(
        models.KroneckerNeck, good, in_channels=sequence_of(COUNT, 8, 4, fixed=False), levels=optional(LEVELS)
    )


def level_maps(neck: nn.Module, *wrong: Any, shape: tuple[int, ...] = (2, 4, 3, 3)) -> Signature:
    x = spikes(*shape)
    bad = [x.long(), x[..., :0], x[None], *wrong]
    kind = Kind(lambda value: False).but(*(Bad([value], (str(tuple(value.shape)), str(value.dtype))) for value in bad))
    return signature(neck.forward, dict(inputs=[x]), inputs=kind._replace(by_type=True))


add('KroneckerNeck.forward')(lambda: level_maps(models.KroneckerNeck((4,)), spikes(2, 5, 3, 3)))
add('GlobalAveragePoolingDropout')(
    lambda: signature(models.GlobalAveragePoolingDropout, {}, drop_rate=PROBABILITY),
)
add('GlobalAveragePoolingDropout.forward')(lambda: level_maps(models.GlobalAveragePoolingDropout()))
add('SpikeRateNeck')(lambda: signature(models.SpikeRateNeck, {}))
add('SpikeRateNeck.forward')(lambda: level_maps(models.SpikeRateNeck(), spikes(2, 4, 3), shape=(2, 2, 4, 3, 3)))


@add('KAOHead')
def kao_head() -> Signature:
    return signature(partial(models.KAOHead, num_classes=3), dict(in_channels=4, channels=4), in_channels=COUNT)


@add('ASPPV2Head')
def aspp_head() -> Signature:
    good = dict(in_channels=4, num_classes=3)
    return signature(
        models.ASPPV2Head,
        good,
        in_channels=COUNT,
        dilations=sequence_of(COUNT, 1, 2, fixed=False),
        dropout_ratio=PROBABILITY,
    )


add('KAOHead.forward')(lambda: level_maps(models.KAOHead(4, 4, num_classes=3).eval()))
add('ASPPV2Head.forward')(lambda: level_maps(models.ASPPV2Head(4, num_classes=3).eval()))


# ---------------------------------------------------------------------------------------------------------- analysis


@add('attention_cost')
def attention_cost() -> Signature:
    return signature(analysis.attention_cost, dict(mode='kv', size=(3, 4), channels=2), context_size=optional(SIDES))


@add('position_weights')
def position_weights() -> Signature:
    coefficients = filled(2, 7, 12)
    return signature(
        analysis.position_weights,
        dict(coefficients=coefficients, mode='kv', size=(3, 4), position=(1, 2)),
        coefficients=tensor(coefficients, filled(2, 6, 12)),
        mode=choice('kv', 'qkv', 'dense', 'pooled'),
        size=SIDES,
        position=sequence_of(integer(0), 1, 2).but((3, 0), (0, 4), (-1, 0)),
        context_size=optional(SIDES),
    )


STATE = Kind(lambda value: False, by_type=True).but({1: torch.ones(1)})


def conversion(call: Callable[..., Any], state_dict: dict, **target: dict) -> Signature:
    return signature(call, dict(state_dict=state_dict, **target), state_dict=STATE, **dict.fromkeys(target, STATE))


_NAMED = dict(named=torch.ones(1))
add('convert_timm')(lambda: conversion(converters.convert_timm, _NAMED, target=_NAMED))
add('convert_qkformer')(lambda: conversion(converters.convert_qkformer, _NAMED, target=_NAMED))
add('convert_resnet')(
    lambda: conversion(
        converters.convert_resnet, {'conv1.weight': torch.ones(1)}, target={'stem.0.conv.weight': torch.ones(1)}
    )
)


@add('convert_lambda_networks')
def convert_lambda_networks() -> Signature:
    maps = {f'to_{part}.weight': filled(2, 3, 1, 1) for part in 'qkv'}
    return conversion(converters.convert_lambda_networks, {**maps, 'rel_pos_emb': filled(3, 3, 2, 1)})


@add('measure_activity')
def measure_activity() -> Signature:
    spiking, dense = layers.SpikingConv(4, 4).eval(), nn.Conv2d(4, 4, 1).eval()
    batches = Kind(lambda value: isinstance(value, (list, tuple, set, torch.Tensor)))
    return signature(
        analysis.measure_activity,
        dict(model=spiking, batches=[spikes(2, 2, 4, 3, 3)]),
        model=Kind(lambda value: False).but(Bad(dense, ('no spiking layer',)), Bad(nn.ReLU(), ('training',))),
        batches=batches.but(Bad([], ('empty',))),
        forward=optional(Kind(callable)),
    )


CONVENTION = choice('paper', 'strict', 'events')


def activity() -> Any:
    return analysis.measure_activity(layers.SpikingConv(4, 4).eval(), [spikes(2, 2, 4, 3, 3)])


@add('LayerActivity.operations')
def operations() -> Signature:
    return signature(activity().layers[0].operations, dict(convention='paper'), convention=CONVENTION)


@add('SpikeActivity.total')
def total() -> Signature:
    return signature(activity().total, dict(convention='paper'), convention=CONVENTION, stage=choice(None, ''))


# ------------------------------------------------------------------------------------------------ datasets and hooks

add('EventFlip')(lambda: signature(datasets.EventFlip, {}, prob=number(lambda value: 0 <= value <= 1)))
add('PadFrames')(lambda: signature(datasets.PadFrames, dict(frames=4)))
add('Digits')(lambda: signature(partial(datasets.Digits, lazy_init=True), {}, split=choice('train', 'val')))


@add('EventAugment')
def event_augment() -> Signature:
    kinds = {name: number(lambda value: value >= 0) for name in ('shear', 'rotate')}
    return signature(datasets.EventAugment, {}, **kinds, translate=integer(0))


@add('PackEventInputs')
def pack_event_inputs() -> Signature:
    name = Kind(lambda value: isinstance(value, str))
    return signature(datasets.PackEventInputs, {}, meta_keys=sequence_of(name, 'flip', fixed=False, empty=True))


SPLIT = choice('train', 'test')


def events(call: Callable[..., Any], **own: Kind) -> Signature:
    path = Kind(lambda value: isinstance(value, str) and value)
    return signature(
        partial(call, lazy_init=True),
        dict(data_root='nowhere', frames=16, by='number', duration=None, cache=None),
        data_root=path,
        frames=COUNT,
        by=choice('number', 'time'),
        duration=NONE.but(5),
        cache=Kind(lambda value: value is None or value is False or path.allows(value)),
        **own,
    )


@add('CIFAR10DVS')
def cifar10_dvs() -> Signature:
    return events(datasets.CIFAR10DVS, split=SPLIT, split_rule=choice('lexicographic', 'tebn'))


add('DVS128Gesture')(lambda: events(datasets.DVS128Gesture, split=SPLIT))


@add('EventFolder')
def event_folder() -> Signature:
    path = Kind(lambda value: isinstance(value, str))
    # MMEngine checks metainfo, and its classes are looked at with the data.
    own = dict(data_prefix=path.but('/elsewhere', '../b'), ann_file=path, metainfo=ANYTHING)
    return events(datasets.EventFolder, **own)


@add('EventDataPreprocessor')
def event_data_preprocessor() -> Signature:
    return signature(
        MODELS.get('EventDataPreprocessor'),
        dict(num_classes=10),
        num_classes=optional(COUNT),
        batch_augments=SETTINGS.but(dict(nonsense=1)),
    )


SIGNALS = sequence_of(choice('SIGTERM', 'SIGUSR1'), 'SIGTERM', fixed=False, empty=True).but(['SIGKILL'])

add('PreemptionHook')(lambda: signature(PreemptionHook, {}, signals=SIGNALS))
add('ResumeHook')(lambda: signature(ResumeHook, {}, signals=SIGNALS))
