"""Energy of spiking networks: operations of each layer from its measured activity, in three conventions.

Sources: the estimate of Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552), for which no code is published; energy
of an operation in 45 nm from Horowitz, Computing's energy problem, ISSCC 2014. The figures of the paper were measured
on a network in which the last neuron of the spiking self-attention takes the batch for time (``legacy_ssa_order``), so
figures from here differ.

Counted are the additions and multiply-adds of convolutions, attention products and linear layers. Batch norm (which can
be folded into the convolution), biases, pooling, the addition of shortcuts and the neurons themselves are not counted.
The conventions differ in the cost of inputs that are neither 0 nor 1, such as the sums of spikes between blocks:

``paper``
    ``mean of the input * multiply-adds * T`` additions, so that a sum of spikes counts with its value. Only this
    convention explains the published energies.
``strict``
    As ``paper`` if every input is exactly 0 or 1. Otherwise all multiply-adds are counted.
``events``
    The additions that nonzero inputs cause, whatever their value: one for each output that an input reaches.

In all three, a convolution of an image that all time steps share runs once and counts its multiply-adds once. A
convolution of frames runs at every step: frames of event counts are treated as sums of spikes, and for frames of real
or negative values all multiply-adds are counted at each step. Layers that are not spiking, such as the classifier, are
listed with their multiply-adds but enter a total only with ``dense=True``.

As is customary, multiply-adds are counted for the dense map including its padding. Events at a border reach fewer
outputs, so even if every input is 1 a padded convolution has fewer events than multiply-adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from mmkron.utils.checks import check_choice, check_flags

MAC_PJ, AC_PJ = 4.6, 0.9  # picojoules of a multiply-add and of an addition, 32-bit floating point
CONVENTIONS = ('paper', 'strict', 'events')


class Operations(NamedTuple):
    """Operations per sample: additions, and multiply-adds."""

    accumulates: float
    macs: float

    @property
    def energy(self) -> float:
        """Return the energy in millijoules."""
        return (AC_PJ * self.accumulates + MAC_PJ * self.macs) * 1e-9

    @staticmethod
    def total(parts: Iterable[Operations]) -> Operations:
        """Return the sum of several operations."""
        parts = list(parts)
        return Operations(math.fsum(p.accumulates for p in parts), math.fsum(p.macs for p in parts))


class LayerActivity(NamedTuple):
    """Size of a layer, and statistics of its inputs over all samples.

    Attributes:
        name: Name of the module. Parts of an attention add the names of their operands.
        stage: ``stem``, ``stage 1`` and so on if the name contains it, else the first part of the name.
        kind: ``convolution`` for a :class:`mmkron.layers.SpikingConv`. ``sum`` and ``mask`` for the queries and keys of
            a Q-K attention: one addition per spike of the queries (with a threshold of 0.5 an OR would do), and an AND
            with the keys, which adds nothing. ``product`` for each of the two products of a spiking self-attention, in
            the order in which they run; the spikes of the second one select rows of the first one's counts to add.
            ``dense`` for any other convolution or linear layer, such as the classifier.
        macs: Multiply-adds per sample and time step, the mean if sizes differ; of a ``dense`` layer per sample.
        steps: T, the mean over the samples if it differs; 1 for a ``dense`` layer.
        once: Whether the input is an image that all steps share, so that the layer runs once.
        mean: Mean of the input. The first product of a spiking self-attention has two inputs of spikes; this is the
            smaller mean.
        nonzero: Share of the input that is not 0.
        values: ``binary`` if every input is exactly 0 or 1, ``integer`` for counts, else ``real``.
        maximum: Maximum of the input.
        events: Additions that nonzero inputs cause, per sample and over all steps. For the first product of a spiking
            self-attention, pairs of spikes that meet; for the second, spikes times the length of the row that each
            adds.
    """

    name: str
    stage: str
    kind: str
    macs: float
    steps: float
    once: bool
    mean: float
    nonzero: float
    values: str
    maximum: float
    events: float

    def operations(self, convention: str) -> Operations:
        """Return the operations of the layer per sample.

        Raises:
            ValueError: If ``convention`` is unknown.
        """
        check_choice('convention', convention, CONVENTIONS)
        if self.once or self.kind == 'dense' or self.values == 'real':
            return Operations(0.0, self.macs * (1 if self.once else self.steps))
        if convention == 'events':
            return Operations(self.events, 0.0)
        if convention == 'strict' and self.values != 'binary':
            return Operations(0.0, self.macs * self.steps)
        return Operations(self.mean * self.macs * self.steps, 0.0)


class NeuronActivity(NamedTuple):
    """Activity of a layer of neurons.

    Attributes:
        name: Name of the module.
        stage: Stage, as in :class:`LayerActivity`.
        rate: Firing rate, in spikes per neuron and step.
        raster: Spikes of some neurons for the first sample, (n, T), 0 or 1.
    """

    name: str
    stage: str
    rate: float
    raster: Tensor


class SpikeActivity(NamedTuple):
    """Result of :func:`measure_activity`.

    Attributes:
        samples: Number of inputs of the network: images, or crops if a segmentor slides over its image.
        layers: Activity of the layers in the order in which they first ran.
        neurons: Activity of the neurons in the same order.
    """

    samples: int
    layers: tuple[LayerActivity, ...]
    neurons: tuple[NeuronActivity, ...]

    def total(self, convention: str, stage: str | None = None, dense: bool = False) -> Operations:
        """Return the operations per sample of all layers, or of the layers of one stage.

        Args:
            convention: ``paper``, ``strict`` or ``events``.
            stage: Stage to sum over. None for the whole network.
            dense: Whether to include ``dense`` layers.

        Raises:
            ValueError: If ``convention`` is unknown, or no layer has the ``stage``.
        """
        check_choice('convention', convention, CONVENTIONS)
        check_choice('stage', stage, (None, *{layer.stage: None for layer in self.layers}))
        check_flags(dense=dense)
        layers = [layer for layer in self.layers if stage in (None, layer.stage)]
        return Operations.total(layer.operations(convention) for layer in layers if dense or layer.kind != 'dense')


def dense_macs(module: nn.Module, x: Tensor, out: Tensor) -> int:
    """Return the multiply-adds of a convolution or linear layer from ``x`` to ``out``, padding included."""
    if isinstance(module, nn.Linear):
        return x.numel() * module.out_features
    taps = math.prod(module.kernel_size)
    if isinstance(module, nn.ConvTranspose2d):
        return x.numel() * taps * module.out_channels // module.groups
    return out.numel() * taps * module.in_channels // module.groups


def convolution_macs(conv: nn.Conv2d, x: Tensor) -> int:
    """Return the multiply-adds of a convolution of maps (N, C, H, W), padding included."""
    sizes = zip(x.shape[-2:], conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    taps = math.prod(conv.kernel_size) * conv.in_channels * conv.out_channels // conv.groups
    return x.shape[0] * math.prod(output_size(*size) for size in sizes) * taps


def convolution_events(conv: nn.Conv2d, x: Tensor) -> float:
    """Return the additions that the nonzero values of maps (N, C, H, W) cause in a convolution.

    Each value causes as many as the outputs that its position reaches, times the output channels of its group.
    """
    sizes = zip(x.shape[-2:], conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    rows, columns = (reach(*size).to(x.device) for size in sizes)
    counts = (x != 0).sum((0, 1), dtype=torch.float64)
    return (rows @ counts @ columns).item() * (conv.out_channels // conv.groups)


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return the size of a convolution's output along one axis."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def reach(size: int, kernel: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Return how many outputs each of the ``size`` inputs along one axis reaches, float64."""
    starts = torch.arange(output_size(size, kernel, stride, padding, dilation)) * stride - padding
    taps = (starts[:, None] + torch.arange(kernel) * dilation).flatten()
    return taps[(taps >= 0) & (taps < size)].bincount(minlength=size).double()
