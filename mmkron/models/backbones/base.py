"""Base class of the backbones: outputs, freezing, norm evaluation, activation checkpointing and layer depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.utils.checkpoint as cp
from mmengine.model import BaseModule
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mmkron.layers.configs import check_init_cfg
from mmkron.layers.initialize import initialize
from mmkron.ops.checks import check_map
from mmkron.utils.checks import check_flags, check_int, resolve_indices


class Backbone(BaseModule):
    """Backbone of a stem and a list of stages, each a sequence of blocks.

    The constructor of a subclass calls this one with the number of stages of the whole network, builds ``self.stem``
    and ``self.stages`` (an ``nn.ModuleList`` of ``nn.Sequential``), and ends with :meth:`finish`. The stem is an
    ``nn.Sequential``, because MMEngine would let a direct child with its own ``init_weights`` override ``init_cfg``.
    Stages after ``self.last_stage`` are not built, so that no parameter is unused. A state dict of the whole network
    still loads: entries of stages that are not built are skipped.

    Args:
        in_channels: Channels of the image.
        num_stages: Number of stages of the whole network.
        out_indices: Stages whose maps are returned. Negative indices count from the end.
        frozen_stages: Number of stages to freeze together with the stem; 0 freezes the stem, -1 nothing.
        norm_eval: Whether to keep batch norm in evaluation mode during training.
        with_cp: Whether to recompute blocks in the backward pass to save memory.
        init_cfg: Initialization, as in :class:`mmengine.model.BaseModule`.

    Raises:
        TypeError: If a number is not an int, or ``out_indices`` is not an int or a sequence of ints.
        ValueError: If a number or an index is out of range, a flag is not a bool, or ``frozen_stages`` includes a stage
            that is not built.

    Attributes:
        out_channels (tuple[int, ...]): Channels of each requested output.
        out_strides (tuple[int, ...]): Stride of each requested output relative to the input.
    """

    def __init__(
        self,
        in_channels: int,
        num_stages: int,
        out_indices: int | Sequence[int],
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        init_cfg: dict | list | None = None,
    ) -> None:
        check_init_cfg(init_cfg)
        super().__init__(init_cfg)
        check_flags(norm_eval=norm_eval, with_cp=with_cp)
        check_int('in_channels', in_channels)
        check_int('frozen_stages', frozen_stages, -1)
        self.in_channels = in_channels
        self.num_stages = num_stages
        self.out_indices = resolve_indices('out_indices', out_indices, num_stages)
        self.last_stage = self.out_indices[-1]
        if frozen_stages > self.last_stage + 1:
            raise ValueError(
                f'frozen_stages must be -1 (none), 0 (stem) or up to {self.last_stage + 1} (stages that out_indices '
                f'requires), got {frozen_stages!r}'
            )
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.with_cp = with_cp
        self._register_load_state_dict_pre_hook(self._drop_unbuilt_stages)

    def finish(self, stage_channels: Sequence[int], stage_strides: Sequence[int]) -> None:
        """Set output channels and strides (given per stage), initialize, and freeze stages.

        Subclasses call this at the end of their constructors.
        """
        self.out_channels = tuple(stage_channels[i] for i in self.out_indices)
        self.out_strides = tuple(stage_strides[i] for i in self.out_indices)
        initialize(self)
        self._freeze()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps of ``out_indices``, (B, C, ceil(H / stride), ceil(W / stride)), for images (B, C, H, W).

        Raises:
            TypeError: If ``x`` is not a floating-point tensor.
            ValueError: If ``x`` is empty or has another number of channels.
        """
        check_map('x', x, self.in_channels)
        return tuple(self.run_stages(self.stem(x)))

    def run_stages(self, x: Tensor) -> list[Tensor]:
        """Run the stages on the stem's map and return the maps of ``out_indices``."""
        outs = []
        for index, stage in enumerate(self.stages):
            for block in stage:
                x = self.run(block, x)
            if index in self.out_indices:
                outs.append(x)
        return outs

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """Return ``block(x)``, with activation checkpointing if ``with_cp`` is set."""
        if self.with_cp and torch.is_grad_enabled():
            return cp.checkpoint(block, x, use_reentrant=False)
        return block(x)

    def train(self, mode: bool = True) -> Backbone:
        """Set the mode, but keep frozen stages and, if ``norm_eval``, batch norms in evaluation mode."""
        super().train(mode)
        self._freeze()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Return the layer of a parameter, for layer-wise learning rate decay.

        Args:
            param_name: Full name of the parameter.
            prefix: Prefix of this backbone's parameters in the name, such as ``backbone.``.

        Returns:
            The index of the layer and the number of layers. Layer 0 is the stem, each block is a layer, and the last
            layer is for parameters outside the backbone.
        """
        num_layers = sum(len(stage) for stage in self.stages) + 2
        if not param_name.startswith(prefix):
            return num_layers - 1, num_layers
        parts = param_name[len(prefix) :].split('.')
        if parts[0] == 'stem':
            return 0, num_layers
        if parts[0] != 'stages':
            return num_layers - 1, num_layers
        before = sum(len(stage) for stage in self.stages[: int(parts[1])])
        return 1 + before + int(parts[2]), num_layers

    def _freeze(self) -> None:
        frozen: list[nn.Module] = [] if self.frozen_stages < 0 else [self.stem, *self.stages[: self.frozen_stages]]
        for part in frozen:
            part.eval()
            part.requires_grad_(False)

    def _drop_unbuilt_stages(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for index in range(self.last_stage + 1, self.num_stages):
            for name in [k for k in state_dict if k.startswith(f'{prefix}stages.{index}.')]:
                del state_dict[name]


def resolve_arch(
    arch: str | Mapping[str, Any],
    archs: Mapping[str, Mapping[str, Any]],
    name: str = 'arch',
    optional: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a copy of the settings of an architecture, given by name or as a dict with the same keys.

    Args:
        arch: The name or the dict.
        archs: Settings by name, all with the same keys.
        name: Name of the argument in error messages.
        optional: Values of the keys that a dict may leave out.

    Raises:
        TypeError: If ``arch`` is neither a name nor a dict.
        ValueError: If the name is unknown, or a key of the dict is missing or unknown.
    """
    if isinstance(arch, str):
        if arch not in archs:
            raise ValueError(f'{name} must be a dict or one of {tuple(archs)}, got {arch!r}')
        return dict(archs[arch])
    if not isinstance(arch, Mapping):
        raise TypeError(f'{name} must be a name or a dict, got {arch!r}')
    optional, keys = optional or {}, set(next(iter(archs.values())))
    if not keys - set(optional) <= set(arch) <= keys:
        raise ValueError(f'{name} must have the keys {sorted(keys - set(optional))}, got {dict(arch)!r}')
    return {**optional, **arch}
