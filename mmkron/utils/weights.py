"""Read files of weights without running code."""

from __future__ import annotations

import os
import os.path as osp
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint
from mmengine.utils import digit_version

from mmkron.utils.errors import LaunchError


class UnreadableError(LaunchError):
    """A checkpoint that is damaged, or that is refused because reading it could run code."""


def _history_attribute(owner: type, name: str) -> Any:
    # Stands in for `getattr`, with which MMEngine's checkpoints name HistoryBuffer's statistics. The real one would
    # open every attribute of every allowed object to a crafted file.
    if owner is HistoryBuffer and name in ('min', 'max', 'current', 'mean'):
        return getattr(owner, name)
    raise pickle.UnpicklingError(f'attribute {name!r} of {owner!r} is not part of a checkpoint of MMEngine')


def allow_checkpoint_globals() -> None:
    """Allow ``torch.load`` with ``weights_only=True``, the default since PyTorch 2.6, to read MMEngine's checkpoints.

    In addition to tensors they contain log histories and NumPy values. Anything else is still refused. Does nothing
    with earlier versions of PyTorch, which do not check files that MMEngine loads.
    """
    if digit_version(torch.__version__) < digit_version('2.6'):
        return
    reconstruct, scalar = np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]
    allowed = [HistoryBuffer, np.ndarray, np.dtype, (_history_attribute, 'builtins.getattr')]
    for module in ('numpy.core.multiarray', 'numpy._core.multiarray'):  # NumPy 1, NumPy 2
        allowed += [(reconstruct, f'{module}._reconstruct'), (scalar, f'{module}.scalar')]
    allowed += sorted({type(np.dtype(code)) for code in '?bhilqBHILQefdSU'}, key=str)
    torch.serialization.add_safe_globals(allowed)


@contextmanager
def safe_loading() -> Iterator[None]:
    """Restrict loading to types that :func:`allow_checkpoint_globals` allows, on both stacks."""
    allow_checkpoint_globals()
    name = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
    before = os.environ.get(name)
    if digit_version(torch.__version__) >= digit_version('2.6'):
        # Downloads by torch.hub, and what OneDL's MMEngine reads once more after a refusal, turn the check off.
        os.environ[name] = '1'
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def reason_of(error: Exception) -> str:
    """Return why PyTorch did not read a file, without its advice to turn the check off."""
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__
    reason = ' '.join(str(error).split()).split(' Please use')[0]
    if not reason or 'weights_only' in reason or 'Weights only' in reason:
        reason = 'it has no content that PyTorch reads without running code'
    return f'{type(error).__name__}: {reason:.300}'


def checkpoint_path(path: str, argument: str) -> str:
    """Return ``path``, or raise LaunchError, which names ``argument``, if it is local and not a file."""
    if '://' not in path and not osp.isfile(path):
        raise LaunchError(f'{argument} is not a file: {path!r} (looked for {osp.abspath(path)})')
    return path


def read_whole(path: str | os.PathLike, argument: str) -> Any:
    """Read a complete checkpoint to the CPU without running code.

    Archives of ``torch.save`` contain checksums, which ``torch.load`` does not compare but this function does, in half
    a second of CPU time per GB. The format before PyTorch 1.6 has no checksums.

    Args:
        path: A local file or a URL.
        argument: Name of the file's argument in error messages.

    Raises:
        UnreadableError: If the file is damaged, or contains more than weights and MMEngine's own records.
    """
    path = os.fspath(path)
    try:
        with safe_loading():
            if '://' in path:
                return checkpoint.CheckpointLoader.load_checkpoint(path, map_location='cpu')
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    has_sums = any(record.CRC for record in archive.infolist())  # PyTorch can leave them out
                    broken = archive.testzip() if has_sums else None
                if broken is not None:
                    raise zipfile.BadZipFile(f'the checksum of {broken} is wrong')
            return torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # a damaged file can make the reader raise anything
        raise UnreadableError(
            f"{argument} {path} is damaged, or refused because it holds more than weights and MMEngine's own records: "
            f'{reason_of(error)}'
        ) from error


def state_dict_of(content: Any, source: str) -> dict:
    """Return the weights of a checkpoint, itself or its ``state_dict``; raise LaunchError if they are not a dict."""
    weights = content.get('state_dict', content) if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise LaunchError(f'{source} holds no weights: it must be a state dict, or have one under state_dict')
    return weights
