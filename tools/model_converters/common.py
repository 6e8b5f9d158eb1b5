"""Shared parts of the weight converters: parse SRC and DST, read SRC without running its code, write DST, report."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import checkpoint_path, read_whole

PICKLES = ('.pth', '.pt', '.bin', '.tar')
Converter = Callable[[dict[str, Tensor], argparse.Namespace], tuple[dict[str, Tensor], dict[str, Any]]]


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments SRC and DST."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('src', metavar='SRC', type=Path, help=f'weights: {", ".join(PICKLES)} or .safetensors')
    parser.add_argument('dst', metavar='DST', type=Path, help='new checkpoint file, .pth')
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments; end the program unless DST is a new .pth file."""
    args = parser.parse_args(argv)
    if args.dst.suffix != '.pth' or args.dst.exists():
        parser.error(f'DST must be a new file that ends in .pth, got {args.dst}')
    return args


def read_file(path: Path, allowed: Sequence[type] = ()) -> Any:
    """Return the content of a file without running its code.

    Args:
        path: A file that ``torch.save`` or safetensors wrote.
        allowed: Classes that this file may hold in addition to tensors and MMEngine's own records.

    Raises:
        LaunchError: The file is missing, damaged or refused.
    """
    if path.suffix in PICKLES:
        if allowed and not hasattr(torch.serialization, 'safe_globals'):
            raise LaunchError(f'SRC {path} needs PyTorch 2.5 or later, got {torch.__version__}')
        with torch.serialization.safe_globals(list(allowed)) if allowed else nullcontext():
            return read_whole(checkpoint_path(str(path), 'SRC'), 'SRC')
    if path.suffix != '.safetensors':
        raise LaunchError(f'SRC must be a file {", ".join(PICKLES)} or .safetensors, got {path}')
    try:
        from safetensors.torch import load_file

        return load_file(path)
    except ImportError as error:
        raise LaunchError(f'SRC {path} needs the package safetensors, which is not installed') from error
    except Exception as error:  # a damaged file can make the reader raise anything
        raise LaunchError(f'SRC {path} is not a safetensors file: {type(error).__name__}: {error}') from error


def read_weights(path: Path, allowed: Sequence[type] = ()) -> dict[str, Tensor]:
    """Return the state dict of a file, which may be nested under ``state_dict`` or ``model``; see :func:`read_file`."""
    content = read_file(path, allowed)
    for key in ('state_dict', 'model'):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    pairs = content.items() if isinstance(content, dict) else ()
    if not pairs or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs):
        raise LaunchError(f'SRC {path} must hold a state dict of names and tensors')
    return {name.removeprefix('module.'): value for name, value in pairs}


def serialize(content: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def write_new(path: Path, content: bytes) -> None:
    """Write a new file, or none after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('xb') as file:
        try:
            file.write(content)
            file.flush()
        except BaseException:
            path.unlink()
            raise


def run(args: argparse.Namespace, convert: Converter, allowed: Sequence[type] = ()) -> None:
    """Convert SRC to DST, and list the entries that have no counterpart.

    Args:
        args: The parsed arguments.
        convert: Function from the state dict of SRC and ``args`` to the state dict and the meta of DST. The meta lists
            under ``unused`` the entries of SRC that have no place, under ``missing`` those that SRC does not have.
        allowed: See :func:`read_file`.
    """
    try:
        weights, meta = convert(read_weights(args.src, allowed), args)
        write_new(args.dst, serialize(dict(state_dict=weights, meta=meta)))
    except (LaunchError, OSError) as error:
        raise SystemExit(f'error: {error}') from None
    print(f'checkpoint {args.dst}, {len(weights)} entries')
    for key, what in (('unused', 'of SRC have no place'), ('missing', 'are not in SRC')):
        print(f'{key:<10} {len(meta[key])} entries {what}')
        for name in meta[key]:
            print(f'{"":<10} {name}')
