"""Train a model with a config of MMPretrain, MMSegmentation or MMDetection."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmengine.config import Config
from mmengine.runner import Runner

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from mmkron import data_checks
from mmkron.data_checks.common import type_name
from mmkron.engine import runner as launch
from mmkron.engine.checkpoints import check_checkpoints
from mmkron.engine.console import StartSummaryHook
from mmkron.engine.hooks.schedule import START_FROM_WEIGHTS, FollowConfigHook
from mmkron.utils import cli
from mmkron.utils.errors import LaunchError
from mmkron.utils.fit import check_fit, watch_pretrained
from mmkron.utils.weights import checkpoint_path


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_common_arguments(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='PATH',
        help='resume from PATH, or from the latest checkpoint in the work dir',
    )
    parser.add_argument('--amp', action='store_true', help='train with automatic mixed precision')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='multiply the learning rate by the total batch size over auto_scale_lr.base_batch_size',
    )
    parser.add_argument('--no-validate', action='store_true', help='do not evaluate during training')
    return parser.parse_args(argv)


def train(args: argparse.Namespace) -> Runner:
    """Train the model of a config, and return the runner after the last epoch.

    Raises:
        LaunchError: An argument does not fit the config, or a file, data or a package is missing.
    """
    cfg = merge_args(cli.load_config(args), args)
    data_checks.run(cfg, args.config, ('train', 'val'))
    content = check_checkpoints(cfg)
    cli.check_writable(cfg.work_dir, '--work-dir')
    with launch.environment(cfg, args):
        runner = launch.build_runner(cfg)
        runner.register_hook(FollowConfigHook())
        runner.register_hook(StartSummaryHook())
        # A resumed training needs each tensor, another one some of the backbone.
        argument, whole = ('--resume', True) if cfg.get('resume') else ('load_from', False)
        check_fit(runner.model, cfg.get('load_from'), content, argument, whole, hint=START_FROM_WEIGHTS)
        del content  # it is as large as the model and its optimizer
        watch_pretrained(runner.model)  # only now: the first load that it sees must be the one of init_weights
        try:
            runner.train()
        finally:
            for hook in runner.hooks:
                if hasattr(hook, 'restore_handlers'):  # of signals; MMEngine calls no hook after an error
                    hook.restore_handlers()
    return runner


def merge_args(cfg: Config, args: argparse.Namespace) -> Config:
    """Merge the arguments into a config, and return it.

    Raises:
        LaunchError: The config has no part that an argument needs, or a checkpoint is missing.
    """
    cli.check_sections(cfg, args.config, ('train_dataloader', 'train_cfg', 'optim_wrapper'))
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


def main(argv: list[str] | None = None) -> None:
    cli.main(train, parse_args(argv))


if __name__ == '__main__':
    main()
