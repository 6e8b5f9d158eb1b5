"""Initialization in the constructor, which plain PyTorch expects and MMEngine leaves to ``init_weights``."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.model import BaseModule
from mmengine.model.weight_init import PretrainedInit


def initialize(module: BaseModule) -> None:
    """Set the parameters as :meth:`mmengine.model.BaseModule.init_weights` does, but load no checkpoint.

    A later ``init_weights`` finds the module as without this call: not yet initialized, with its ``init_cfg``, and with
    torch's random numbers on the CPU where they were. So a training through MMEngine stays the same.

    Args:
        module: A module whose own constructor, though maybe not that of a subclass, has come to its end. A subclass's
            ``init_weights`` is therefore not called, but those of the children are.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return
    init_cfg = module.init_cfg
    module.init_cfg = _without_checkpoints(init_cfg)
    module._dump_init_info = _say_nothing
    with torch.random.fork_rng(devices=()):
        # Numbers that what is constructed next does not draw, too.
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), device='cpu')))
        BaseModule.init_weights(module)
    del module._dump_init_info
    module.init_cfg = init_cfg
    for part in module.modules():
        if isinstance(part, BaseModule):
            part.is_init = False


def _without_checkpoints(init_cfg: Any) -> list[dict]:
    init_cfgs = [init_cfg] if isinstance(init_cfg, dict) else init_cfg or []
    return [cfg for cfg in init_cfgs if cfg['type'] not in ('Pretrained', PretrainedInit)]


def _say_nothing() -> None:
    """In place of MMEngine's log of every parameter."""
