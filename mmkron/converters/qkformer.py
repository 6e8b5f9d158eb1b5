"""Converter of weights from QKFormer's released code."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mmkron.converters.result import COUNTER, Converted, check_state_dict, without_counters

OPERANDS = ('q', 'k', 'v')
# Names of modules: released code -> mmkron.
PARTS = {'conv': 'conv', 'bn': 'norm'}
MLP = {'1': 'expand', '2': 'project'}


def convert_qkformer(state_dict: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Converted:
    """Convert the weights of a released network for the :class:`mmkron.models.QKFormer` of the same arch.

    The released networks for ImageNet, CIFAR and events differ only in names: of the MLP (``fc1`` or ``mlp1``), the
    attention (``tssa``, ``attn`` or ``ssa``), and the numbered convolutions of a patch embedding. mmkron computes
    queries, keys and values with one convolution, and all its convolutions are two-dimensional.

    Args:
        state_dict: State dict of the released network.
        target: State dict of the QKFormer.

    Raises:
        TypeError: If an argument is not a dict of names and tensors.
        ValueError: If an argument is empty.
    """
    check_state_dict('state_dict', state_dict)
    check_state_dict('target', target)
    values: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    sources: dict[str, list[str]] = {}
    operands: dict[str, dict[str, Tensor]] = {}
    unused = []
    for name, value in state_dict.items():
        if name.startswith('head.'):
            head[name.removeprefix('head.')] = value
            continue
        new, operand = _rename(name, state_dict)
        if new is None:
            unused.append(name)
            continue
        sources.setdefault(new, []).append(name)
        value = value[..., None] if value.dim() == 3 else value
        if operand is None:
            values[new] = value
        else:
            operands.setdefault(new, {})[operand] = value
    for new, parts in operands.items():
        ordered = [parts[operand] for operand in OPERANDS if operand in parts]
        if new.endswith(COUNTER):
            values[new] = ordered[0]
        elif ordered[0].dim() and all(part.shape == ordered[0].shape for part in ordered):
            values[new] = torch.cat(ordered)
        else:
            unused += sources[new]
    converted = {name: value for name, value in values.items() if name in target and target[name].shape == value.shape}
    unused += [source for name in values if name not in converted for source in sources[name]]
    missing = [name for name in target if name not in converted]
    return Converted(converted, head, without_counters(unused), without_counters(missing))


def _rename(name: str, names: Mapping[str, Tensor]) -> tuple[str | None, str | None]:
    """Return mmkron's name of an entry, and its operand if it is of an attention; (None, None) if there is none."""
    if found := re.fullmatch(r'patch_embed(\d)\.proj(_res|\d?)_(conv|bn)\.(\w+)', name):
        stage, number, part, leaf = found.groups()
        prefix = 'stem' if stage == '1' else f'stages.{int(stage) - 1}.0'
        if number == '_res':
            return f'{prefix}.shortcut.{PARTS[part]}.{leaf}', None
        pattern = rf'patch_embed{stage}\.proj(\d?)_conv\.weight'
        order = sorted(match[1] for other in names if (match := re.fullmatch(pattern, other)))
        return (f'{prefix}.convs.{order.index(number)}.{PARTS[part]}.{leaf}', None) if number in order else (None, None)
    if found := re.fullmatch(r'stage(\d)\.(\d+)\.(?:tssa|attn|ssa)\.(q|k|v|proj)_(conv|bn)\.(\w+)', name):
        stage, block, of, part, leaf = found.groups()
        layer, operand = ('project', None) if of == 'proj' else ('operand_map', of)
        return f'{_block(stage, block)}.attention.{layer}.{PARTS[part]}.{leaf}', operand
    if found := re.fullmatch(r'stage(\d)\.(\d+)\.mlp\.(?:fc|mlp)([12])_(conv|bn)\.(\w+)', name):
        stage, block, number, part, leaf = found.groups()
        return f'{_block(stage, block)}.mlp.{MLP[number]}.{PARTS[part]}.{leaf}', None
    return None, None


def _block(stage: str, block: str) -> str:
    """Return the name of a block; in stages after the first, module 0 is the patch embedding."""
    index = int(stage) - 1
    return f'stages.{index}.{int(block) + (index > 0)}'
