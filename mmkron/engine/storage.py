"""Whole checkpoints: a storage backend of MMEngine that writes to a temporary file and renames it."""

from __future__ import annotations

import os
import os.path as osp
import shutil
from typing import ClassVar

from mmengine.fileio import register_backend
from mmengine.fileio.backends import LocalBackend

from mmkron.utils.errors import LaunchError

ATOMIC = dict(backend='atomic')
PARTIAL = '.partial'


class WriteError(LaunchError, OSError):
    """A checkpoint that cannot be written."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(
            f'checkpoint {path} cannot be written: {error.strerror or error}; the earlier ones are unharmed, and '
            '--resume continues from the last of them'
        )


class AtomicLocalBackend(LocalBackend):
    """Local files that are either whole or not there.

    A file is written as ``NAME.partial`` and renamed when it is complete and on the disk. What is removed stays until
    the next file in the same folder is written or removed, so that a kill or a full disk costs no checkpoint; the disk
    needs room for one checkpoint more. Nothing is removed from another folder, such as the work dir of an earlier
    training. Use it by ``CheckpointHook(backend_args=dict(backend='atomic'))``.
    """

    outdated: ClassVar[list[str]] = []  # of the process: MMEngine makes a backend per call

    def put(self, obj: bytes, filepath: str | os.PathLike) -> None:
        """Write ``obj`` to ``filepath``.

        Raises:
            ValueError: If ``filepath`` is a URL.
            WriteError: If the file cannot be written. What is there remains as it is.
        """
        path = os.fspath(filepath)
        if '://' in path:
            raise ValueError(
                f"backend 'atomic' writes local files, got {path!r}: set backend_args of CheckpointHook to None"
            )
        try:
            super().put(obj, path + PARTIAL)
            finish(path)
        except OSError as error:
            remove(path + PARTIAL)
            raise WriteError(path, error) from error

    def remove(self, filepath: str | os.PathLike) -> None:
        """Remove a file after the next one in its folder."""
        path = os.fspath(filepath)
        _remove_outdated(path)
        self.outdated.append(path)

    rmtree = remove


def finish(path: str) -> None:
    """Give a complete ``path.partial``, a file or a folder, its name, and remove what it replaces."""
    if osp.isdir(path + PARTIAL):  # one file per process
        shutil.rmtree(path, ignore_errors=True)
    else:
        with open(path + PARTIAL, 'rb') as file:
            os.fsync(file.fileno())  # a name that survives a power cut needs content that does
    os.replace(path + PARTIAL, path)
    _remove_outdated(path)


def _remove_outdated(path: str) -> None:
    for other in AtomicLocalBackend.outdated:
        if osp.realpath(osp.dirname(other)) == osp.realpath(osp.dirname(path)) and other != path:
            remove(other)
    AtomicLocalBackend.outdated.clear()


def remove(path: str) -> None:
    """Remove a file or a folder, if it is there."""
    if osp.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif osp.exists(path):
        os.remove(path)


register_backend('atomic', AtomicLocalBackend, force=True)
