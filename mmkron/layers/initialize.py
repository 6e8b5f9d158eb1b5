"""Initialization in the constructor, as plain PyTorch expects; MMEngine initializes in ``init_weights``."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.model import BaseModule
from mmengine.model.weight_init import PretrainedInit


def initialize(module: BaseModule) -> None:
    """Initialize the parameters as :meth:`mmengine.model.BaseModule.init_weights` does, but load no checkpoint.

    The module is not marked as initialized, and ``init_cfg`` and torch's random state on the CPU do not change. So a
    later ``init_weights``, as in training through MMEngine, has the same result as without this call.

    Args:
        module: Module at the end of its constructor. As the constructor of a subclass may still be running, a
            subclass's ``init_weights`` is not called; the children's are.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return
    init_cfg = module.init_cfg
    module.init_cfg = _without_checkpoints(init_cfg)
    module._dump_init_info = _skip_log
    with torch.random.fork_rng(devices=()):
        # Draw other random numbers than the module that is constructed next.
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), device='cpu')))
        BaseModule.init_weights(module)
    del module._dump_init_info
    module.init_cfg = init_cfg
    for part in module.modules():
        if isinstance(part, BaseModule):
            part.is_init = False


def _without_checkpoints(init_cfg: Any) -> list[dict]:
    """Return the initializers of ``init_cfg`` as a list, without those that load a checkpoint."""
    init_cfgs = [init_cfg] if isinstance(init_cfg, dict) else init_cfg or []
    return [cfg for cfg in init_cfgs if cfg['type'] not in ('Pretrained', PretrainedInit)]


def _skip_log() -> None:
    """Replace MMEngine's log of every parameter."""
