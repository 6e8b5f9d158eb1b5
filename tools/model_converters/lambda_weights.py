"""Convert weights of other libraries to a checkpoint of an MMPretrain classifier with a LambdaResNet.

Sources are the three lambda networks of timm, a ResNet of torchvision or MMPretrain, and the lambda layer of the
package lambda-networks. A ResNet gives a LambdaResNet of skeleton v1.5 everything but its lambda layers; the layer of
lambda-networks becomes the state dict of a mmkron.LambdaLayer.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch import Tensor

from common import make_parser, parse, run
from mmkron.converters import convert_lambda_networks, convert_resnet, convert_timm
from mmkron.converters.lambda_resnet import TIMM_NETWORKS
from mmkron.models import LambdaResNet
from mmkron.utils.errors import LaunchError

TIMM = {
    'timm-26t': 'lambda_resnet26t',
    'timm-26rpt': 'lambda_resnet26rpt_256',
    'timm-50ts': 'lambda_resnet50ts',
}


def convert(state_dict: dict[str, Tensor], args: argparse.Namespace) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state dict and the meta of the checkpoint; raise LaunchError for weights of another network."""
    if args.source == 'lambda-networks':
        try:
            return convert_lambda_networks(state_dict), dict(source=args.source, unused=[], missing=[])
        except ValueError as error:
            raise LaunchError(f'SRC does not fit --from {args.source}: {error}') from error
    if args.source in TIMM:
        kwargs, function = TIMM_NETWORKS[TIMM[args.source]], convert_timm
    else:
        kwargs, function = dict(depth=args.depth, stage_layers=args.stage_layers, skeleton='v1.5'), convert_resnet
    try:
        target = LambdaResNet(**kwargs).state_dict()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    try:
        converted = function(state_dict, target)
    except ValueError as error:
        raise LaunchError(f'SRC does not fit --from {args.source}: {error}') from error
    if not converted.state_dict or (args.source in TIMM and (converted.unused or converted.missing)):
        names = ', '.join([*converted.unused, *converted.missing][:3])
        raise LaunchError(f'SRC does not fit --from {args.source}: no counterpart of {names}')
    weights = {f'backbone.{name}': value for name, value in converted.state_dict.items()}
    weights.update({f'head.fc.{name}': value for name, value in converted.head.items()})
    meta = dict(
        source=args.source,
        backbone=dict(type='mmkron.LambdaResNet', **kwargs),
        unused=converted.unused,
        missing=converted.missing,
    )
    return weights, meta


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    choices = (*TIMM, 'lambda-networks', 'resnet')
    parser.add_argument('--from', dest='source', required=True, choices=choices, help='library and network of SRC')
    parser.add_argument('--depth', type=int, default=50, help='depth, with --from resnet; default: %(default)s')
    help_layers = 'with --from resnet: stages of DST with lambda layers (L), such as CCLL; default: as for the depth'
    parser.add_argument('--stage-layers', metavar='LETTERS', help=help_layers)
    return parse(parser, argv)


def main(argv: list[str] | None = None) -> None:
    run(parse_args(argv), convert)


if __name__ == '__main__':
    main()
