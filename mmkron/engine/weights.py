"""What the converters of weights share: files are read without running their code, what did not fit is listed."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from mmengine.utils import digit_version
from torch import Tensor

from mmkron.engine.checkpoints import checkpoint_path, read_whole
from mmkron.engine.errors import LaunchError

PICKLES = ('.pth', '.pt', '.bin', '.tar')


def read_checkpoint(path: Path, allowed: Sequence[type] = ()) -> Any:
    """What is in a file, whatever it is; no code of the file is run. Arguments and errors: :func:`read_weights`."""
    if path.suffix == '.safetensors':
        return read_safetensors(path)
    if path.suffix not in PICKLES:
        raise LaunchError(f'SRC must be a file {", ".join(PICKLES)} or .safetensors, got {path}')
    with permit(allowed):
        return read_whole(checkpoint_path(str(path), 'SRC'), 'SRC')


def read_weights(path: Path, allowed: Sequence[type] = ()) -> dict[str, Tensor]:
    """The state dict in a file, which may lie under ``state_dict`` or ``model``. No code of the file is run.

    Args:
        path: a file that ``torch.save`` or safetensors wrote.
        allowed: classes beyond those of MMEngine's checkpoints that may stand in this file; no other load sees them.

    Raises:
        LaunchError: no readable file of weights.
    """
    content = read_checkpoint(path, allowed)
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


def permit(allowed: Sequence[type]):
    """A context in which ``torch.load`` with ``weights_only=True`` takes these classes, too.

    Raises:
        LaunchError: a PyTorch that has no such context, which 2.5 brought.
    """
    if not allowed:
        return nullcontext()
    if digit_version(torch.__version__) < digit_version('2.5'):
        raise LaunchError(f'such files are read from PyTorch 2.5 on; this is {torch.__version__}')
    return torch.serialization.safe_globals(list(allowed))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise LaunchError(f'SRC {path} needs the package safetensors, which is not installed') from error
    try:
        return load_file(path)
    except Exception as error:  # as in read_whole
        raise LaunchError(f'SRC {path} is no file of safetensors: {type(error).__name__}: {error}') from error


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the two files that every converter has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('src', metavar='SRC', type=Path, help=f'weights: {", ".join(PICKLES)} or .safetensors')
    parser.add_argument('dst', metavar='DST', type=Path, help='checkpoint to write, .pth; nothing is overwritten')
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The arguments; ends the program if DST is no new file."""
    args = parser.parse_args(argv)
    if args.dst.suffix != '.pth':
        parser.error(f'DST must end in .pth, got {args.dst}')
    if args.dst.exists():
        parser.error(f'DST must be a new file, got {args.dst}: nothing is overwritten')
    return args


def write(
    args: argparse.Namespace,
    convert: Callable[[dict[str, Tensor], argparse.Namespace], tuple[dict[str, Tensor], dict[str, Any]]],
    allowed: Sequence[type] = (),
) -> None:
    """Reads SRC, writes DST with what ``convert`` returns (state dict and meta), and lists what had no counterpart."""
    try:
        weights, meta = convert(read_weights(args.src, allowed), args)
        save_new(dump(dict(state_dict=weights, meta=meta)), args.dst)
    except (LaunchError, OSError) as error:
        raise SystemExit(f'error: {error}') from None
    print(f'{"checkpoint":<10} {args.dst}, {len(weights)} entries')
    report('unused', 'of SRC, which the network has no place for', meta['unused'])
    report('missing', 'of the network, which SRC does not give', meta['missing'])


def dump(content: Any) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def save_new(content: bytes, path: Path) -> None:
    """Writes a file that was not there; an error leaves none behind.

    Raises:
        LaunchError: the file is there.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open('xb')
    except FileExistsError:
        raise LaunchError(f'{path} is there already: nothing is overwritten') from None
    try:
        with file:
            file.write(content)
    except BaseException:
        path.unlink()
        raise


def report(title: str, what: str, names: Iterable[str]) -> None:
    names = list(names)
    print(f'{title:<10} {len(names)} entries {what}')
    for name in names:
        print(f'{"":<10} {name}')
