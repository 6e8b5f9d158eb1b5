"""Convert weights of other libraries' lambda networks and residual networks to LambdaResNet and LambdaLayer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmkron.converters.result import Converted, check_state_dict, without_counters

# Arguments of LambdaResNet for the three lambda networks of timm 1.0, which are not configurations of the paper.
TIMM_NETWORKS: dict[str, dict[str, Any]] = {
    'lambda_resnet26t': dict(
        stage_blocks=(2, 2, 2, 2),
        lambda_blocks=((), (), (2,), (1, 2)),
        skeleton='timm',
        lambda_cfg=dict(scope=9, position_bias=True),
    ),
    'lambda_resnet26rpt_256': dict(
        stage_blocks=(2, 2, 2, 2),
        lambda_blocks=((), (), (2,), (1, 2)),
        skeleton='timm',
        lambda_cfg=dict(scope=None),
        img_size=256,
    ),
    'lambda_resnet50ts': dict(
        stage_blocks=(3, 4, 6, 3),
        lambda_blocks=((), (4,), (2, 4, 6), (2,)),
        skeleton='timm',
        lambda_cfg=dict(scope=9, position_bias=True),
        act_cfg=dict(type='SiLU', inplace=True),
    ),
}

# Prefixes of names within a block, theirs -> ours.
TIMM_PARTS = {
    'conv1_1x1.': 'reduce.',
    'conv2_kxk.': 'spatial.',
    'conv3_1x1.': 'project.',
    'shortcut.': 'shortcut.1.',
    'post_attn.': 'spatial.norm.',
    'self_attn.qkv.': 'spatial.layer.qkv_map.',
    'self_attn.norm_q.': 'spatial.layer.query_norm.',
    'self_attn.norm_v.': 'spatial.layer.value_norm.',
    'self_attn.conv_lambda.weight': 'spatial.layer.position_table',
    'self_attn.conv_lambda.bias': 'spatial.layer.position_bias',
    'self_attn.pos_emb': 'spatial.layer.position_table',
}
RESNET_PARTS = {
    'conv1.': 'reduce.conv.',
    'bn1.': 'reduce.bn.',
    'conv2.': 'spatial.conv.',
    'bn2.': 'spatial.bn.',
    'conv3.': 'project.conv.',
    'bn3.': 'project.bn.',
    'downsample.0.': 'shortcut.1.conv.',
    'downsample.1.': 'shortcut.1.bn.',
}

# Entries in which a LambdaResNet may differ from a ResNet.
SPATIAL_PARTS = r'^stages\.\d\.\d+\.(spatial|se)\.'


def convert_timm(state_dict: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Converted:
    """Convert a lambda network of timm to the LambdaResNet with its arguments in :data:`TIMM_NETWORKS`.

    Args:
        state_dict: State dict of timm's network.
        target: State dict of the LambdaResNet.

    Returns:
        The converted weights, and the names without a counterpart.
    """
    check_state_dict('state_dict', state_dict)
    check_state_dict('target', target)
    values = {}
    for name, value in state_dict.items():
        if name.endswith('self_attn.conv_lambda.weight') and value.dim() == 5:
            value = _table(value[..., 0])
        elif name.endswith('self_attn.pos_emb') and value.dim() == 3:
            value = value.permute(2, 0, 1)[None]
        values[name] = value
    return _fit(values, target, _timm_name, 'head.fc.')


def convert_resnet(state_dict: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Converted:
    """Convert a ResNet of bottlenecks to a LambdaResNet of skeleton ``v1.5``, as far as the two agree.

    Args:
        state_dict: State dict of torchvision's ResNet, of MMPretrain's ResNet (style ``pytorch``), or of an MMPretrain
            classifier with such a backbone.
        target: State dict of the LambdaResNet.

    Returns:
        The converted weights, and the names without a counterpart.

    Raises:
        ValueError: If the networks differ in more than the entries that :data:`SPATIAL_PARTS` matches.
    """
    check_state_dict('state_dict', state_dict)
    check_state_dict('target', target)
    values = {name.removeprefix('backbone.').removeprefix('head.'): v for name, v in state_dict.items()}
    converted = _fit(values, target, _resnet_name, 'fc.')
    places = [place for place in map(_resnet_name, converted.unused) if place]
    differing = [name for name in (*places, *converted.missing) if not re.search(SPATIAL_PARTS, name)]
    if differing:
        theirs = _count_blocks(values, r'layer(\d)\.(\d+)\.')
        ours = _count_blocks(target, r'stages\.(\d)\.(\d+)\.')
        raise ValueError(
            f'state_dict must be of a ResNet of bottlenecks with as many blocks per stage as the target, {ours}, and '
            f"skeleton 'v1.5'; got {theirs} blocks, and {len(differing)} entries that differ, such as {differing[0]}"
        )
    return converted


def convert_lambda_networks(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the LambdaLayer of the package lambda-networks to a LambdaLayer of mmkron with the same arguments.

    A local layer (``r``) needs ``position_bias=True``; a global one (``n``) needs ``scope=None, feat_size=n``.

    Args:
        state_dict: State dict of the layer of lambda-networks.

    Returns:
        The state dict of the layer of mmkron.

    Raises:
        ValueError: If ``state_dict`` belongs to another layer.
    """
    check_state_dict('state_dict', state_dict)
    rest = dict(state_dict)
    try:
        converted = {'qkv_map.weight': torch.cat([rest.pop(f'to_{part}.weight') for part in 'qkv'])}
        if 'rel_pos_emb' in rest:
            converted['position_table'] = rest.pop('rel_pos_emb').permute(3, 2, 0, 1)
        else:
            converted['position_table'] = _table(rest.pop('pos_conv.weight')[:, :, 0])
            converted['position_bias'] = rest.pop('pos_conv.bias')
    except KeyError as error:
        raise ValueError(f"state_dict must be of lambda-networks' LambdaLayer, got one without {error}") from None
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"state_dict must be of lambda-networks' LambdaLayer, got other shapes: {error}") from None
    for name, value in rest.items():
        new = name.replace('norm_q.', 'query_norm.').replace('norm_v.', 'value_norm.')
        if new == name:
            raise ValueError(f"state_dict must be of lambda-networks' LambdaLayer, got one with {name!r}")
        converted[new] = value
    return converted


def _table(kernel: Tensor) -> Tensor:
    """Return the position table (u, k, r, r) for the kernel (k, u, r, r) of a lambda convolution."""
    return kernel.transpose(0, 1)


def _timm_name(name: str) -> str | None:
    """Return our name for an entry of timm's network, None if it has no counterpart."""
    found = re.fullmatch(r'stem\.conv(\d+)\.(.+)', name)
    if found:
        return f'stem.{int(found[1]) - 1}.{found[2]}'
    found = re.fullmatch(r'(stages\.\d+\.\d+\.)(.+)', name)
    return found and _replace_prefix(found[1], found[2], TIMM_PARTS)


def _resnet_name(name: str) -> str | None:
    """Return our name for an entry of a ResNet, None if it has no counterpart."""
    found = re.fullmatch(r'(conv|bn)1\.(.+)', name)
    if found:
        return f'stem.0.{found[1]}.{found[2]}'
    found = re.fullmatch(r'layer(\d)\.(\d+)\.(.+)', name)
    return found and _replace_prefix(f'stages.{int(found[1]) - 1}.{found[2]}.', found[3], RESNET_PARTS)


def _count_blocks(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Count the blocks of each stage; ``pattern`` matches the numbers of stage and block."""
    found = sorted({match.groups() for name in names if (match := re.match(pattern, name))})
    return tuple(Counter(stage for stage, _ in found).values())


def _replace_prefix(block: str, name: str, parts: Mapping[str, str]) -> str | None:
    """Return the name within ``block`` after replacing a prefix of ``parts``, None if none matches."""
    for old, new in parts.items():
        if name.startswith(old):
            return block + new + name[len(old) :]
    return None


def _fit(
    values: Mapping[str, Tensor], target: Mapping[str, Tensor], rename: Callable[[str], str | None], head: str
) -> Converted:
    """Assign the values to the entries of the target that ``rename`` gives, where the shapes agree."""
    converted, classifier, unused = {}, {}, []
    for name, value in values.items():
        new = rename(name)
        if name.startswith(head):
            classifier[name[len(head) :]] = value
        elif new in target and target[new].shape == value.shape:
            converted[new] = value.contiguous()
        else:
            unused.append(name)
    missing = [name for name in target if name not in converted]
    return Converted(converted, classifier, without_counters(unused), without_counters(missing))
