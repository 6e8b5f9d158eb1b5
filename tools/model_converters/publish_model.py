"""Write a checkpoint that can be published: weights and meta only, with the hash of the file in its name.

    python tools/model_converters/publish_model.py work_dirs/NAME/epoch_10.pth NAME.pth

DST.pth becomes DST-HASH.pth, where HASH is the first eight digits of its SHA-256, which torch.hub and MMEngine compare
after a download. A new training writes such a file itself with ``CheckpointHook(published_keys=['meta',
'state_dict'])``; this tool is for checkpoints that exist, and turns NumPy values of the meta into lists and numbers, so
that torch.load reads the file with ``weights_only=True`` and nothing else allowed.

The weights are the ones that validation uses: with an EMAHook the averaged ones.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from common import make_parser, parse, read_file, serialize, write_new
from mmkron.utils.errors import LaunchError


def publish(src: Path, dst: Path) -> Path:
    """Write the checkpoint ``src`` without its training state, and return the path, ``dst`` with a hash."""
    checkpoint = read_file(src)
    parts = checkpoint if isinstance(checkpoint, dict) else {}
    missing = [key for key in ('state_dict', 'meta') if not isinstance(parts.get(key), dict)]
    if missing:
        raise LaunchError(f'SRC {src} must be a checkpoint of MMEngine; it has no {" and no ".join(missing)}')
    content = serialize(dict(meta=to_plain(checkpoint['meta']), state_dict=checkpoint['state_dict']))
    path = dst.with_name(f'{dst.stem}-{hashlib.sha256(content).hexdigest()[:8]}.pth')
    write_new(path, content)
    return path


def to_plain(value: Any) -> Any:
    """Return ``value`` with NumPy arrays and scalars as lists and numbers."""
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_plain, value))
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
