"""Sharded training: MMEngine's FlexibleRunner and FSDP strategy, with what they lack for it."""

from __future__ import annotations

import os.path as osp
from collections import Counter
from functools import partial
from typing import Any

import torch.nn as nn
from mmengine._strategy import FSDPStrategy as MMEngineFSDPStrategy
from mmengine.config import Config, ConfigDict
from mmengine.device import get_device
from mmengine.dist import barrier, is_main_process
from mmengine.runner import FlexibleRunner as MMEngineFlexibleRunner
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from mmkron.data_checks.common import type_name
from mmkron.engine.console import quiet
from mmkron.engine.data_errors import NamedSamplesMixin
from mmkron.engine.storage import PARTIAL, WriteError, finish, remove
from mmkron.models.backbones import Backbone
from mmkron.registry import RUNNERS, STRATEGIES
from mmkron.utils.errors import LaunchError


@RUNNERS.register_module()
class FlexibleRunner(NamedSamplesMixin, MMEngineFlexibleRunner):
    """MMEngine's runner for strategies: ``runner_type='mmkron.FlexibleRunner'``.

    Its config may hold ``compile``, and its checkpoints are whole and in the format of Runner. MMEngine 0.10 counts a
    step too many in a checkpoint that its hook writes again after the evaluation, so that resuming would skip an epoch,
    leaves DDP's prefix ``module.`` on the weights, and loads a checkpoint before an EMAHook has made the averages that
    belong to it.
    """

    _begun = False

    @classmethod
    def from_cfg(cls, cfg: Config) -> FlexibleRunner:
        """Build the runner of a config; a single process has nothing to share and gets MMEngine's default strategy.

        Raises:
            LaunchError: If FSDP is combined with an EMAHook.
        """
        strategy = type_name(cfg.get('strategy') or {})
        if cfg.get('launcher', 'none') == 'none' and strategy in ('DDPStrategy', 'FSDPStrategy'):
            cfg.strategy = strategy = None
        hooks = [*(cfg.get('custom_hooks') or ()), *(cfg.get('default_hooks') or {}).values()]
        if strategy == 'FSDPStrategy' and 'EMAHook' in map(type_name, filter(None, hooks)):
            raise LaunchError('EMAHook averages whole parameters and does not work with FSDPStrategy; use DDPStrategy')
        cfg.setdefault('env_cfg', ConfigDict())  # MMEngine's default is None, which it cannot unpack
        runner = super().from_cfg(cfg)
        runner._compile = cfg.get('compile', False)
        runner.model = runner.strategy.build_model(runner.model)  # what a checkpoint must fit, before it is wrapped
        return runner

    def _log_env(self) -> None:
        """Log the environment and the config to the file only."""
        quiet(self.logger)
        super()._log_env()

    def load_or_resume(self) -> None:
        """Call the hooks' ``before_run``, then load or resume."""
        self.call_hook('before_run')
        super().load_or_resume()

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, meta: dict | None = None, **kwargs: Any) -> None:
        """Save a whole file; ``meta`` has precedence over the runner's own counts.

        Raises:
            WriteError: If the file cannot be written.
        """
        self._given_meta = dict(meta or {})
        path = osp.join(out_dir, filename)
        try:
            super().save_checkpoint(out_dir, filename + PARTIAL, *args, meta=meta, **kwargs)
            barrier()  # every process may write a shard
            if is_main_process():
                finish(path)
        except OSError as error:
            if is_main_process():
                remove(path + PARTIAL)
            raise WriteError(path, error) from error

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the hooks, ``before_run`` once per run."""
        if fn_name == 'before_run' and self._begun:
            return
        if fn_name in ('before_run', 'after_run'):
            self._begun = fn_name == 'before_run'
        if fn_name == 'before_save_checkpoint':
            checkpoint = kwargs['checkpoint']
            checkpoint['meta'].update(self._given_meta)
            if isinstance(self.model, DistributedDataParallel):
                state = checkpoint['state_dict']
                checkpoint['state_dict'] = {key.removeprefix('module.'): value for key, value in state.items()}
        super().call_hook(fn_name, **kwargs)


@STRATEGIES.register_module()
class FSDPStrategy(MMEngineFSDPStrategy):
    """MMEngine's strategy, with every block of a backbone of mmkron as an FSDP unit.

    A unit's parameters are gathered while it computes and sharded again after it. Everything outside of the blocks,
    such as a head, is gathered for the whole step, because the hosts call more of a head than its ``forward``; so is a
    block that shares a parameter with another one. Checkpoints hold the full weights, so that a single process loads
    them. Training can be resumed, which MMEngine 0.10 cannot do with PyTorch 2.1 or later.

    Args:
        state_dict_cfg: Content of a checkpoint, as in MMEngine's strategy.
        **kwargs: Other arguments of MMEngine's strategy. An ``auto_wrap_policy`` in ``model_wrapper`` has precedence.
    """

    def __init__(self, *, state_dict_cfg: str | dict = 'full', **kwargs: Any) -> None:
        super().__init__(state_dict_cfg=state_dict_cfg, **kwargs)
        if get_device() == 'cpu':
            # Torch would copy from a unit that it has emptied already, and crash.
            self.state_dict_config.offload_to_cpu = self.optim_state_dict_config.offload_to_cpu = False

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        backbones = [module for module in model.modules() if isinstance(module, Backbone)]
        blocks = [block for backbone in backbones for stage in backbone.stages for block in stage]
        users = Counter(parameter for block in blocks for parameter in block.parameters())
        units = {block for block in blocks if all(users[parameter] == 1 for parameter in block.parameters())}
        policy = partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__)
        self.model_wrapper = {'auto_wrap_policy': policy, **(self.model_wrapper or {})}
        return super()._wrap_model(model)

    def load_optim_state_dict(self, state_dict: dict) -> None:
        """Load the state of the unsharded optimizer; MMEngine passes the arguments in the order of PyTorch 2.0."""
        sharded = FullyShardedDataParallel.optim_state_dict_to_load(
            model=self.model, optim=self.optim_wrapper.optimizer, optim_state_dict=state_dict
        )
        self.optim_wrapper.load_state_dict(sharded)
