"""Convert a checkpoint of QKFormer's released code to a checkpoint of an MMPretrain classifier.

The released checkpoints for ImageNet and events hold their state dict under ``model``, those for CIFAR under
``state_dict``. Every entry of SRC and of the network must have a counterpart, or nothing is written.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from common import make_parser, parse, run
from mmkron.converters import convert_qkformer
from mmkron.converters.result import without_counters
from mmkron.models import QKFormer
from mmkron.models.backbones.qkformer import ARCHS
from mmkron.utils.errors import LaunchError

NOTE = (
    'These weights were trained with a spiking self-attention whose last neuron runs over the samples of a batch. They '
    'give the released results only with legacy_ssa_order=True and the same batches. With the default, False, a sample '
    'does not depend on its batch, and the accuracy of these weights is lower.'
)


def convert(state_dict: dict[str, Tensor], args: argparse.Namespace) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state dict and the meta of the checkpoint; raise LaunchError for weights of another network."""
    kwargs = dict(arch=args.arch)
    if args.mlp_ratio is not None:
        kwargs['mlp_ratio'] = args.mlp_ratio
    try:
        with torch.device('meta'):
            network = QKFormer(**kwargs)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    converted = convert_qkformer(state_dict, network.state_dict())
    head = head_shapes(converted.head, network.out_channels[-1])
    problems = [
        ('no place for', [*converted.unused, *head['unused']]),
        ('none for', [*converted.missing, *head['missing']]),
    ]
    if any(names for _, names in problems):
        texts = [f'{what} {len(names)} entries, as {", ".join(names[:3])}' for what, names in problems if names]
        raise LaunchError(f'SRC does not fit --arch {args.arch}: {"; ".join(texts)}')
    expected, given = count_sources(network), len(without_counters(state_dict))
    if given != expected + len(converted.head):
        raise LaunchError(
            f'SRC does not fit --arch {args.arch}: two of its entries have one place: it has {given} entries '
            f'instead of {expected + len(converted.head)}, not counting num_batches_tracked'
        )
    weights = {f'backbone.{name}': value for name, value in converted.state_dict.items()}
    weights.update({f'head.fc.{name}': value for name, value in converted.head.items()})
    backbone = dict(type='mmkron.QKFormer', **kwargs)
    meta = dict(source='qkformer', backbone=backbone, legacy_ssa_order=NOTE, unused=[], missing=[])
    return weights, meta


def head_shapes(head: dict[str, Tensor], channels: int) -> dict[str, list[str]]:
    """Return which entries of the classifier do not fit a linear layer on ``channels``, and which it does not have.

    A backbone without a classifier is complete.
    """
    classes = tuple(head['weight'].shape[:1]) if 'weight' in head else ()
    shapes = {'weight': (*classes, channels), 'bias': classes}
    fitting = [name for name, value in head.items() if tuple(value.shape) == shapes.get(name)]
    return dict(
        unused=[f'head.{name}' for name in head if name not in fitting],
        missing=[f'head.{name}' for name in shapes if head and name not in fitting],
    )


def count_sources(network: QKFormer) -> int:
    """Return the number of entries of the released network, where query, key and value have separate layers."""
    operands = {
        f'{name}.operand_map.': part.operands for name, part in network.named_modules() if hasattr(part, 'operands')
    }
    names = without_counters(network.state_dict())
    return sum(next((count for prefix, count in operands.items() if name.startswith(prefix)), 1) for name in names)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('--arch', required=True, choices=tuple(ARCHS), help='released network of SRC')
    ratio = 'ratio of the MLP, if it differs from the arch: dvs-gesture has 4 in the released code, 1 in the paper'
    parser.add_argument('--mlp-ratio', type=float, help=ratio)
    return parse(parser, argv)


def main(argv: list[str] | None = None) -> None:
    # The released code saves the arguments of the run with the weights.
    run(parse_args(argv), convert, allowed=[argparse.Namespace])
    print(f'{"note":<10} {NOTE}')


if __name__ == '__main__':
    main()
