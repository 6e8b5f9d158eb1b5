"""Checkpoints that are either whole or not there."""

from __future__ import annotations

import os
import os.path as osp
import re
import shutil
from typing import Any

from mmengine.dist import barrier, is_main_process
from mmengine.fileio.backends import LocalBackend
from mmengine.hooks import CheckpointHook as MMEngineCheckpointHook

from mmkron.engine.errors import LaunchError
from mmkron.registry import HOOKS

PARTIAL = '.partial'
INTERRUPTED = 'interrupted_iter_{}.pth'
# What a killed process leaves of a file that it was writing. Names by a filename_tmpl are replaced when they recur.
_WRITTEN = re.compile(r'((best_.+_|interrupted_)?(epoch|iter)_\d+\.pth|last_checkpoint)' + re.escape(PARTIAL))


@HOOKS.register_module()
class CheckpointHook(MMEngineCheckpointHook):
    """MMEngine's hook, except that a kill or a full disk costs no checkpoint that is already there.

    A checkpoint is written as ``NAME.partial`` and gets its name when it is complete. What it replaces, by
    ``max_keep_ckpts`` or as the best, is removed after that, so the disk needs room for one checkpoint more. Nothing is
    removed from another folder, as that of the training from which this one goes on. The ``interrupted_iter_*.pth`` of
    :class:`ResumeHook` goes with the next regular checkpoint. All of this holds for local folders; object stores write
    whole files anyway. Arguments: those of MMEngine's hook.

    Raises:
        LaunchError: A checkpoint cannot be written; the message has the file and the reason.
    """

    def before_train(self, runner: Any) -> None:
        super().before_train(runner)
        if type(self.file_backend) is not LocalBackend:
            return
        self.file_backend = _LateRemoval(self.out_dir)
        if getattr(self, 'best_ckpt_path', None):
            self.best_ckpt_path = self._here(self.best_ckpt_path)
        best = getattr(self, 'best_ckpt_path_dict', {})
        best.update({key: self._here(path) for key, path in best.items() if path})
        if is_main_process() and osp.isdir(self.out_dir):
            for name in os.listdir(self.out_dir):
                path = osp.join(self.out_dir, name)
                if _WRITTEN.fullmatch(name) and (osp.isfile(path) or hasattr(runner, 'strategy')):
                    _remove(path)

    def _here(self, path: str) -> str:
        """Where a file lies now whose folder has moved."""
        moved = osp.join(self.out_dir, osp.basename(path))
        return moved if osp.exists(moved) else path

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict) -> None:
        super()._save_checkpoint_with_step(self._whole(runner), step, meta)
        self._tidy()
        if is_main_process() and isinstance(self.file_backend, _LateRemoval):
            for name in os.listdir(self.out_dir):
                if re.fullmatch(INTERRUPTED.format(r'\d+'), name):
                    _remove(osp.join(self.out_dir, name))

    def _save_best_checkpoint(self, runner: Any, metrics: dict) -> None:
        super()._save_best_checkpoint(self._whole(runner), metrics)
        self._tidy()

    def _whole(self, runner: Any) -> Any:
        local = isinstance(self.file_backend, _LateRemoval)
        return _WholeFiles(runner) if local and not isinstance(runner, _WholeFiles) else runner

    def _tidy(self) -> None:
        if not isinstance(self.file_backend, _LateRemoval):
            return
        best = (getattr(self, 'best_ckpt_path', None), *getattr(self, 'best_ckpt_path_dict', {}).values())
        self.file_backend.remove_now(keep=(self.last_ckpt, *best))


class _LateRemoval(LocalBackend):
    """Keeps what is to be removed until what replaces it is there, and for good what is in another folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = osp.realpath(folder)
        self._paths: list[str] = []

    def remove(self, filepath: str) -> None:
        if osp.realpath(osp.dirname(filepath)) == self._folder:
            self._paths.append(str(filepath))

    rmtree = remove

    def remove_now(self, keep: tuple) -> None:
        for path in self._paths:
            if path not in keep:
                _remove(path)
        self._paths.clear()


class _WholeFiles:
    """A runner for :class:`CheckpointHook`, which writes by :func:`save_whole`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        save_whole(self._runner, out_dir, filename, *args, **kwargs)


def save_whole(runner: Any, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
    """``runner.save_checkpoint``, in a local folder, with the name given to the file when it is complete.

    Raises:
        LaunchError: The file cannot be written.
    """
    path = osp.join(out_dir, filename)
    partial = path + PARTIAL
    try:
        runner.save_checkpoint(out_dir, filename + PARTIAL, *args, **kwargs)
        if hasattr(runner, 'strategy'):  # a FlexibleRunner, where every process may write a shard
            barrier()
        if is_main_process():
            _rename(partial, path)
    except OSError as error:
        if is_main_process():
            _remove(partial)
        free = shutil.disk_usage(out_dir).free // 2**20 if osp.isdir(out_dir) else 0
        raise LaunchError(
            f'checkpoint {path} cannot be written: {error.strerror or error} ({free:,} MiB are free there); the '
            'earlier ones are as they were, and --resume goes on from the last of them'
        ) from error


def write_last(work_dir: str, path: str) -> None:
    """Puts ``path`` into ``last_checkpoint``, where MMEngine looks for the one to resume from."""
    name = osp.join(work_dir, 'last_checkpoint')
    with open(name + PARTIAL, 'w', encoding='utf-8') as file:
        file.write(path)
    _rename(name + PARTIAL, name)


def _rename(source: str, target: str) -> None:
    if osp.isdir(source):  # shards, one file a process
        shutil.rmtree(target, ignore_errors=True)
    else:
        with open(source, 'rb') as file:
            os.fsync(file.fileno())  # a name that survives a power cut has to have content that does
    os.replace(source, target)


def _remove(path: str) -> None:
    if osp.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif osp.exists(path):
        os.remove(path)
