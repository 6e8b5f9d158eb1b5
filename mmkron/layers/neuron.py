"""Spiking neurons as layers, and batch norm fused with them.

No layer keeps a state: each call starts its neurons at rest, so that samples, batches and calls are independent.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mmkron.ops.neurons.lif import lif
from mmkron.ops.neurons.neuron import resolve_neuron
from mmkron.ops.neurons.norm_lif import norm_lif
from mmkron.utils.checks import check_choice, check_flags, check_keys

KINDS = ('lif', 'plif', 'if')


class LIF(nn.Module):
    """Spiking neuron: :func:`mmkron.ops.lif` with its settings.

    Args:
        kind: ``lif``; ``plif``, with one learnable time constant for the layer, which starts at ``tau`` (Fang et al.,
            ICCV 2021); or ``if``, without a leak, which ignores ``tau`` and ``decay_input``.
        tau, v_threshold, v_reset, decay_input, detach_reset, surrogate, alpha: See :func:`mmkron.ops.lif`.

    Raises:
        TypeError: If a setting is not of its type.
        ValueError: If ``kind`` is unknown, the tau of ``plif`` is not above 1 and finite, or :func:`mmkron.ops.lif`
            refuses a setting.

    Examples:
        >>> import torch
        >>> from mmkron.layers import LIF
        >>> neuron = LIF(kind='plif', tau=2.0)
        >>> neuron(torch.full((4, 2, 8, 7, 7), 1.5)).shape
        torch.Size([4, 2, 8, 7, 7])
    """

    def __init__(
        self,
        kind: str = 'lif',
        tau: float = 2.0,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        decay_input: bool = True,
        detach_reset: bool = True,
        surrogate: str = 'sigmoid',
        alpha: float | None = None,
    ) -> None:
        super().__init__()
        check_choice('kind', kind, KINDS)
        check_flags(decay_input=decay_input)
        self.kind, self.v_threshold = kind, v_threshold
        self.tau = tau
        self.others = dict(
            v_reset=v_reset,
            decay_input=decay_input and kind != 'if',
            detach_reset=detach_reset,
            surrogate=surrogate,
            alpha=alpha,
        )
        resolve_neuron(tau, v_threshold, **self.others)
        if kind == 'plif':
            if not 1 < tau < math.inf:
                raise ValueError(f'tau of a plif neuron must be above 1 and finite, got {tau!r}')
            self.weight = nn.Parameter(torch.tensor([-math.log(tau - 1)]))  # FSDP takes no parameter without dimensions
            self._register_load_state_dict_pre_hook(self._add_dimension)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of :func:`mmkron.ops.lif`."""
        tau = math.inf if self.kind == 'if' else self.tau
        if self.kind == 'plif':
            tau = 1 / self.weight.sigmoid()
        return dict(tau=tau, v_threshold=self.v_threshold, **self.others)

    def forward(
        self, x: Tensor, v0: Tensor | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map currents (T, ...) to spikes (T, ...); with ``return_state`` return the last potentials (...) as well."""
        return lif(x, v0, return_state=return_state, **self.settings())

    def _add_dimension(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Reshape a time constant that an earlier version saved without dimensions."""
        weight = state_dict.get(f'{prefix}weight')
        if weight is not None and weight.dim() == 0:
            state_dict[f'{prefix}weight'] = weight.reshape(1)

    def extra_repr(self) -> str:
        return f'{self.kind}, tau={self.tau}, v_threshold={self.v_threshold}'


def make_neuron(neuron_cfg: Mapping[str, Any] | None, **others: Any) -> LIF:
    """Return the neuron of ``neuron_cfg``, with ``others`` instead of its entries.

    Raises:
        TypeError: If ``neuron_cfg`` is neither a dict nor None.
        ValueError: If it has a key that is not an argument of :class:`LIF`, or :class:`LIF` refuses a value.
    """
    check_keys('neuron_cfg', neuron_cfg, inspect.signature(LIF).parameters)
    return LIF(**{**(neuron_cfg or {}), **others})


def norm_then_lif(norm: nn.Module, neuron: nn.Module, x: Tensor, steps: int) -> Tensor:
    """Map (T B, C, H, W) to spikes (T, B, C, H, W): norm, then neuron, as one operation if possible."""
    if not can_fuse(norm, neuron):
        x = norm(x)
        return neuron(x.reshape(steps, -1, *x.shape[1:]))  # unflatten would fix the size of a traced map
    norm.num_batches_tracked.add_(1)
    statistics = norm.weight, norm.bias, norm.running_mean, norm.running_var
    return norm_lif(x, steps, *statistics, norm.momentum, norm.eps, **neuron.settings())


def can_fuse(norm: nn.Module, neuron: nn.Module) -> bool:
    """Return whether norm and neuron can be one operation, which saves memory in training."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if type(norm) is not nn.BatchNorm2d or type(neuron) is not LIF or has_hooks(norm) or has_hooks(neuron):
        return False
    if not (norm.training and norm.affine and norm.track_running_stats and norm.momentum is not None):
        return False
    return norm.weight.dtype in (torch.float32, torch.float64)  # as the statistics, which are never narrower


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook watches the calls of ``module``: a fused operation would not call it."""
    kinds = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')
    return any(getattr(module, kind) for kind in kinds)
