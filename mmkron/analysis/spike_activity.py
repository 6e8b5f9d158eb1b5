"""Measurement of spiking networks on data: hooks that record the inputs of layers and count spikes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mmkron.analysis.spike_energy import (
    LayerActivity,
    NeuronActivity,
    SpikeActivity,
    convolution_events,
    convolution_macs,
    dense_macs,
)
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
from mmkron.ops.spiking import multiplies_values_first
from mmkron.utils.checks import check_int

DENSE = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


@torch.no_grad()
def measure_activity(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    raster: int = 32,
) -> SpikeActivity:
    """Run a network on batches, and measure the inputs of its layers and the firing rates of its neurons.

    All hooks are removed from the network, also after an error. Sums are float64.

    Args:
        model: Network in evaluation mode with at least one :class:`mmkron.layers.SpikingConv`, such as a QKFormer.
        batches: Batches of any form that ``forward`` accepts.
        forward: Function that runs the network on a batch, such as ``lambda model, batch: model.val_step(batch)`` for
            OpenMMLab's models. Defaults to ``model(batch)``.
        raster: Number of neurons of each layer, evenly spaced, whose spikes are kept.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If the network is in training mode, has no spiking layer or an attention of unknown kind, no batch
            is given, no spiking layer runs, or an input is not finite.

    Examples:
        >>> from mmkron.models import QKFormer
        >>> model = QKFormer('cifar', steps=2).eval()
        >>> activity = measure_activity(model, [torch.rand(1, 3, 32, 32)])
        >>> activity.total('strict').energy > 0
        True
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
    """Sums over the calls of a layer. ``other`` holds the sums of a second operand."""

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
        """Add an input of any shape."""
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
        """Return the means over all samples."""
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
    """Hooks that keep a :class:`Tally` of each layer and count the spikes of neurons."""

    def __init__(self, raster: int) -> None:
        self.size = raster
        self.tallies: dict[str, Tally] = {}
        self.spikes: dict[str, list] = {}  # sum, number of elements and raster of each layer of neurons

    def attach(self, model: nn.Module) -> Iterable[Any]:
        """Register the hooks one by one and yield their handles."""
        inside: set[nn.Module] = set()  # parts of layers that have a hook themselves
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
        """Return the measured activity."""
        first = next((tally for tally in self.tallies.values() if tally.kind != 'dense'), None)
        if first is None:
            raise ValueError('no spiking layer of the model ran: batches is empty, or they do not reach one')
        layers = tuple(tally.layer(name, first.batch) for name, tally in self.tallies.items())
        neurons = tuple(
            NeuronActivity(name, stage_of(name), total / elements, raster)
            for name, (total, elements, raster) in self.spikes.items()
        )
        return SpikeActivity(first.batch, layers, neurons)

    def observe(
        self, name: str, kind: str, inputs: list[Tensor], macs: int, events: float, steps: int, batch: int, once: bool
    ) -> None:
        """Add a call: its inputs, and its multiply-adds and events for the whole batch over all steps."""
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
        """Return a hook that observes the input of a spiking convolution."""

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
        """Return a hook that observes the operands of an attention, the output of its ``operand_map``."""
        if not isinstance(module, (TokenQKAttention, ChannelQKAttention, SpikingSelfAttention)):
            raise ValueError(f'{name} is an attention whose operations are not known: {type(module).__name__}')

        def hook(_: SpikingConv, args: tuple, out: Tensor) -> None:
            operands = (x.unflatten(2, (module.heads, -1)) for x in out.flatten(3).chunk(module.operands, 2))
            if isinstance(module, SpikingSelfAttention):
                self.products(name, *operands)
            else:
                self.mask(name, module, *operands)

        return hook

    def mask(self, name: str, module: SpikingAttention, q: Tensor, k: Tensor) -> None:
        """Add the operands (T, B, heads, C / heads, N) of a Q-K attention, and the spikes of its mask."""
        call = dict(steps=q.shape[0], batch=q.shape[1], once=False)
        self.observe(join(name, 'q'), 'sum', [q], q.numel(), float(q.count_nonzero()), **call)
        self.observe(join(name, 'k'), 'mask', [k], 0, 0.0, **call)
        axis = 3 if isinstance(module, TokenQKAttention) else 4
        self.count(join(name, 'neuron'), lif(q.sum(axis, keepdim=True), **module.neuron.settings()))

    def products(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add the two products of a spiking self-attention of operands (T, B, heads, C / heads, N)."""
        call = dict(steps=q.shape[0], batch=q.shape[1], once=False)
        width, tokens = q.shape[3:]
        if multiplies_values_first(width, tokens):
            first, second, other, last, axis, length = 'v', 'q', v, q, 3, width
        else:
            first, second, other, last, axis, length = 'q', 'v', q, v, 4, tokens
        # Spikes meet within a token for V K^T, within a channel for K^T Q.
        macs = q.numel() * length
        counts = [(x != 0).sum(axis, dtype=torch.float64) for x in (k, other)]
        events = (counts[0] * counts[1]).sum().item()
        self.observe(join(name, f'k*{first}'), 'product', [k, other], macs, events, **call)
        events = float(last.count_nonzero()) * length
        self.observe(join(name, second), 'product', [last], macs, events, **call)

    def dense(self, name: str) -> Callable[..., None]:
        """Return a hook that observes the input of a layer that is not spiking."""

        def hook(module: nn.Module, args: tuple, kwargs: dict, out: Tensor) -> None:
            x = next(iter((*args, *kwargs.values())))
            if x.numel():  # a detector may find no region
                self.observe(name, 'dense', [x], dense_macs(module, x, out), 0.0, 1, 1, False)

        return hook

    def neuron(self, name: str) -> Callable[..., None]:
        """Return a hook that counts the spikes that neurons output."""

        def hook(module: nn.Module, args: tuple, out: Tensor | tuple[Tensor, Tensor]) -> None:
            self.count(name, out[0] if isinstance(out, tuple) else out)

        return hook

    def neuron_before(self, name: str) -> Callable[..., None]:
        """Return a hook that counts the spikes that a layer receives."""

        def hook(module: nn.Module, args: tuple) -> None:
            self.count(name, args[0])

        return hook

    def count(self, name: str, spikes: Tensor) -> None:
        """Add spikes (T, B, ...)."""
        if name not in self.spikes:
            row = spikes[:, 0].flatten(1)
            chosen = torch.linspace(0, row.shape[1] - 1, min(self.size, row.shape[1]), dtype=torch.float64)
            self.spikes[name] = [0.0, 0, row[:, chosen.round().long().to(row.device)].t().to('cpu', torch.uint8)]
        self.spikes[name][0] += spikes.sum(dtype=torch.float64).item()
        self.spikes[name][1] += spikes.numel()


def stage_of(name: str) -> str:
    """Return the stage of a module, by its name."""
    found = re.search(r'(?:^|\.)(?:stem|stages\.(\d+))(?:\.|$)', name)
    if found is None:
        return name.split('.')[0]
    return 'stem' if found[1] is None else f'stage {int(found[1]) + 1}'


def join(*names: str) -> str:
    """Join the names that are not empty with dots."""
    return '.'.join(filter(None, names))
