"""Train with a config of MMPretrain, MMSegmentation or MMDetection: load, merge, check, build, run."""

from __future__ import annotations

import logging
import os
import os.path as osp
import pickle
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from tempfile import TemporaryFile
from typing import Any

import torch
from mmengine.config import Config, ConfigDict
from mmengine.device import get_device
from mmengine.logging import MMLogger, print_log
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, RUNNERS, DefaultScope
from mmengine.runner import Runner
from torch import nn

from mmkron import data_checks
from mmkron.data_checks.common import type_name
from mmkron.engine.arguments import merge_common_args, merge_train_args
from mmkron.engine.checkpoints import check_checkpoints, checkpoint_path, refusal, safe_loading
from mmkron.engine.console import StartSummaryHook, quiet
from mmkron.engine.data_errors import NamedSamplesMixin
from mmkron.engine.errors import LaunchError, describe_config_error
from mmkron.engine.fit import check_fit, watch_pretrained
from mmkron.engine.hooks.schedule import START_FROM_WEIGHTS, FollowConfigHook
from mmkron.utils.collect_env import remedy_of

HOSTS = ('mmpretrain', 'mmseg', 'mmdet')


def train(args: Namespace) -> Runner:
    """Train the model of a config.

    Args:
        args: The arguments of ``tools/train.py``.

    Returns:
        The runner after the last epoch.

    Raises:
        LaunchError: An argument does not fit the config, or a file, data or a package is missing.
    """
    cfg = merge_train_args(load_config(args.config), args)
    check_data(cfg, args.config, ('train', 'val'))
    content = check_checkpoints(cfg)
    check_writable(cfg.work_dir, '--work-dir')
    with environment(cfg, args):
        runner = build_runner(cfg)
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


def load_config(path: str) -> Config:
    """Read a config file.

    Raises:
        LaunchError: The file, or one that it is based on or imports, is missing or damaged, or its code fails. The
            message has the file and the line.
    """
    if not osp.isfile(path):
        raise LaunchError(f'config is not a file: {path!r} (looked for {osp.abspath(path)})')
    try:
        return Config.fromfile(path)
    except Exception as error:  # a config is code, which can raise anything
        reason = describe_config_error(error)
        remedy = remedy_of(reason)
        raise LaunchError(f'config {path!r} cannot be read: {reason}' + (remedy and f'\n{remedy}')) from error


def load_model_config(args: Namespace) -> Config:
    """Load the config of a tool that builds a model, with the tool's options and ``load_from`` of its checkpoint.

    Args:
        args: The arguments of the tool; ``checkpoint`` is a path, a URL, or None or ``'none'`` for initial weights.

    Raises:
        LaunchError: An option does not fit the config, or the config or the checkpoint cannot be found.
    """
    cfg = load_config(args.config)
    merge_common_args(cfg, args)
    cfg.load_from = None if args.checkpoint in (None, 'none') else checkpoint_path(args.checkpoint, 'checkpoint')
    return cfg


def check_data(cfg: Config, config: str, splits: tuple[str, ...]) -> None:
    """Raise LaunchError with all problems of the data of some splits."""
    try:
        data_checks.run(cfg, config, splits)
    except data_checks.DataError as error:
        raise LaunchError(str(error)) from None


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


def check_hosts(cfg: Config) -> None:
    """Import the host libraries that a config names by its default scope or in the prefix of a type.

    Raises:
        LaunchError: One of them cannot be imported.
    """
    named = set(re.findall(r"'type': '(\w+)\.", str(cfg.to_dict())))
    named.add(cfg.get('default_scope'))
    for host in sorted(named.intersection(HOSTS)):
        try:
            import_module(f'{host}.models')
        except (ImportError, AssertionError) as error:  # the hosts assert the versions that they work with
            hint = remedy_of(error) or 'docs/install.md says how to install it'
            raise LaunchError(
                f'this config needs {host}, which cannot be imported: {error}\n{hint} (python -m mmkron reports what '
                'is installed)'
            ) from error


@contextmanager
def environment(cfg: Config, args: Namespace) -> Iterator[None]:
    """Set up and tear down the hosts, the process group, the default scope and the checks of what is unpickled.

    Raises:
        LaunchError: A host cannot be imported, or a file that the run reads is refused.
    """
    if args.launcher == 'pytorch':
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    check_hosts(cfg)
    opened = open_cpu_group(cfg)
    try:
        with safe_loading(), DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
            yield
        if opened:
            torch.distributed.barrier()  # the first process serves the store of the others, so they leave together
    except pickle.UnpicklingError as error:
        reason = refusal(error)
        if not reason:
            raise
        raise LaunchError(
            "a file that this run reads by torch.load is refused: it holds more than weights and MMEngine's own "
            f'records, and reading that could run code. {reason}'
        ) from error
    finally:
        if opened:
            torch.distributed.destroy_process_group()


def open_cpu_group(cfg: Config) -> bool:
    """Open a gloo process group on a machine without an accelerator, where MMEngine would ask for a CUDA device.

    Returns:
        Whether a group was opened, which the caller must close.

    Raises:
        LaunchError: The launcher, or the strategy of a FlexibleRunner, needs an accelerator.
    """
    if cfg.launcher == 'none' or get_device() != 'cpu':
        return False
    if cfg.launcher != 'pytorch':
        raise LaunchError(f'--launcher {cfg.launcher} needs an accelerator; without one use tools/dist_train.sh')
    if 'runner_type' in cfg:
        cfg.strategy = cfg.get('strategy') or ConfigDict(type='DDPStrategy')
        strategy = cfg.strategy  # the config stores a copy of what it is given
        devices = {'DDPStrategy': dict(device_ids=None, broadcast_buffers=False), 'FSDPStrategy': dict(device_id='cpu')}
        if type_name(strategy) not in devices:
            raise LaunchError(f'strategy.type {strategy.type!r} needs an accelerator')
        strategy.model_wrapper = ConfigDict({**devices[type_name(strategy)], **(strategy.get('model_wrapper') or {})})
    torch.distributed.init_process_group('gloo')
    return True


class LaunchRunner(NamedSamplesMixin, Runner):
    """MMEngine's runner with a short start of the console log and errors that name the sample, also on CPUs."""

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build a logger that dumps the environment, the config and the hooks to the file only."""
        return quiet(super().build_logger(*args, **kwargs))

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Wrap a model for several processes; on CPUs without device ids, and with BN instead of SyncBN."""
        if self.distributed and get_device() == 'cpu':
            model = revert_sync_batchnorm(model)
            unused = self.cfg.get('find_unused_parameters', False)
            own = dict(device_ids=None, broadcast_buffers=False, find_unused_parameters=unused)
            model_wrapper_cfg = model_wrapper_cfg or own
        return super().wrap_model(model_wrapper_cfg, model)


def build_runner(cfg: Config) -> Runner:
    """Build the runner of a config, of the class ``runner_type`` if that is set."""
    if cfg.get('runner_type') == 'FlexibleRunner':
        print_log(
            "runner_type='FlexibleRunner' is MMEngine's; 'mmkron.FlexibleRunner' can resume", level=logging.WARNING
        )
    return RUNNERS.build(cfg) if 'runner_type' in cfg else LaunchRunner.from_cfg(cfg)


def build_model(cfg: Config, device: str, layer: type, what: str) -> nn.Module:
    """Build the model of a config in evaluation mode, with the weights of ``cfg.load_from`` or its initial ones.

    Args:
        cfg: The config.
        device: The device of the model.
        layer: A class of which the model must have a layer.
        what: The name of this class in the message.

    Raises:
        LaunchError: The model has no such layer, or the weights or the device cannot be used.
    """
    if cfg.get('data_preprocessor') is not None:
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    torch.manual_seed((cfg.get('randomness') or {}).get('seed') or 0)
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    if not any(isinstance(module, layer) for module in model.modules()):
        raise LaunchError(f'the model has no {what}')
    if cfg.load_from is None:
        watch_pretrained(model)
        model.init_weights()
    check_fit(model, cfg.load_from, None, 'checkpoint', whole=True)
    try:
        return model.to(device).eval()
    except (AssertionError, RuntimeError) as error:
        raise LaunchError(f'--device {device}: {error}') from error
