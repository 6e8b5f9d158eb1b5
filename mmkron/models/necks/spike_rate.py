"""Neck that averages the maps of a spiking backbone over time."""

from __future__ import annotations

from collections.abc import Sequence

from mmengine.model import BaseModule
from torch import Tensor

from mmkron.registry import MODELS
from mmkron.utils.checks import check_int, check_sequence


@MODELS.register_module()
class SpikeRateNeck(BaseModule):
    """Neck that returns firing rates, the mean of spike maps over time.

    The input comes from a :class:`mmkron.models.QKFormer` with ``out_mode='steps'`` or ``'folded'``, usually with
    layers in between that work on each time step. Without such layers, use the backbone's ``out_mode='mean'``.

    As before the classifier of `QKFormer <https://arxiv.org/abs/2403.16552>`_; the use on several levels is this
    project's own.

    Args:
        steps: T of folded maps (T B, C, H, W). None for maps (T, B, C, H, W).

    Raises:
        TypeError: If ``steps`` is neither None nor an int.
        ValueError: If ``steps`` is below 1.

    Examples:
        >>> import torch
        >>> SpikeRateNeck()(torch.ones(4, 2, 8, 7, 7))[0].shape
        torch.Size([2, 8, 7, 7])
        >>> SpikeRateNeck(steps=4)(torch.ones(8, 8, 7, 7))[0].shape
        torch.Size([2, 8, 7, 7])
    """

    def __init__(self, steps: int | None = None) -> None:
        super().__init__()
        if steps is not None:
            check_int('steps', steps)
        self.steps = steps

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Average one or more maps, (T, B, C, H, W) or with ``steps`` (T B, C, H, W), to a tuple of (B, C, H, W).

        Raises:
            TypeError: If an input is not a floating-point tensor.
            ValueError: If a map is empty or has other dimensions, or ``steps`` does not divide its first axis.
        """
        maps = (inputs,) if isinstance(inputs, Tensor) else inputs
        check_sequence('inputs', maps)
        return tuple(self.rate(index, x) for index, x in enumerate(maps))

    def rate(self, index: int, x: Tensor) -> Tensor:
        """Average the map of one level over time."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f'level {index} of inputs must be a floating-point tensor, got {got}')
        layout, dims = ('(T, B, C, H, W)', 5) if self.steps is None else ('(T B, C, H, W)', 4)
        if x.dim() != dims or 0 in x.shape:
            raise ValueError(
                f'level {index} of inputs must be a map {layout} with no empty dimension for steps={self.steps}, '
                f'got shape {tuple(x.shape)}'
            )
        if self.steps is None:
            return x.mean(0)
        if x.shape[0] % self.steps:
            raise ValueError(
                f'steps must divide T B of level {index} of inputs, got {self.steps} and shape {tuple(x.shape)}'
            )
        return x.reshape(self.steps, -1, *x.shape[1:]).mean(0)  # unflatten would export with a fixed batch size

    def extra_repr(self) -> str:
        return f'steps={self.steps}'
