"""Resolve the paths of data and look at the files there."""

from __future__ import annotations

import os
import os.path as osp
from collections.abc import Iterable

import numpy as np
from PIL import Image


def data_path(dataset: dict, value: str | None) -> str:
    """Return a path that a dataset's config gives relative to its ``data_root``; '' if it is remote."""
    path = osp.join(dataset.get('data_root') or '', value or '')
    return '' if '://' in path else osp.expanduser(path or '.')


def missing_files(paths: Iterable[str]) -> list[str]:
    """Return the paths that do not exist, by one listing of each folder: COCO has 118,287 files."""
    listings: dict = {}
    missing = []
    for path in paths:
        parent, name = osp.split(path)
        if parent not in listings:
            listings[parent] = set(os.listdir(parent or '.')) if osp.isdir(parent or '.') else set()
        if name not in listings[parent]:
            missing.append(path)
    return missing


def spread(total: int, number: int) -> list[int]:
    """Return at most ``number`` evenly spread positions in a sequence of length ``total``."""
    return sorted({round(i) for i in np.linspace(0, total - 1, number)}) if total else []


def image_size(path: str) -> tuple[int, int] | None:
    """Return the width and height of an image, rotated by its EXIF orientation; None if Pillow cannot read it."""
    try:
        with Image.open(path) as image:
            return image.size[::-1] if image.getexif().get(0x0112, 1) >= 5 else image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
