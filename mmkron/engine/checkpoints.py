"""Checkpoint files: read them without running code, check them before a run, and choose which one to resume from."""

from __future__ import annotations

import os
import os.path as osp
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint
from mmengine.utils import digit_version

from mmkron.engine.errors import LaunchError

# What MMEngine needs from a checkpoint to resume from it; CheckpointHook(save_optimizer=False) leaves out the rest.
RESUMED = ('state_dict', 'message_hub', 'meta')
# PyTorch's messages for content that could run code. All other errors come from damaged files.
_REFUSED = re.compile('GLOBAL|reduce|Can only (create|build)|attribute .* is not part')


class DamagedError(LaunchError):
    """Error for a checkpoint that cannot be read completely, as after an interrupted write."""


# ------------------------------------------------------------------------------------------------- safe loading


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


def refusal(error: BaseException) -> str:
    """Return why PyTorch's check refused a file, or an empty string if the error has another cause."""
    if not isinstance(error, pickle.UnpicklingError):
        return ''
    # The text of the outer error says how to turn the check off, which is no advice to pass on.
    reason = str(error.__context__ or error).split(' Please use')[0].strip()
    return reason if _REFUSED.search(reason) else ''


# ------------------------------------------------------------------------------------------------------- checks


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
        DamagedError: If the file cannot be read completely.
        LaunchError: If the file contains more than weights and MMEngine's own records.
    """
    path = os.fspath(path)
    try:
        with safe_loading():
            if '://' in path:
                return checkpoint.CheckpointLoader.load_checkpoint(path, map_location='cpu')
            _compare_checksums(path)
            return torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # a damaged file can make the reader raise anything
        reason = refusal(error)
        if reason:
            raise LaunchError(
                f"{argument} {path} is refused: it holds more than weights and MMEngine's own records, and reading "
                f'that could run code. {reason}'
            ) from error
        reason = ' '.join(str(error).split())
        if not reason or 'weights_only' in reason or 'Weights only' in reason:
            reason = 'it has no content that PyTorch reads without running code'
        raise DamagedError(f'{argument} {path} is damaged or cut off: {type(error).__name__}: {reason:.300}') from error


def _compare_checksums(path: str) -> None:
    with open(path, 'rb') as file:
        if file.read(4) != b'PK\3\4':
            return
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if record.file_size]
        broken = [record.filename for record in records if not _is_whole(archive, record)]
    # All of them: the file was written with torch.serialization.set_crc32_options(False).
    if 0 < len(broken) < len(records):
        raise zipfile.BadZipFile(f'the checksum of {broken[0]} is wrong')


def _is_whole(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(record) as file:
            while file.read(2**20):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def state_dict_of(content: Any, source: str) -> dict:
    """Return the weights of a checkpoint, itself or its ``state_dict``; raise LaunchError if they are not a dict."""
    weights = content.get('state_dict', content) if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise LaunchError(f'{source} holds no weights: it must be a state dict, or have one under state_dict')
    return weights


def read_load_from(cfg: Config, argument: str) -> Any:
    """Read ``cfg.load_from``, named ``argument`` in errors; return None if it is unset, remote or a folder.

    MMEngine reads the file again, so this adds the time of one :func:`read_whole` to the start.

    Raises:
        LaunchError: If the file is missing, damaged or refused.
    """
    path = cfg.get('load_from')
    if path is None or '://' in path or osp.isdir(path):
        return None
    return read_whole(checkpoint_path(path, argument), argument)


def check_checkpoints(cfg: Config) -> Any:
    """Find the checkpoint to resume from, and read the local file that a training starts from.

    With ``cfg.resume`` but without ``cfg.load_from``, sets ``cfg.load_from`` by :func:`newest_checkpoint`, or
    ``cfg.resume`` to False if there is no checkpoint.

    Returns:
        The content of ``cfg.load_from``; None if there is none, or it is remote or a folder with one file per process.

    Raises:
        LaunchError: If a file is missing, damaged or refused, or has no state to resume from.
    """
    if not cfg.get('resume'):
        return read_load_from(cfg, 'load_from')
    if cfg.get('load_from') is None:
        cfg.load_from, content = newest_checkpoint(cfg)
        cfg.resume = cfg.load_from is not None
    else:
        content = read_load_from(cfg, '--resume')
        lacking = [] if content is None else _lacking(content)
        if lacking:
            raise LaunchError(
                f'--resume {cfg.load_from}: it has no {", ".join(lacking)} to resume from; to '
                f'start from its weights set load_from={cfg.load_from!r} in the config'
            )
    if content is not None and 'optimizer' not in content:
        print(f'--resume {cfg.load_from}: it has no state of the optimizer, which starts from scratch', flush=True)
    return content


def _lacking(content: Any) -> list[str]:
    """Return which parts of a checkpoint to resume from are missing or not what MMEngine writes."""
    content = content if isinstance(content, dict) else {}
    lacking = [key for key in RESUMED if not isinstance(content.get(key), dict)]
    meta = {} if 'meta' in lacking else content['meta']
    return lacking + [f'meta.{key}' for key in ('epoch', 'iter') if meta and not isinstance(meta.get(key), int)]


# ------------------------------------------------------------------------------------------------------- resuming


def newest_checkpoint(cfg: Config) -> tuple[str | None, Any]:
    """Read the newest complete checkpoint of ``cfg.work_dir``, and print which ones were skipped and why.

    The one named in MMEngine's ``last_checkpoint`` is tried first, then the others from newest to oldest.

    Returns:
        The path and the content; the content of a folder with one file per process is None. (None, None) if there is no
        checkpoint, so that training starts from the beginning.

    Raises:
        LaunchError: If no checkpoint there is complete, or one is refused.
    """
    paths = _candidates(cfg)
    for path in paths:
        try:
            content = None if osp.isdir(path) else read_whole(path, 'checkpoint')
            lacking = [] if content is None else _lacking(content)
            if lacking:
                raise DamagedError(f'checkpoint {path} has no {", ".join(lacking)}')
        except DamagedError as error:
            print(f'--resume skips {error}', flush=True)
        else:
            print(f'--resume continues from {path}', flush=True)
            return path, content
    if paths:
        raise LaunchError(
            f'--resume: none of the {len(paths)} checkpoints in {cfg.work_dir} loads whole; remove them to start from '
            'the beginning'
        )
    print(f'--resume: no checkpoint in {cfg.work_dir}, so the training starts from the beginning', flush=True)
    return None, None


def _candidates(cfg: Config) -> list[str]:
    """Return the checkpoints of ``cfg.work_dir`` in the order in which they are tried."""
    hook = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    folders = [cfg.work_dir]
    if hook.get('out_dir'):
        folders.append(osp.join(str(hook['out_dir']), osp.basename(cfg.work_dir.rstrip(osp.sep))))
    named = None
    try:
        with open(osp.join(cfg.work_dir, 'last_checkpoint'), encoding='utf-8') as file:
            last = file.read().strip()
    except (OSError, UnicodeDecodeError):
        last = ''
    if last:  # written as seen from the folder where the training started, which may have moved since
        places = (last, *(osp.join(folder, osp.basename(last)) for folder in folders))
        named = next(filter(osp.exists, places), None)
        if named is None:
            print(f'--resume skips {last}, which last_checkpoint names: there is no such file', flush=True)
        else:
            folders.append(osp.dirname(named) or '.')
    found: dict[str, str] = {}
    for folder in filter(osp.isdir, folders):
        for path in (osp.join(folder, name) for name in sorted(os.listdir(folder))):
            if path.endswith('.pth') and not osp.basename(path).startswith('best_') and osp.isfile(path):
                found.setdefault(osp.realpath(path), path)
    if named is not None:
        found.pop(osp.realpath(named), None)
    paths = sorted(found.values(), key=osp.getmtime, reverse=True)
    return paths if named is None else [named, *paths]
