"""Merge the arguments of the tools into a config, as the scripts of each host do."""

from __future__ import annotations

import os.path as osp
from argparse import Namespace

import torch
from mmengine.config import Config

from mmkron.data_checks.common import type_name
from mmkron.engine.checkpoints import checkpoint_path
from mmkron.engine.errors import LaunchError

_LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
_SECTIONS = ('auto_scale_lr', 'default_hooks', 'model', 'optim_wrapper', 'test_cfg', 'train_cfg', 'val_cfg', *_LOADERS)


def merge_common_args(cfg: Config, args: Namespace) -> None:
    """Merge the arguments that all tools share into a config.

    Raises:
        LaunchError: ``--cfg-options`` does not fit the config, a section of it is not a dict, or it has no model.
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
        if cfg.get('default_scope') == 'mmpretrain':
            loader.setdefault('collate_fn', dict(type='default_collate'))
            loader.setdefault('persistent_workers', True)
            loader.setdefault('pin_memory', torch.cuda.is_available())
        if not loader.get('num_workers'):
            loader.persistent_workers = False  # PyTorch refuses it without workers


def merge_train_args(cfg: Config, args: Namespace) -> Config:
    """Merge the arguments of ``tools/train.py`` into a config, and return it.

    Raises:
        LaunchError: The config has no part that an argument needs, or a checkpoint is missing.
    """
    merge_common_args(cfg, args)
    check_sections(cfg, args.config, ('train_dataloader', 'train_cfg', 'optim_wrapper'))
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if args.amp:
        kind = type_name(cfg.optim_wrapper) or 'OptimWrapper'
        if kind not in ('OptimWrapper', 'AmpOptimWrapper'):
            raise LaunchError(f"--amp needs optim_wrapper.type 'OptimWrapper' or 'AmpOptimWrapper', got {kind!r}")
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise LaunchError('--auto-scale-lr needs auto_scale_lr.base_batch_size in the config')
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else checkpoint_path(args.resume, '--resume')
    return cfg


def check_sections(cfg: Config, config: str, keys: tuple[str, ...]) -> None:
    """Raise LaunchError if a config has no section of one of these names."""
    missing = [key for key in keys if cfg.get(key) is None]
    if missing:
        raise LaunchError(f'config {config!r} has no {", ".join(missing)}')
