"""Makes a checkpoint of a training ready to be handed on: weights and meta alone, with the file's hash in its name.

DST.pth becomes DST-HASH.pth, HASH being the first eight digits of its SHA-256, which torch.hub and MMEngine compare on
a download. torch.load reads the result with weights_only=True and nothing allowed, so the hosts' inferencers do, too.
The hosts' own publish_model.py cannot read the checkpoint from PyTorch 2.6 on unless its check is turned off.

The weights are those of validation: with an EMAHook the averaged ones. The meta keeps the config as text, with the
paths in it, and the names of the classes.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from mmkron.engine.errors import LaunchError
from mmkron.engine.weights import dump, make_parser, parse, read_checkpoint, save_new


def publish(src: Path, dst: Path) -> Path:
    """Writes the checkpoint; returns its path.

    Args:
        src: a checkpoint of MMEngine's CheckpointHook.
        dst: the name to put the hash into.

    Raises:
        LaunchError: ``src`` is no such checkpoint, or the file to write is there.
        OSError: the file cannot be written.
    """
    checkpoint = read_checkpoint(src)
    parts = checkpoint if isinstance(checkpoint, dict) else {}
    lacking = [key for key in ('state_dict', 'meta') if not isinstance(parts.get(key), dict)]
    if lacking:
        raise LaunchError(f'SRC {src} must be a checkpoint of MMEngine; it lacks {" and ".join(lacking)}')
    content = dump(dict(meta=plain(checkpoint['meta']), state_dict=checkpoint['state_dict']))
    final = dst.with_name(f'{dst.stem}-{hashlib.sha256(content).hexdigest()[:8]}.pth')
    save_new(content, final)
    return final


def plain(value: Any) -> Any:
    """NumPy's arrays and scalars, such as a dataset's palette, as lists and numbers, which need no permission."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    return parse(make_parser(__doc__), argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        path = publish(args.src, args.dst)
    except (LaunchError, OSError, RecursionError) as error:
        raise SystemExit(f'error: {error}') from None
    print(f'{path}: {args.src.stat().st_size:,} -> {path.stat().st_size:,} bytes')


if __name__ == '__main__':
    main()
