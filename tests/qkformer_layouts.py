"""State dicts in the layouts of QKFormer's released code: names, shapes and order, with arbitrary values."""

import torch

IMAGENET = {'hst-10-384': 384, 'hst-10-512': 512, 'hst-10-768': 768}
LEAVES = ('weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked')


def official(arch, classes=None):
    """Return the state dict of one of the six networks, in the order of the released classes."""
    if arch in IMAGENET:
        width, names, first = IMAGENET[arch], ('tssa', 'attn', 'fc'), ('', '1', '2')
        widths, dims, depths, ratio = (
            [3, width // 8, width // 4, width // 4],
            [width // 4, width // 2, width],
            (1, 2, 7),
            4,
        )
        later, source, classes = ('3', '4'), 1, classes or 1000
    elif arch == 'cifar':
        names, first, widths, dims, depths = ('tssa', 'ssa', 'mlp'), ('', '1'), [3, 48, 96], [96, 192, 384], (1, 1, 2)
        later, source, classes, ratio = ('3', '4'), 1, classes or 10, 4
    else:
        names, first, widths = ('tssa', 'ssa', 'mlp'), ('', '1', '2', '3'), [2, 16, 32, 64, 128]
        dims, depths, ratio = [128, 256], (1, 1), 4 if arch == 'dvs-gesture' else 1
        later, source, classes = ('', '4'), 2, classes or (11 if arch == 'dvs-gesture' else 10)
    sizes = {}
    for number, before, after in zip(first, widths, widths[1:]):
        conv_bn(sizes, f'patch_embed1.proj{number}', (after, before, 3, 3))
    conv_bn(sizes, 'patch_embed1.proj_res', (dims[0], widths[source], 1, 1))
    for stage, (before, after) in enumerate(zip(dims, dims[1:]), 2):
        conv_bn(sizes, f'patch_embed{stage}.proj{later[0]}', (after, before, 3, 3))
        conv_bn(sizes, f'patch_embed{stage}.proj{later[1]}', (after, after, 3, 3))
        conv_bn(sizes, f'patch_embed{stage}.proj_res', (after, before, 1, 1))
    for stage, (dim, depth) in enumerate(zip(dims, depths), 1):
        last = stage == len(dims)
        for block in range(depth):
            prefix = f'stage{stage}.{block}'
            for operand in 'qkv' if last else 'qk':
                conv_bn(sizes, f'{prefix}.{names[last]}.{operand}', (dim, dim, 1))
            conv_bn(sizes, f'{prefix}.{names[last]}.proj', (dim, dim, 1), bias=True)
            conv_bn(sizes, f'{prefix}.mlp.{names[2]}1', (ratio * dim, dim, 1, 1), bias=True)
            conv_bn(sizes, f'{prefix}.mlp.{names[2]}2', (dim, ratio * dim, 1, 1), bias=True)
    sizes['head.weight'], sizes['head.bias'] = (classes, dims[-1]), (classes,)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.tensor(index) if name.endswith('tracked') else torch.rand(size, generator=generator)
        for index, (name, size) in enumerate(sizes.items())
    }


def conv_bn(sizes, name, shape, bias=False):
    sizes[f'{name}_conv.weight'] = shape
    if bias:
        sizes[f'{name}_conv.bias'] = shape[:1]
    for leaf in LEAVES:
        sizes[f'{name}_bn.{leaf}'] = () if leaf == 'num_batches_tracked' else shape[:1]


def in_our_order(state_dict):
    """Yield the tensors in the order of QKFormer's state dict, found by position instead of name.

    In QKFormer a stage begins with its patch embedding, convolutions are two-dimensional, and query, key and value have
    one map.
    """
    for stage in ('1', '2', '3'):
        yield from (value for name, value in state_dict.items() if name.startswith(f'patch_embed{stage}.'))
        held = []  # of q, then of k, then of v, six each
        for name, value in state_dict.items():
            if not name.startswith(f'stage{stage}.'):
                continue
            value = value[..., None] if value.dim() == 3 else value
            if name.split('.')[3].split('_')[0] in 'qkv':
                held.append(value)
                continue
            for place in range(6 if held else 0):
                parts = held[place::6]
                yield torch.cat(parts) if parts[0].dim() else parts[0]
            held = []
            yield value
