"""Activity and energy of spiking networks on data: what each layer gets, and what that costs in three conventions.

Sources: the estimate of Zhou et al., QKFormer, NeurIPS 2024 (arXiv 2403.16552), for which no code is published; energy
of an operation in 45 nm from Horowitz, Computing's energy problem, ISSCC 2014. The paper's own figures were measured on
a network whose last neuron of the spiking self-attention runs over the batch as if it were time (``legacy_ssa_order``),
so that figures from here are not theirs.

An operation is what a convolution, a product of an attention or a linear map adds up. Batch norm (which can be folded
into the convolution), biases, pooling, the addition of shortcuts and the neurons themselves are not counted. The
conventions differ in what an input that is neither 0 nor 1 costs, as the sums of spikes between blocks are:

``paper``
    ``mean of the input * multiply-adds * T`` accumulates, so that a sum of spikes counts with its value. The published
    energies can only be explained so.
``strict``
    The same where an input is exactly 0 or 1. All multiply-adds are made where it is not.
``events``
    The additions that inputs other than 0 cause, whatever their value: each reaches as many outputs as there are.

In all three, a convolution of an image that all time steps share makes its multiply-adds once. One of frames runs at
every step: frames of event counts are inputs like sums of spikes, and frames of real or negative values cost all
multiply-adds at each step. Layers that are not spiking, as the classifier, are listed with their multiply-adds and
enter no total unless asked for.

Multiply-adds are those of the dense map with its padding, as is customary. Events at a border reach fewer outputs, so
that where every input is 1 the events of a padded convolution are less than its multiply-adds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from mmkron.layers.neuron import LIF
from mmkron.layers.spiking import (
    ChannelQKAttention,
    LegacyOrder,
    SpikingAttention,
    SpikingConv,
    SpikingSelfAttention,
    TokenQKAttention,
)
from mmkron.ops.neurons.lif import lif
from mmkron.utils.checks import check_choice, check_flags, check_int

MAC_PJ, AC_PJ = 4.6, 0.9  # picojoules of a multiply-add and of an addition, 32-bit floating point
CONVENTIONS = ('paper', 'strict', 'events')
DENSE = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


class Operations(NamedTuple):
    """Operations for a sample: additions, and multiplications with additions."""

    accumulates: float
    macs: float

    @property
    def energy(self) -> float:
        """Millijoules."""
        return (AC_PJ * self.accumulates + MAC_PJ * self.macs) * 1e-9

    @staticmethod
    def total(parts: Iterable[Operations]) -> Operations:
        parts = list(parts)
        return Operations(math.fsum(p.accumulates for p in parts), math.fsum(p.macs for p in parts))


class LayerActivity(NamedTuple):
    """What a layer got, over all samples, and its size.

    Attributes:
        name: of the module; a part of an attention has the operands behind the module's name.
        stage: ``stem``, ``stage 1`` and so on where the name says so, else the first part of the name.
        kind: ``convolution`` of a :class:`mmkron.layers.SpikingConv`. ``sum``: of the queries' spikes, from which the
            mask of a Q-K attention is made, one addition a spike (with a threshold of 0.5 an OR would do). ``mask``:
            that of the keys, an AND, which adds nothing. ``product``: one of the two of a spiking self-attention, in
            the order that it runs; the second adds rows of the first one's counts, which stand for weights there, where
            its other input spikes. ``dense``: a convolution or linear map outside of these, as of the classifier.
        macs: multiply-adds for a sample and time step, the mean where sizes differ; of a ``dense`` layer for a sample.
        steps: T, the mean over the samples where it differs; 1 for a ``dense`` layer.
        once: the input is an image that all steps share, so that the layer runs once.
        mean: of the input. The first product of a spiking self-attention has two inputs of spikes, of which this is the
            rarer.
        nonzero: share of the input that is not 0.
        values: ``binary`` where every input is exactly 0 or 1; ``integer``, counts; ``real``, all else.
        maximum: of the input.
        events: additions that inputs other than 0 cause for a sample, at all steps. For the first product of a spiking
            self-attention the pairs of spikes that meet; for the second, spikes times the row that each adds.
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
        """What the layer costs for a sample.

        Raises:
            ValueError: an unknown ``convention``.
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
    """A layer of neurons: its name, stage, firing rate (spikes a neuron and step), and spikes of some neurons, (n, T),
    0 or 1, for the first sample."""

    name: str
    stage: str
    rate: float
    raster: Tensor


class SpikeActivity(NamedTuple):
    """Result of :func:`measure_activity`.

    Attributes:
        samples: inputs of the network: images, or crops where a segmentor slides over its image.
        layers: in the order in which they first ran.
        neurons: in that order, too.
    """

    samples: int
    layers: tuple[LayerActivity, ...]
    neurons: tuple[NeuronActivity, ...]

    def total(self, convention: str, stage: str | None = None, dense: bool = False) -> Operations:
        """Operations of all layers for a sample, or of those of a stage; of the ``dense`` ones only if asked for.

        Raises:
            ValueError: an unknown ``convention``, or a ``stage`` that no layer has.
        """
        check_choice('convention', convention, CONVENTIONS)
        check_choice('stage', stage, (None, *{layer.stage: None for layer in self.layers}))
        check_flags(dense=dense)
        layers = [layer for layer in self.layers if stage in (None, layer.stage)]
        return Operations.total(layer.operations(convention) for layer in layers if dense or layer.kind != 'dense')


@torch.no_grad()
def measure_activity(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    raster: int = 32,
) -> SpikeActivity:
    """Runs a network on batches and measures the inputs of its layers and the rates of its neurons.

    Sums are kept in float64. No hook is left on the network, whatever happens.

    Args:
        model: in evaluation mode, with a :class:`mmkron.layers.SpikingConv` somewhere in it, as of a QKFormer.
        batches: of any form that ``forward`` takes.
        forward: runs the network on a batch, for OpenMMLab's ``lambda model, batch: model.val_step(batch)``; by default
            ``model(batch)``.
        raster: neurons of each layer, evenly spaced, whose spikes are kept.

    Raises:
        TypeError: an argument of another type.
        ValueError: the network is in training mode, has no spiking layer or an attention of unknown kind; there is no
            batch, or no spiking layer runs; an input that is not finite.
    """
    check_int('raster', raster)
    if not isinstance(model, nn.Module):
        raise TypeError(f'model must be a network, got {model!r}')
    if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes, Mapping)):
        raise TypeError(f'batches must be an iterable of batches, got {batches!r}')
    if forward is not None and not callable(forward):
        raise TypeError(f'forward must be a function of a network and a batch or None, got {forward!r}')
    if model.training:
        raise ValueError('model must be in evaluation mode: in training the drawn paths would be measured')
    if not any(isinstance(module, SpikingConv) for module in model.modules()):
        raise ValueError('model has no spiking layer (mmkron.layers.SpikingConv)')
    recorder = Recorder(raster)
    with ExitStack() as stack:
        for handle in recorder.attach(model):
            stack.callback(handle.remove)
        for batch in batches:
            model(batch) if forward is None else forward(model, batch)
    return recorder.result()


@dataclass
class Tally:
    """Sums over the calls of a layer; ``other`` is that of a second operand."""

    stage: str
    kind: str
    once: bool = False
    batch: int = 0
    step_samples: int = 0
    macs: int = 0
    elements: int = 0
    total: float = 0.0
    nonzero: int = 0
    events: float = 0.0
    maximum: float = -math.inf
    binary: bool = True
    integer: bool = True
    other: Tally | None = None

    def add(self, name: str, x: Tensor) -> None:
        """Takes up an input, any shape."""
        total = x.sum(dtype=torch.float64).item()
        if not math.isfinite(total):
            raise ValueError(f'the input of {name} has values that are not finite')
        self.elements += x.numel()
        self.total += total
        self.nonzero += int(x.count_nonzero())
        self.maximum = max(self.maximum, x.max().item())
        self.binary = self.binary and bool(((x == 0) | (x == 1)).all())
        self.integer = self.integer and (self.binary or bool(((x >= 0) & (x == x.round())).all()))

    def layer(self, name: str, samples: int) -> LayerActivity:
        inputs = [self] if self.other is None else [self, self.other]
        rarer = min(inputs, key=lambda tally: tally.total / tally.elements)
        steps = 1 if self.kind == 'dense' else self.step_samples / self.batch
        return LayerActivity(
            name=name,
            stage=self.stage,
            kind=self.kind,
            macs=self.macs / samples / (1 if self.once else steps),
            steps=steps,
            once=self.once,
            mean=rarer.total / rarer.elements,
            nonzero=rarer.nonzero / rarer.elements,
            values='binary' if self.binary else 'integer' if self.integer else 'real',
            maximum=max(tally.maximum for tally in inputs),
            events=self.events / samples,
        )


class Recorder:
    """Hooks that keep a :class:`Tally` for each layer, and count spikes."""

    def __init__(self, raster: int) -> None:
        self.size = raster
        self.tallies: dict[str, Tally] = {}
        self.spikes: dict[str, list] = {}  # sum, elements and raster of each layer of neurons

    def attach(self, model: nn.Module) -> Iterable[Any]:
        """Registers the hooks, one after the other, and yields their handles."""
        inside: set[nn.Module] = set()  # of a layer that has a hook itself
        for name, module in model.named_modules():
            if isinstance(module, SpikingConv):
                inside.add(module.conv)
                yield module.register_forward_pre_hook(self.convolution(name), with_kwargs=True)
            elif isinstance(module, SpikingAttention):
                yield module.operand_map.register_forward_hook(self.attention(name, module))
                if isinstance(module, SpikingSelfAttention):
                    yield module.project.register_forward_pre_hook(self.neuron_before(join(name, 'neuron')))
            elif isinstance(module, LegacyOrder):
                inside.add(module.neuron)
                yield module.register_forward_hook(self.neuron(name))
            elif isinstance(module, LIF) and module not in inside:
                yield module.register_forward_hook(self.neuron(name))
        for name, module in model.named_modules():
            if isinstance(module, DENSE) and module not in inside:
                yield module.register_forward_hook(self.dense(name), with_kwargs=True)

    def result(self) -> SpikeActivity:
        first = next((tally for tally in self.tallies.values() if tally.kind != 'dense'), None)
        if first is None:
            raise ValueError('no spiking layer of the model ran: batches is empty, or they take another way')
        layers = tuple(tally.layer(name, first.batch) for name, tally in self.tallies.items())
        neurons = tuple(
            NeuronActivity(name, stage_of(name), total / elements, raster)
            for name, (total, elements, raster) in self.spikes.items()
        )
        return SpikeActivity(first.batch, layers, neurons)

    def observe(
        self, name: str, kind: str, inputs: list[Tensor], macs: int, events: float, steps: int, batch: int, once: bool
    ) -> None:
        """Adds a call: its inputs, and its multiply-adds and events for the whole batch at all steps."""
        tally = self.tallies.setdefault(name, Tally(stage_of(name), kind, once))
        if tally.once != once:
            raise ValueError(f'{name} gets an image at one time and frames at another')
        tally.batch += batch
        tally.step_samples += steps * batch
        tally.macs += macs
        tally.events += events
        tally.add(name, inputs[0])
        if len(inputs) > 1:
            tally.other = tally.other or Tally(tally.stage, kind)
            tally.other.add(name, inputs[1])

    def convolution(self, name: str) -> Callable[..., None]:
        def hook(module: SpikingConv, args: tuple, kwargs: dict) -> None:
            given = dict(zip(('x', 'steps'), args), **kwargs)
            x, steps = given['x'], given.get('steps')
            once = steps is not None
            steps, batch = (steps, x.shape[0]) if once else x.shape[:2]
            maps = x if once else x.flatten(0, 1)
            macs, events = convolution_macs(module.conv, maps), convolution_events(module.conv, maps)
            self.observe(name, 'convolution', [maps], macs, events, steps, batch, once)

        return hook

    def attention(self, name: str, module: SpikingAttention) -> Callable[..., None]:
        if not isinstance(module, (TokenQKAttention, ChannelQKAttention, SpikingSelfAttention)):
            raise ValueError(f'{name} is an attention whose operations are not known: {type(module).__name__}')

        def hook(_: SpikingConv, args: tuple, out: Tensor) -> None:
            operands = out.flatten(3).chunk(module.operands, 2)
            steps, batch, channels, tokens = operands[0].shape
            width = channels // module.heads
            call = dict(steps=steps, batch=batch, once=False)
            size = operands[0].numel()
            q, k, *rest = (x.reshape(steps, batch, module.heads, width, tokens) for x in operands)
            if not rest:
                axis = 3 if isinstance(module, TokenQKAttention) else 4
                self.observe(join(name, 'q'), 'sum', [q], size, float(q.count_nonzero()), **call)
                self.observe(join(name, 'k'), 'mask', [k], 0, 0.0, **call)
                self.count(join(name, 'neuron'), lif(q.sum(axis, keepdim=True), **module.neuron.settings()))
                return
            # The order of the operator: V K^T and then its product with Q, or K^T Q and then that of V with it.
            first, second, axis, length = ('v', q, 3, width) if width < tokens else ('q', rest[0], 4, tokens)
            pair = [k, rest[0] if first == 'v' else q]
            met = [(x != 0).sum(axis, dtype=torch.float64) for x in pair]
            macs, label = size * length, 'q' if first == 'v' else 'v'
            self.observe(join(name, f'k*{first}'), 'product', pair, macs, (met[0] * met[1]).sum().item(), **call)
            events = float(second.count_nonzero()) * length
            self.observe(join(name, label), 'product', [second], macs, events, **call)

        return hook

    def dense(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict, out: Tensor) -> None:
            x = next(iter((*args, *kwargs.values())))
            if x.numel():  # a detector may have no region
                self.observe(name, 'dense', [x], dense_macs(module, x, out), 0.0, 1, 1, False)

        return hook

    def neuron(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, out: Tensor | tuple[Tensor, Tensor]) -> None:
            self.count(name, out[0] if isinstance(out, tuple) else out)

        return hook

    def neuron_before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple) -> None:
            self.count(name, args[0])

        return hook

    def count(self, name: str, spikes: Tensor) -> None:
        """Adds spikes, (T, B, ...)."""
        if name not in self.spikes:
            row = spikes[:, 0].flatten(1)
            chosen = torch.linspace(0, row.shape[1] - 1, min(self.size, row.shape[1]), dtype=torch.float64)
            self.spikes[name] = [0.0, 0, row[:, chosen.round().long().to(row.device)].t().to('cpu', torch.uint8)]
        self.spikes[name][0] += spikes.sum(dtype=torch.float64).item()
        self.spikes[name][1] += spikes.numel()


def dense_macs(module: nn.Module, x: Tensor, out: Tensor) -> int:
    """Multiply-adds of a convolution of maps, or a linear map of vectors, from ``x`` to ``out``, padding included."""
    if isinstance(module, nn.Linear):
        return x.numel() * module.out_features
    taps = math.prod(module.kernel_size)
    if isinstance(module, nn.ConvTranspose2d):
        return x.numel() * taps * module.out_channels // module.groups
    return out.numel() * taps * module.in_channels // module.groups


def convolution_macs(conv: nn.Conv2d, x: Tensor) -> int:
    """Multiply-adds of a convolution of maps (N, C, H, W), padding included."""
    sizes = zip(x.shape[-2:], conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    taps = math.prod(conv.kernel_size) * conv.in_channels * conv.out_channels // conv.groups
    return x.shape[0] * math.prod(output_size(*size) for size in sizes) * taps


def convolution_events(conv: nn.Conv2d, x: Tensor) -> float:
    """Additions that the values of maps (N, C, H, W) other than 0 cause: for each the outputs that its position
    reaches, times the output channels of its group."""
    sizes = zip(x.shape[-2:], conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    rows, columns = (reach(*size).to(x.device) for size in sizes)
    counts = (x != 0).sum((0, 1), dtype=torch.float64)
    return (rows @ counts @ columns).item() * (conv.out_channels // conv.groups)


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def reach(size: int, kernel: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Outputs of a convolution along one axis that each of its ``size`` inputs reaches, float64."""
    starts = torch.arange(output_size(size, kernel, stride, padding, dilation)) * stride - padding
    taps = (starts[:, None] + torch.arange(kernel) * dilation).flatten()
    return taps[(taps >= 0) & (taps < size)].bincount(minlength=size).double()


def stage_of(name: str) -> str:
    found = re.search(r'(?:^|\.)(?:stem|stages\.(\d+))(?:\.|$)', name)
    if found is None:
        return name.split('.')[0]
    return 'stem' if found[1] is None else f'stage {int(found[1]) + 1}'


def join(*names: str) -> str:
    return '.'.join(filter(None, names))
