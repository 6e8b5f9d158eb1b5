"""Test a checkpoint with a config of MMPretrain, MMSegmentation or MMDetection."""

from __future__ import annotations

import argparse
import os.path as osp
import sys
from copy import deepcopy
from pathlib import Path

from mmengine.config import Config, ConfigDict

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from mmkron import data_checks
from mmkron.data_checks.common import leaf_datasets, type_name
from mmkron.engine import runner as launch
from mmkron.engine.checkpoints import read_load_from
from mmkron.engine.console import StartSummaryHook
from mmkron.utils import cli
from mmkron.utils.errors import LaunchError
from mmkron.utils.fit import check_fit
from mmkron.utils.weights import checkpoint_path

TTA_MODELS = dict(
    mmpretrain=dict(type='mmpretrain.AverageClsScoreTTA'),
    mmdet=dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)),
)
TTA_META_KEYS = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction')


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_common_arguments(parser)
    parser.add_argument('checkpoint', help='checkpoint file or URL')
    parser.add_argument('--out', help='.pkl file for the predictions; with MMSegmentation a folder for label maps')
    parser.add_argument(
        '--allow-partial', action='store_true', help='accept a checkpoint that does not set all tensors of the model'
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help='use test-time augmentation: tta_model and tta_pipeline of the config; default: flip (not mmseg)',
    )
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument('--show-dir', help='folder for images with the predictions')
    parser.add_argument(
        '--wait-time', type=float, default=2, help='seconds for which --show shows an image; default: %(default)s'
    )
    return parser.parse_args(argv)


def test(args: argparse.Namespace) -> dict:
    """Test a checkpoint with a config, and return the metrics.

    Raises:
        LaunchError: An argument does not fit the config, or a file, data or a package is missing.
    """
    cfg = merge_args(cli.load_config(args), args)
    data_checks.run(cfg, args.config, ('test',))
    content = read_load_from(cfg, 'checkpoint')
    results = {'--work-dir': cfg.work_dir, '--show-dir': args.show_dir, '--out': args.out}
    for argument, path in results.items():
        if path is not None:
            cli.check_writable(path, argument, is_file=argument == '--out' and cfg.get('default_scope') != 'mmseg')
    with launch.environment(cfg, args):
        runner = launch.build_runner(cfg)
        hint = 'use --allow-partial to test it nevertheless'
        check_fit(runner.model, cfg.load_from, content, 'checkpoint', whole=not args.allow_partial, hint=hint)
        del content
        runner.register_hook(StartSummaryHook())
        metrics = runner.test()
        if args.show_dir is not None:
            runner.logger.info(f'images with the predictions are in {osp.abspath(args.show_dir)}')
        if args.out is not None:
            runner.logger.info(f'predictions are in {args.out if "://" in args.out else osp.abspath(args.out)}')
    return metrics


def merge_args(cfg: Config, args: argparse.Namespace) -> Config:
    """Merge the arguments into a config, and return it.

    Raises:
        LaunchError: The config has no part that an argument needs, or the checkpoint is missing.
    """
    cli.check_sections(cfg, args.config, ('test_dataloader', 'test_evaluator', 'test_cfg'))
    cfg.load_from = checkpoint_path(args.checkpoint, 'checkpoint')
    cfg.resume = False
    if args.show or args.show_dir is not None:
        _show_predictions(cfg, args)
    if args.tta:
        _augment_at_test_time(cfg)
    if args.out is not None:
        _save_predictions(cfg, args.out)
    return cfg


def _show_predictions(cfg: Config, args: argparse.Namespace) -> None:
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
    """Wrap the model in ``tta_model`` and read by ``tta_pipeline``; flip by default, except with mmseg."""
    datasets = [dataset for _, dataset in leaf_datasets(cfg.test_dataloader.get('dataset'), '')]
    scope = cfg.get('default_scope')
    if scope in TTA_MODELS:
        cfg.setdefault('tta_model', deepcopy(TTA_MODELS[scope]))
        pipeline = next((dataset.pipeline for dataset in datasets if dataset.get('pipeline')), None)
        if cfg.get('tta_pipeline') is None and pipeline is not None:
            pack = deepcopy(pipeline[-1])
            if scope == 'mmdet':  # merging flips the boxes back, so it has to know which image was flipped
                pack = dict(type='PackDetInputs', meta_keys=TTA_META_KEYS)
            flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
            augment = dict(type='TestTimeAug', transforms=[flips, [pack]])
            cfg.tta_pipeline = [*deepcopy(pipeline[:-1]), augment]
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


def main(argv: list[str] | None = None) -> None:
    cli.main(test, parse_args(argv))


if __name__ == '__main__':
    main()
