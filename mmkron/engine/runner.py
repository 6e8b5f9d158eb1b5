"""Build a runner or a model from a config, and set up and tear down what it needs."""

from __future__ import annotations

import logging
import os
import pickle
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.config import Config, ConfigDict
from mmengine.device import get_device
from mmengine.logging import MMLogger, print_log
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, RUNNERS, DefaultScope
from mmengine.runner import Runner
from torch import nn

from mmkron.data_checks.common import type_name
from mmkron.engine.console import quiet
from mmkron.engine.data_errors import NamedSamplesMixin
from mmkron.utils.collect_env import check_hosts
from mmkron.utils.errors import LaunchError
from mmkron.utils.fit import check_fit, watch_pretrained
from mmkron.utils.weights import reason_of, safe_loading

_CPU_WRAPPERS = {'DDPStrategy': dict(device_ids=None, broadcast_buffers=False), 'FSDPStrategy': dict(device_id='cpu')}


@contextmanager
def environment(cfg: Config, args: Namespace) -> Iterator[None]:
    """Set up and tear down the hosts, the process group, the default scope and the checks of what is unpickled.

    Raises:
        LaunchError: A host cannot be imported, or a file that the run reads is damaged or refused.
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
        raise LaunchError(
            'a file that this run reads by torch.load is damaged, or refused because it holds more than weights and '
            f"MMEngine's own records: {reason_of(error)}"
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
        name = type_name(cfg.strategy)
        if name not in _CPU_WRAPPERS:
            raise LaunchError(f'strategy.type {cfg.strategy.type!r} needs an accelerator')
        cfg.strategy.model_wrapper = {**_CPU_WRAPPERS[name], **(cfg.strategy.get('model_wrapper') or {})}
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
        print_log("'FlexibleRunner' is MMEngine's; 'mmkron.FlexibleRunner' can resume", 'current', logging.WARNING)
    return RUNNERS.build(cfg) if 'runner_type' in cfg else LaunchRunner.from_cfg(cfg)


def build_model(cfg: Config, device: str, layer: type, what: str) -> nn.Module:
    """Build the model of a config in evaluation mode, with the weights of ``cfg.load_from`` or its initial ones.

    Raises:
        LaunchError: The model has no ``layer``, called ``what`` here, or the weights or the device cannot be used.
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
