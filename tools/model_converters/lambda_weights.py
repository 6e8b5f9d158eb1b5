"""Converts weights of other libraries' networks for LambdaResNet, as a checkpoint of an MMPretrain classifier.

Sources: timm's three lambda networks, the lambda layer of the package lambda-networks (whose checkpoint has the names
of a LambdaLayer alone), and a ResNet of torchvision or MMPretrain, which gives a LambdaResNet of skeleton v1.5 what
both have: everything but the lambda layers.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmkron.analysis import convert_lambda_networks, convert_resnet, convert_timm
from mmkron.analysis.lambda_weights import TIMM_NETWORKS
from mmkron.engine.launch import LaunchError, allow_checkpoint_globals
from mmkron.models import LambdaResNet

TIMM = {
    'timm-26t': 'lambda_resnet26t',
    'timm-26rpt': 'lambda_resnet26rpt_256',
    'timm-50ts': 'lambda_resnet50ts',
}
PICKLES = ('.pth', '.pt', '.bin', '.tar')


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, which may lie under ``state_dict`` or ``model``. No code of the file is run.

    Raises:
        LaunchError: no readable file of weights.
    """
    try:
        if path.suffix == '.safetensors':
            content = read_safetensors(path)
        elif path.suffix in PICKLES:
            allow_checkpoint_globals()
            content = torch.load(path, map_location='cpu', weights_only=True)
        else:
            raise LaunchError(f'SRC must be a file {", ".join(PICKLES)} or .safetensors, got {path}')
    except OSError as error:
        raise LaunchError(f'SRC cannot be read: {error}') from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f'SRC {path} is damaged, or holds no weights that can be read without running its code'
        ) from error
    for key in ('state_dict', 'model'):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if (
        not isinstance(content, dict)
        or not content
        or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())
    ):
        raise LaunchError(f'SRC {path} must hold a state dict, names and tensors; it does not')
    return {name.removeprefix('module.'): value for name, value in content.items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise LaunchError(f'SRC {path} needs the package safetensors, which is not installed') from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise LaunchError(f'SRC {path} is no file of safetensors: {error}') from error


def convert(state_dict: dict[str, Tensor], args: argparse.Namespace) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The checkpoint's state dict and its meta, with what was not covered.

    Raises:
        LaunchError: weights of another network.
    """
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
        raise LaunchError(f'SRC does not fit --from {args.source}: no counterpart of {names}, ...')
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('src', metavar='SRC', type=Path, help=f'weights: {", ".join(PICKLES)} or .safetensors')
    parser.add_argument('dst', metavar='DST', type=Path, help='checkpoint to write, .pth; nothing is overwritten')
    choices = (*TIMM, 'lambda-networks', 'resnet')
    parser.add_argument('--from', dest='source', required=True, choices=choices, help='what SRC is of')
    parser.add_argument('--depth', type=int, default=50, help='with --from resnet; default: %(default)s')
    help_layers = "with --from resnet: where DST's network has lambda layers, as CCLL; default: where depth has them"
    parser.add_argument('--stage-layers', metavar='LETTERS', help=help_layers)
    args = parser.parse_args(argv)
    if args.dst.suffix != '.pth':
        parser.error(f'DST must end in .pth, got {args.dst}')
    if args.dst.exists():
        parser.error(f'DST must be a new file, got {args.dst}: nothing is overwritten')
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        weights, meta = convert(read_weights(args.src), args)
        args.dst.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(state_dict=weights, meta=meta), args.dst)
    except (LaunchError, OSError) as error:
        raise SystemExit(f'error: {error}') from None
    print(f'{"checkpoint":<10} {args.dst}, {len(weights)} entries')
    report('unused', 'of SRC, which the network has no place for', meta['unused'])
    report('missing', 'of the network, which SRC does not give', meta['missing'])


def report(title: str, what: str, names: list[str]) -> None:
    print(f'{title:<10} {len(names)} entries {what}')
    for name in names:
        print(f'{"":<10} {name}')


if __name__ == '__main__':
    main()
