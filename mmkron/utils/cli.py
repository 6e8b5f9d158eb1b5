"""The options that the tools share, what they change in a config, and the exit code of an error."""

from __future__ import annotations

import argparse
import os
import os.path as osp
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from tempfile import TemporaryFile
from typing import Any

import torch
from mmengine.config import Config, DictAction

from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import checkpoint_path

_LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
_SECTIONS = ('auto_scale_lr', 'default_hooks', 'model', 'optim_wrapper', 'test_cfg', 'train_cfg', 'val_cfg', *_LOADERS)
_LOCAL_RANKS = ('LOCAL_RANK', 'SLURM_LOCALID', 'OMPI_COMM_WORLD_LOCAL_RANK')


def add_common_arguments(parser: argparse.ArgumentParser, distributed: bool = True) -> None:
    """Add the options that all tools share.

    Args:
        parser: The parser of the tool. The config is its first positional argument.
        distributed: Whether the tool has a work dir and may run in several processes.
    """
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='override settings of the config: a.b=1 a.c="[1,2]" a.0.d=x; a value must not contain white space',
    )
    if not distributed:
        parser.set_defaults(launcher='none', local_rank=0, work_dir=None)
        return
    parser.add_argument(
        '--work-dir', help='folder for logs and results; default: work_dir of the config, else work_dirs/CONFIG_NAME'
    )
    launchers = ['none', 'pytorch', 'slurm', 'mpi']
    parser.add_argument('--launcher', choices=launchers, default='none', help='launcher of a distributed run')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def load_config(args: Namespace) -> Config:
    """Load the config of a tool, and merge the options that all tools share.

    An error in the code of the config is raised as it is: its traceback names the file and the line.

    Raises:
        LaunchError: The config is missing, or see :func:`merge_common_args`.
    """
    if not osp.isfile(args.config):
        raise LaunchError(f'config is not a file: {args.config!r} (looked for {osp.abspath(args.config)})')
    return merge_common_args(Config.fromfile(args.config), args)


def merge_common_args(cfg: Config, args: Namespace) -> Config:
    """Merge the options that all tools share into a config, and return it.

    Raises:
        LaunchError: An option does not fit the config, it has no model, or a section of it is not a dict.
    """
    try:
        cfg.merge_from_dict(args.cfg_options or {})
    except (KeyError, TypeError) as error:
        raise LaunchError(f'--cfg-options does not fit the config: {error}') from error
    for key in _SECTIONS:
        if not isinstance(cfg.get(key) or {}, dict):
            raise LaunchError(f'config {args.config!r}: {key} must be a dict, got {cfg[key]!r:.200}')
    if not (cfg.get('model') or {}).get('type'):
        raise LaunchError(f'config {args.config!r} has no model: it needs model=dict(type=...)')
    cfg.launcher = args.launcher
    name = osp.splitext(osp.basename(args.config))[0]
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or osp.join('work_dirs', name)
    for loader in filter(None, map(cfg.get, _LOADERS)):
        if cfg.get('default_scope') == 'mmpretrain':  # as MMPretrain's own scripts do
            loader.setdefault('collate_fn', dict(type='default_collate'))
            loader.setdefault('persistent_workers', True)
            loader.setdefault('pin_memory', torch.cuda.is_available())
        if not loader.get('num_workers'):
            loader.persistent_workers = False  # PyTorch refuses it without workers
    return cfg


def load_model_config(args: Namespace) -> Config:
    """Load the config of a tool that builds a model, with ``load_from`` of its checkpoint.

    Args:
        args: The arguments of the tool; ``checkpoint`` is a path, a URL, or None or ``'none'`` for initial weights.

    Raises:
        LaunchError: See :func:`load_config`, or the checkpoint cannot be found.
    """
    cfg = load_config(args)
    cfg.load_from = None if args.checkpoint in (None, 'none') else checkpoint_path(args.checkpoint, 'checkpoint')
    return cfg


def check_sections(cfg: Config, config: str, keys: tuple[str, ...]) -> None:
    """Raise LaunchError if a config has no section of one of these names."""
    missing = [key for key in keys if cfg.get(key) is None]
    if missing:
        raise LaunchError(f'config {config!r} has no {", ".join(missing)}')


def check_writable(path: str, argument: str, is_file: bool = False) -> None:
    """Create the folder of a local path; raise LaunchError if the path cannot be written."""
    if '://' in path:
        return
    folder = osp.dirname(path) or '.' if is_file else path
    try:
        os.makedirs(folder, exist_ok=True)
        TemporaryFile(dir=folder).close()
        if is_file and osp.exists(path):
            open(path, 'ab').close()
    except OSError as error:
        raise LaunchError(f'{argument} {path!r} cannot be written: {error.strerror}') from error


def main(run: Callable[[Namespace], Any], args: Namespace) -> None:
    """Call ``run(args)`` as a program: a LaunchError ends it with its message and exit code 1.

    Only the first process on a machine prints and warns.
    """
    first = all(os.environ.get(name, '0') == '0' for name in _LOCAL_RANKS)
    with ExitStack() as stack:
        if not first:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, 'w'))))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter('ignore')
        try:
            run(args)
        except LaunchError as error:
            if first:
                raise SystemExit(f'error: {error}') from None
            time.sleep(3)  # torch.distributed.run kills all processes when one ends; let the first one print
            raise SystemExit(1) from None
