"""Weights of QKFormer's released code in its three layouts: every entry has a place, or its name is reported."""

import pytest
import torch
from qkformer_layouts import in_our_order, official

from mmkron.converters import convert_qkformer
from mmkron.models import QKFormer
from mmkron.models.backbones.qkformer import ARCHS

# Entries with the head. The ImageNet networks were counted in the released code.
ENTRIES = {'cifar': 200, 'cifar10-dvs': 122, 'dvs-gesture': 122}  # 434 otherwise
PARAMETERS = {
    'hst-10-384': 16_473_688,
    'hst-10-512': 29_079_336,
    'hst-10-768': 64_962_760,
    'cifar': 6_706_234,
    'cifar10-dvs': 1_504_138,
    'dvs-gesture': 1_999_371,
}


def target(arch, **kwargs):
    with torch.device('meta'):
        return QKFormer(arch, **kwargs).state_dict()


@pytest.mark.parametrize('arch', ARCHS)
def test_every_entry_has_its_place(arch):
    source = official(arch)
    assert len(source) == ENTRIES.get(arch, 434)
    statistics = ('running_mean', 'running_var', 'num_batches_tracked')
    assert sum(v.numel() for name, v in source.items() if not name.endswith(statistics)) == PARAMETERS[arch]
    converted = convert_qkformer(source, target(arch))
    assert converted.unused == converted.missing == []
    assert converted.head.keys() == {'weight', 'bias'}
    assert all(torch.equal(converted.head[name], source[f'head.{name}']) for name in converted.head)
    names = list(target(arch))
    expected = list(in_our_order(source))
    assert len(names) == len(expected) == len(converted.state_dict)
    for name, value in zip(names, expected):
        assert torch.equal(converted.state_dict[name], value), name


def test_order_of_the_operands():
    """Queries, keys and values have this order for any order in the file."""
    source = dict(reversed(official('hst-10-384').items()))
    ours = convert_qkformer(source, target('hst-10-384')).state_dict
    q, k, v = (source[f'stage3.4.attn.{operand}_conv.weight'][..., None] for operand in 'qkv')
    assert torch.equal(ours['stages.2.5.attention.operand_map.conv.weight'], torch.cat((q, k, v)))
    q, k, v = (source[f'stage3.4.attn.{operand}_bn.running_var'] for operand in 'qkv')
    assert torch.equal(ours['stages.2.5.attention.operand_map.norm.running_var'], torch.cat((q, k, v)))
    assert torch.equal(ours['stages.1.2.mlp.project.conv.bias'], source['stage2.1.mlp.fc2_conv.bias'])


def test_unused_entries_are_named():
    source = official('cifar')
    del source['stage3.1.ssa.k_conv.weight']
    source['pos_embed'] = torch.zeros(1)
    converted = convert_qkformer(source, target('cifar'))
    rest = [f'stage3.1.ssa.{operand}_conv.weight' for operand in 'qv']
    assert sorted(converted.unused) == ['pos_embed', *rest]
    assert converted.missing == ['stages.2.2.attention.operand_map.conv.weight']


@pytest.mark.parametrize(
    'shapes', [((384, 384, 1), (384, 192, 1)), ((400, 384, 1), (368, 384, 1)), ((384,), ()), ((), ())]
)
def test_operands_of_other_shapes(shapes):
    """Queries and keys that cannot be one map, or only by accident, have no place."""
    source, names = official('hst-10-384'), [f'stage3.0.attn.{operand}_conv.weight' for operand in 'qkv']
    source.update(zip(names, map(torch.zeros, (*shapes, (384, 384, 1)))))
    converted = convert_qkformer(source, target('hst-10-384'))
    assert sorted(converted.unused) == sorted(names)
    assert converted.missing == ['stages.2.1.attention.operand_map.conv.weight']


def test_another_ratio_of_the_mlp():
    """The Gesture network with the paper's parameters has an MLP a quarter as wide as the released code's."""
    source = official('dvs-gesture')
    assert convert_qkformer(source, target('dvs-gesture', mlp_ratio=4)).missing == []
    converted = convert_qkformer(source, target('dvs-gesture', mlp_ratio=1))
    assert len(converted.missing) == 2 * (6 + 1)  # all of a stage's first layer, and the weight of the second
    assert all('.mlp.' in name for name in (*converted.missing, *converted.unused))
