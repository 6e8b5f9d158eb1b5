"""Checkpoint files: read without running their code, checked before anything is built, and which one to resume from."""

from __future__ import annotations

import os
import os.path as osp
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint
from mmengine.utils import digit_version

from mmkron.engine.errors import LaunchError

# What MMEngine reads from a checkpoint to go on from, and what may lack: CheckpointHook(save_optimizer=False).
RESUMED = ('state_dict', 'message_hub', 'meta')
OPTIONAL = {'optimizer': 'the optimizer', 'param_schedulers': 'the schedules'}
_NO_PICKLE = ('Unsupported operand', 'String is too long', 'Ran out of input')


class DamagedError(LaunchError):
    """A checkpoint that does not load whole, as after a write that was cut off."""


# ------------------------------------------------------------------------------------------------- safe loading


def _history_attribute(owner: type, name: str) -> Any:
    # Stands in for `getattr`, with which MMEngine's checkpoints name HistoryBuffer's statistics. The real one would
    # open every attribute of every allowed object to a crafted file.
    if owner is HistoryBuffer and name in ('min', 'max', 'current', 'mean'):
        return getattr(owner, name)
    raise pickle.UnpicklingError(f'attribute {name!r} of {owner!r} is not part of a checkpoint of MMEngine')


def allow_checkpoint_globals() -> None:
    """Lets ``torch.load`` with ``weights_only=True``, the default from PyTorch 2.6 on, read MMEngine's checkpoints.

    Besides tensors they hold log histories and NumPy values. Anything else is still refused. Earlier versions of
    PyTorch do not check what MMEngine loads; nothing changes there.
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
    """Only what :func:`allow_checkpoint_globals` allows is read, on both stacks."""
    allow_checkpoint_globals()
    name = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
    before = os.environ.get(name)
    if hasattr(checkpoint, '_safe_torch_load'):
        # OneDL's MMEngine reads a file that the check refuses once more without it; torch can forbid that.
        os.environ[name] = '1'
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def refusal(error: pickle.UnpicklingError) -> str:
    """Why PyTorch's check refused a file; empty if it did not, or the file is no pickle at all."""
    if 'Weights only load failed' not in str(error):
        return ''
    # The text of the outer error says how to turn the check off, which is no advice to pass on.
    reason = str(error.__context__ or error).split(' Please use')[0].strip()
    return '' if any(text in reason for text in _NO_PICKLE) else reason


# ------------------------------------------------------------------------------------------------------- checks


def checkpoint_path(path: str, argument: str) -> str:
    """``path`` as it is; raises LaunchError, which calls it ``argument``, if it is local and no file."""
    if '://' not in path and not osp.isfile(path):
        raise LaunchError(f'{argument} is not a file: {path!r} (looked for {osp.abspath(path)})')
    return path


def read_whole(path: str, argument: str) -> Any:
    """The content of a local checkpoint on the CPU, every byte of it read.

    Raises:
        DamagedError: The file cannot be read, or not to its end.
        LaunchError: It holds more than weights and MMEngine's own records.
    """
    allow_checkpoint_globals()
    try:
        return torch.load(path, map_location='cpu', weights_only=True)
    except pickle.UnpicklingError as error:
        reason = refusal(error)
        if reason:
            raise LaunchError(
                f"{argument} {path} is refused: it holds more than weights and MMEngine's own records, and reading "
                f'that could run code. {reason}'
            ) from error
        raise DamagedError(f'{argument} {path} is no checkpoint that can be read: the file is damaged') from error
    except (OSError, RuntimeError, EOFError, ValueError, LookupError) as error:
        reason = ' '.join(str(error).split()) or 'the file is empty'
        raise DamagedError(f'{argument} {path} is damaged or cut off: {reason:.300}') from error


def pretrained(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields (dotted key, path) of the files that ``init_cfg=dict(type='Pretrained')`` names, below ``node``."""
    if isinstance(node, dict):
        path = node.get('checkpoint')
        if str(node.get('type')).rsplit('.', 1)[-1] == 'Pretrained' and isinstance(path, str):
            yield f'{key}.checkpoint', path
        for name, child in node.items():
            yield from pretrained(child, f'{key}.{name}')
    elif isinstance(node, (list, tuple)):
        for i, child in enumerate(node):
            yield from pretrained(child, f'{key}.{i}')


def check_pretrained(cfg: Config) -> None:
    """Reads the local files that the ``init_cfg`` of the model name, before anything is built.

    Raises:
        LaunchError: One is missing, damaged or refused.
    """
    for key, path in pretrained(cfg.get('model'), 'model'):
        if '://' not in path:
            read_whole(checkpoint_path(osp.expanduser(path), key), key)


def check_load_from(cfg: Config, argument: str) -> Any:
    """The content of ``cfg.load_from``, which the message calls ``argument``; None if that is unset or remote.

    MMEngine reads the file again, so this adds the time of one ``torch.load`` to the start.

    Raises:
        LaunchError: It is missing, damaged or refused.
    """
    path = cfg.get('load_from')
    return None if path is None or '://' in path else read_whole(checkpoint_path(path, argument), argument)


def check_checkpoints(cfg: Config) -> None:
    """Finds the checkpoint to resume from, and reads each local file that a training starts from.

    ``cfg.resume`` without ``cfg.load_from`` picks by :func:`newest_checkpoint`; then ``cfg.load_from`` is what it
    found, or ``cfg.resume`` is False.

    Raises:
        LaunchError: A file is missing, damaged or refused, or does not hold what a resumed training needs.
    """
    check_pretrained(cfg)
    if cfg.get('resume') and cfg.get('load_from') is None:
        cfg.load_from = newest_checkpoint(cfg)
        cfg.resume = cfg.load_from is not None
        return
    content = check_load_from(cfg, '--resume' if cfg.get('resume') else 'load_from')
    if not cfg.get('resume') or content is None:
        return
    lacking = _lacking(content)
    if lacking:
        raise LaunchError(
            f'--resume {cfg.load_from}: it lacks {", ".join(lacking)}, so it is no checkpoint to go on from; to start '
            f'from its weights set load_from={cfg.load_from!r} in the config'
        )
    _say_what_starts_anew(cfg, cfg.load_from, content)


def _lacking(content: Any) -> list[str]:
    present = content if isinstance(content, dict) else {}
    return [key for key in RESUMED if key not in present]


def _say_what_starts_anew(cfg: Config, path: str, present: Iterable[str]) -> None:
    """Says on stdout what a training by ``cfg`` misses in a checkpoint that holds ``present``."""
    used = [key for key in OPTIONAL if key != 'param_schedulers' or cfg.get('param_scheduler')]
    lacking = ' and '.join(OPTIONAL[key] for key in used if key not in present)
    if lacking:
        print(f'--resume {path}: it lacks the state of {lacking}, which starts anew', flush=True)


# ------------------------------------------------------------------------------------------------------- resuming


def newest_checkpoint(cfg: Config) -> str | None:
    """The newest checkpoint of ``cfg.work_dir`` that loads whole; says on stdout which were passed over and why.

    MMEngine's ``last_checkpoint`` names the one that was written last. It is taken unless it does not load whole, or a
    younger file has come further, as after a kill between the write of a checkpoint and that of ``last_checkpoint``.

    Returns:
        Its path; None if the folder has no checkpoint, so that a training starts from the beginning.

    Raises:
        LaunchError: None of the checkpoints there loads whole, or one is refused.
    """
    named, paths = _candidates(cfg)
    if named is not None and osp.isdir(named):  # shards, one file a process
        return named
    found: dict[str, int] = {}
    parts: dict[str, list] = {}
    passed, seen = 0, named is None
    for path in paths:
        seen = seen or path == named
        try:
            content = read_whole(path, 'checkpoint')
            lacking = _lacking(content)
            if lacking:
                raise DamagedError(f'checkpoint {path} lacks {", ".join(lacking)}')
            found[path], parts[path] = content['meta'].get('iter', 0), list(content)
        except DamagedError as error:
            print(f'--resume passes over {error}', flush=True)
            passed += 1
        if seen and found:
            break
    if not found and passed:
        raise LaunchError(
            f'--resume: none of the {passed} checkpoints in {cfg.work_dir} loads whole; remove them to start from the '
            'beginning'
        )
    if not found:
        print(f'--resume: no checkpoint in {cfg.work_dir}, so the training starts from the beginning', flush=True)
        return None
    # In the order of `paths`, the youngest first; `max` keeps the first of equals.
    best = max(found, key=found.__getitem__) if named in found else next(iter(found))
    print(f'--resume goes on from {best}', flush=True)
    _say_what_starts_anew(cfg, best, parts[best])
    return best


def _candidates(cfg: Config) -> tuple[str | None, list[str]]:
    """The path that ``last_checkpoint`` names, if that is there, and all paths, the youngest first."""
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
        for path in (last, *(osp.join(folder, osp.basename(last)) for folder in folders)):
            if osp.exists(path):
                named = path
                folders.append(osp.dirname(path) or '.')
                break
        else:
            print(f'--resume passes over {last}, which last_checkpoint names: there is no such file', flush=True)
    paths: dict[str, str] = {} if named is None else {osp.realpath(named): named}
    for folder in folders:
        for name in sorted(os.listdir(folder)) if osp.isdir(folder) else ():
            path = osp.join(folder, name)
            if name.endswith('.pth') and not name.startswith('best_') and osp.isfile(path):
                paths.setdefault(osp.realpath(path), path)
    return named, sorted(paths.values(), key=osp.getmtime, reverse=True)
