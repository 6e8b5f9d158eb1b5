"""Choose the checkpoint that a training starts or resumes from, and read it before anything is built."""

from __future__ import annotations

import logging
import os.path as osp
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.runner.checkpoint import find_latest_checkpoint

from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import checkpoint_path, read_whole

# What MMEngine needs from a checkpoint to resume from it; CheckpointHook(save_optimizer=False) leaves out the rest.
RESUMED = ('state_dict', 'message_hub', 'meta')


def read_load_from(cfg: Config, argument: str) -> Any:
    """Read ``cfg.load_from``, named ``argument`` in errors; return None if it is unset, remote or a folder.

    MMEngine reads the file again, so this adds the time of one :func:`read_whole` to the start.

    Raises:
        LaunchError: If the file is missing or unreadable.
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
        LaunchError: If a file is missing or unreadable, or has no state to resume from.
    """
    if not cfg.get('resume'):
        return read_load_from(cfg, 'load_from')
    if cfg.get('load_from') is None:
        cfg.load_from, content = newest_checkpoint(cfg)
        cfg.resume = cfg.load_from is not None
    else:
        content = read_load_from(cfg, '--resume')
        _check_resumable(content, cfg.load_from)
    if content is not None and 'optimizer' not in content:
        _log(f'{cfg.load_from} has no state of the optimizer, which starts from scratch', logging.WARNING)
    return content


def newest_checkpoint(cfg: Config) -> tuple[str | None, Any]:
    """Read the newest readable checkpoint of a training, and log which ones were skipped and why.

    The one named in MMEngine's ``last_checkpoint`` is tried first, also if its folder has moved, then the others in the
    work dir and in the folder of CheckpointHook from newest to oldest, except the best ones.

    Returns:
        The path and the content; the content of a folder with one file per process is None. (None, None) if there is no
        checkpoint, so that training starts from the beginning.

    Raises:
        LaunchError: If there are checkpoints, and none of them can be resumed from.
    """
    hook = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    folders = [cfg.work_dir]
    if hook.get('out_dir'):
        folders.append(osp.join(str(hook['out_dir']), osp.basename(cfg.work_dir.rstrip(osp.sep))))
    try:
        named = find_latest_checkpoint(cfg.work_dir) or ''
    except UnicodeDecodeError:
        named = ''
    named = '' if '\0' in named else named  # the file is damaged
    folders += [osp.dirname(named)] if osp.dirname(named) else []
    files = [file for folder in folders for file in Path(folder).glob('*.pth') if file.is_file()]
    files = sorted((file for file in files if not file.name.startswith('best_')), key=osp.getmtime, reverse=True)
    places = [named, *(osp.join(folder, osp.basename(named)) for folder in folders)] if named else []
    first = next(filter(osp.exists, places), named)
    reasons = []
    for path in dict.fromkeys(map(osp.realpath, filter(None, [first, *files]))):
        try:
            content = None if osp.isdir(path) else read_whole(checkpoint_path(path, 'last_checkpoint'), 'checkpoint')
            _check_resumable(content, path)
        except LaunchError as error:
            reasons.append(f'skipped: {error}')
            _log(reasons[-1], logging.WARNING)
        else:
            _log(f'continues from {path}')
            return path, content
    if files:
        raise LaunchError('\n'.join([f'--resume: no checkpoint in {cfg.work_dir} can be resumed from', *reasons]))
    _log(f'no checkpoint in {cfg.work_dir}, so the training starts from the beginning', logging.WARNING)
    return None, None


def _check_resumable(content: Any, path: str) -> None:
    """Raise LaunchError unless a content, or None for one that was not read, has what MMEngine resumes from."""
    if content is None:
        return
    lacking = [key for key in RESUMED if not isinstance(content, dict) or not isinstance(content.get(key), dict)]
    if not lacking:
        lacking = [f'meta.{key}' for key in ('epoch', 'iter') if not isinstance(content['meta'].get(key), int)]
    if lacking:
        raise LaunchError(
            f'--resume {path}: it has no {", ".join(lacking)} to resume from; to start from its weights set '
            f'load_from={path!r} in the config'
        )


def _log(message: str, level: int = logging.INFO) -> None:
    print_log(f'--resume: {message}', logger='current', level=level)
