"""Merge the arguments of ``tools/train.py`` and ``tools/test.py`` into a config, as the scripts of each host do."""

from __future__ import annotations

import os.path as osp
from argparse import Namespace
from copy import deepcopy

import torch
from mmengine.config import Config, ConfigDict

from mmkron.data_checks.common import leaf_datasets, type_name
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
    _check_sections(cfg, args.config, ('train_dataloader', 'train_cfg', 'optim_wrapper'))
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


def merge_test_args(cfg: Config, args: Namespace) -> Config:
    """Merge the arguments of ``tools/test.py`` into a config, and return it.

    Raises:
        LaunchError: The config has no part that an argument needs, or the checkpoint is missing.
    """
    merge_common_args(cfg, args)
    _check_sections(cfg, args.config, ('test_dataloader', 'test_evaluator', 'test_cfg'))
    cfg.load_from = checkpoint_path(args.checkpoint, 'checkpoint')
    cfg.resume = False
    if args.show or args.show_dir is not None:
        _show_predictions(cfg, args)
    if args.tta:
        _augment_at_test_time(cfg)
    if args.out is not None:
        _save_predictions(cfg, args.out)
    return cfg


def _check_sections(cfg: Config, config: str, keys: tuple[str, ...]) -> None:
    missing = [key for key in keys if cfg.get(key) is None]
    if missing:
        raise LaunchError(f'config {config!r} has no {", ".join(missing)}')


def _show_predictions(cfg: Config, args: Namespace) -> None:
    """Turn on the visualization hook of the host, with ``args.show_dir`` itself as the folder for images."""
    scope = cfg.get('default_scope')
    hook = (cfg.get('default_hooks') or {}).get('visualization')
    if hook is None:
        raise LaunchError('--show and --show-dir need default_hooks.visualization in the config')
    if scope not in ('mmseg', 'mmdet'):
        if args.tta:
            raise LaunchError('--show and --show-dir cannot be combined with --tta: the hook draws a single view')
        hook.update(enable=True, show=args.show, wait_time=args.wait_time, out_dir=args.show_dir, interval=1)
        return
    hook.draw = True
    if args.show:
        hook.update(show=True, wait_time=args.wait_time)
    if args.show_dir is not None and scope == 'mmdet':
        hook.test_out_dir = osp.abspath(args.show_dir)  # the hook puts a relative path below the folder of the log
    elif args.show_dir is not None:
        if args.show or cfg.get('visualizer') is None:
            raise LaunchError('--show-dir needs a visualizer in the config and cannot be combined with --show')
        backends = cfg.visualizer.get('vis_backends') or ()
        own = ConfigDict(type='LocalVisBackend', img_save_dir=osp.abspath(args.show_dir))
        cfg.visualizer.vis_backends = [*(part for part in backends if type_name(part) != own.type), own]
        hook.setdefault('interval', 1)  # the default of the hook draws one image in 50


def _augment_at_test_time(cfg: Config) -> None:
    """Wrap the model in ``tta_model`` and read by ``tta_pipeline``; both default to flipping with MMPretrain."""
    datasets = [dataset for _, dataset in leaf_datasets(cfg.test_dataloader.get('dataset'), '')]
    if cfg.get('default_scope') == 'mmpretrain':
        cfg.setdefault('tta_model', dict(type='mmpretrain.AverageClsScoreTTA'))
        pipeline = next((dataset.pipeline for dataset in datasets if dataset.get('pipeline')), None)
        if cfg.get('tta_pipeline') is None and pipeline is not None:
            flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
            transforms = [flips, [deepcopy(pipeline[-1])]]
            cfg.tta_pipeline = [*deepcopy(pipeline[:-1]), dict(type='TestTimeAug', transforms=transforms)]
    if cfg.get('tta_model') is None or cfg.get('tta_pipeline') is None:
        raise LaunchError('--tta needs tta_model and tta_pipeline in the config')
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    for dataset in datasets:
        dataset.pipeline = deepcopy(cfg.tta_pipeline)


def _save_predictions(cfg: Config, out: str) -> None:
    """Write the predictions to a file, or the label maps to a folder with MMSegmentation."""
    evaluator = cfg.test_evaluator
    nested = isinstance(evaluator, dict) and 'metrics' in evaluator
    metrics = evaluator.metrics if nested else evaluator
    metrics = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    if cfg.get('default_scope') == 'mmseg':
        # Only one metric writes: two would write files of the same names, perhaps with other label ids.
        writer = next((m for m in metrics if type_name(m) in ('IoUMetric', 'CityscapesMetric')), metrics[0])
        writer.update(output_dir=out, keep_results=True)
        return
    if not out.endswith(('.pkl', '.pickle')):
        raise LaunchError(f'--out must end in .pkl or .pickle, got {out!r}')
    dump = 'DumpDetResults' if cfg.get('default_scope') == 'mmdet' else 'DumpResults'
    metrics.append(dict(type=dump, out_file_path=out))
    if nested:
        evaluator.metrics = metrics
    else:
        cfg.test_evaluator = metrics
