"""Time and peak memory of spiking neurons, and of QKFormer with them, against SpikingJelly and the plain loop.

Writes lif.md next to this script. T 4, float32, on the CPU, and on CUDA if it is present. Ratios within
one run count; absolute times do not. "forward" is inference, "both" a training step with the gradient of the input. The
loop is :func:`mmkron.ops.neurons.neuron.lif_loop`, the equations with torch's own differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from spikingjelly.activation_based import functional, neuron
from torch import Tensor, nn

from memory import check_memory, in_own_processes, memory_of
from mmkron.layers import LIF
from mmkron.models import QKFormer
from mmkron.ops import lif, spiking
from mmkron.ops.neurons.neuron import lif_loop, resolve_neuron
from timing import machine, medians, table

FOLDER = Path(__file__).resolve().parent
SHAPE = (4, 8, 96, 56, 56)
# How many times as fast as SpikingJelly and as the loop we want to be, forward and both.
GOALS = {'SpikingJelly': (4, 3), 'loop': (2.2, 2.5)}
OURS = 'mmkron'


def loop(x: Tensor, **settings: Any) -> Tensor:
    return lif_loop(x, None, resolve_neuron(**settings))[0]


def spikingjelly(x: Tensor, node: nn.Module) -> Tensor:
    functional.reset_net(node)
    return node(x)


def forms() -> dict[str, Callable[[Tensor], Tensor]]:
    node = neuron.LIFNode(tau=2.0, detach_reset=True, step_mode='m')
    return {OURS: lif, 'SpikingJelly': partial(spikingjelly, node=node), 'loop': loop}


def forward_step(form: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        form(x)
    finish(x)


def both_step(form: Callable[[Tensor], Tensor], x: Tensor) -> None:
    y = x.detach().requires_grad_()
    out = form(y)
    out.backward(x.expand_as(out) if out.shape == x.shape else torch.ones_like(out))
    finish(x)


def finish(x: Tensor) -> None:
    """Waits for a GPU."""
    if x.is_cuda:
        torch.cuda.synchronize()


STEPS = {'forward': forward_step, 'both': both_step}


def check_peers() -> None:
    """All forms give the same spikes and gradients."""
    x = 1.5 * torch.randn(4, 3, 8, 9, 10, dtype=torch.float64)
    results = []
    for form in forms().values():
        y = x.clone().requires_grad_()
        out = form(y)
        results.append((out, *torch.autograd.grad(out, y, x)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def peak(case: tuple[str, str]) -> int:
    """Peak memory of one step."""
    torch.set_num_threads(1)
    check_memory()
    name, step = case
    form = forms()[name]
    STEPS[step](form, torch.randn(4, 3, 5))
    return memory_of(partial(STEPS[step], form, torch.randn(SHAPE)))


class PlainNeuron(nn.Module):
    """A LIF neuron by the loop."""

    def __init__(self, neuron: LIF) -> None:
        super().__init__()
        self.settings = neuron.settings

    def forward(self, x: Tensor) -> Tensor:
        return loop(x, **self.settings())


class PlainNetwork(nn.Module):
    """HST-10-384 with the loop for its neurons and the image repeated before the first convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.network = QKFormer('hst-10-384')
        for part in [*self.network.modules()]:
            if isinstance(getattr(part, 'neuron', None), LIF):
                part.neuron = PlainNeuron(part.neuron)

    def forward(self, x: Tensor) -> Tensor:
        fast, spiking.lif = spiking.lif, loop
        try:
            return self.network(x[:, None].repeat(1, self.network.steps, 1, 1, 1))[0]
        finally:
            spiking.lif = fast


def network(plain: bool) -> nn.Module:
    torch.manual_seed(0)
    return (PlainNetwork() if plain else QKFormer('hst-10-384')).train()


def training_step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    out = model(x)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def network_peak(plain: bool) -> int:
    torch.set_num_threads(1)
    model, x = network(plain), torch.randn(2, 3, 224, 224)
    training_step(model, torch.randn(1, 3, 32, 32))
    model.zero_grad(set_to_none=True)
    return memory_of(partial(training_step, model, x))


def verdict(met: bool) -> str:
    return 'met' if met else 'not met'


def compare_neurons(device: str, threads: tuple[int, ...]) -> tuple[str, list[list[str]]]:
    """Return a table of times and the rows of the goals."""
    x = torch.randn(SHAPE, device=device)
    rows, goals = {name: [name] for name in forms()}, []
    for count in threads:
        torch.set_num_threads(count)
        for index, (step, run) in enumerate(STEPS.items()):
            seconds = medians({name: partial(run, form, x) for name, form in forms().items()}, rounds=9, least=0)
            for name, value in seconds.items():
                rows[name].append(f'{1e3 * value:.1f} ({value / seconds[OURS]:.2f})')
            for peer, wanted in GOALS.items():
                ratio = seconds[peer] / seconds[OURS]
                goal = f'time of {peer}, {step}, {count} thread(s), {device}'
                goals.append([goal, str(wanted[index]), f'{ratio:.2f}', verdict(ratio >= wanted[index])])
    header = ['neurons', *(f'{step} ms, {count} thread(s)' for count in threads for step in STEPS)]
    return table(header, list(rows.values())), goals


def main() -> None:
    check_peers()
    cases = [(name, step) for name in forms() for step in STEPS]
    held = dict(in_own_processes(peak, cases))
    networks = dict(in_own_processes(network_peak, [False, True]))
    times, goals = compare_neurons('cpu', (1, 2))
    if torch.cuda.is_available():
        cuda, more = compare_neurons('cuda', (1,))
        times, goals = f'{times}\n\nOn {torch.cuda.get_device_name()}:\n\n{cuda}', goals + more
    torch.set_num_threads(1)
    x = torch.randn(2, 3, 224, 224)
    models = {plain: network(plain) for plain in (False, True)}
    seconds = medians({plain: partial(training_step, model, x) for plain, model in models.items()}, rounds=3, least=0)
    ratio = held['loop', 'both'] / held[OURS, 'both']
    goals.append(['memory of the loop, both', '2', f'{ratio:.2f}', verdict(ratio >= 2)])
    faster, smaller = seconds[True] / seconds[False], 1 - networks[False] / networks[True]
    goals.append(['time of HST-10-384 with the loop, both', '1.3', f'{faster:.2f}', verdict(faster >= 1.3)])
    goals.append(['memory saved in HST-10-384, both', '30 %', f'{100 * smaller:.0f} %', verdict(smaller >= 0.3)])
    memory = [[name, *(f'{1e-6 * held[name, step]:.0f}' for step in STEPS)] for name in forms()]
    nets = [
        [name, f'{seconds[plain]:.2f}', f'{1e-6 * networks[plain]:.0f}']
        for name, plain in (('QKFormer', False), ('with the loop, image repeated', True))
    ]
    text = f"""# Spiking neurons

{machine()}; two threads where stated. float32.
Medians of rounds in which the forms take turns. "forward" is inference, "both" a training step. In brackets: the ratio
to ours. The goals are ratios to ours, too.

{table(['goal', 'at least', 'measured', 'verdict'], goals)}

## LIF on {SHAPE}

{times}

Peak memory in MB, with the output and what the backward pass needs, without the input:

{table(['neurons', *STEPS], memory)}

## HST-10-384, 224 x 224, batch 2, T 4, one thread

{table(['network', 'training step, s', 'peak memory, MB'], nets)}
"""
    (FOLDER / 'lif.md').write_text(text)
    print(text)


if __name__ == '__main__':
    main()
