"""Means over time of maps that a spiking backbone gives at each step."""

from __future__ import annotations

from collections.abc import Sequence

from mmengine.model import BaseModule
from torch import Tensor

from mmkron.registry import MODELS
from mmkron.utils.checks import check_int, check_sequence


@MODELS.register_module()
class SpikeRateNeck(BaseModule):
    """Firing rates: the mean over T of maps of :class:`mmkron.models.QKFormer` with ``out_mode`` steps or folded.

    For what stands between backbone and head and works on each step, as layers that spike themselves. A head that
    needs rates alone takes them from the backbone, ``out_mode='mean'``. Source: the mean over T before the classifier
    of Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552); on maps of several levels it is this project's own use.

    Args:
        steps: T of folded maps, (T B, C, H, W), whose first axis does not tell it; None (the default) takes maps
            (T, B, C, H, W).

    Raises:
        TypeError, ValueError: ``steps`` that is no positive int.
    """

    def __init__(self, steps: int | None = None) -> None:
        super().__init__()
        if steps is not None:
            check_int('steps', steps)
        self.steps = steps

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Map, or a sequence of them, (T, B, C, H, W) or with ``steps`` (T B, C, H, W) -> tuple of (B, C, H, W).

        Raises:
            TypeError: an input that is no floating-point tensor.
            ValueError: a map of other dimensions, one without a step, or a first axis that ``steps`` does not divide.
        """
        maps = (inputs,) if isinstance(inputs, Tensor) else inputs
        check_sequence('inputs', maps)
        return tuple(self.rate(index, x) for index, x in enumerate(maps))

    def rate(self, index: int, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f'level {index} of inputs must be a floating-point tensor, got {got}')
        layout = '(T, B, C, H, W)' if self.steps is None else '(T B, C, H, W)'
        if x.dim() != layout.count(',') + 1 or 0 in x.shape:
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
        return x.reshape(self.steps, -1, *x.shape[1:]).mean(0)  # exporters keep the batch of unflatten fixed

    def extra_repr(self) -> str:
        return f'steps={self.steps}'
