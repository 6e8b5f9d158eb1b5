"""Measure time and peak memory of lambda layers against public layers, and the time of networks with them.

Writes lambdas.md and lambdas.png next to this script; with --device cuda only the layers, to lambdas_cuda.md. k 16,
h 4, u 1, float32. Ratios within one run are comparable; absolute times are not. "forward" is inference, with batch norm
in evaluation mode; "both" is a training step, with the gradients of input and weights. Peak memory (memory.py) includes
the output and the tensors saved for backward, but neither input nor weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from lambda_networks import LambdaLayer as LambdaNetworksLayer
from matplotlib.figure import Figure
from timm.layers.lambda_layer import LambdaLayer as TimmLayer
from torch import Tensor, nn
from torchvision.models import resnet50

from memory import check_memory, in_own_processes, memory_of
from mmkron.converters.lambda_resnet import convert_lambda_networks
from mmkron.layers import LambdaLayer
from mmkron.models import LambdaResNet
from mmkron.ops.lambdas import content_matrix
from mmkron.ops.lambdas import position as lambdas
from timing import machine, medians, table

FOLDER = Path(__file__).resolve().parent
SCOPE, BATCH = 23, 4
# (channels, size) -> wanted speedup over the fastest public layer: forward, both.
GOALS = {(256, 14): (2, 4), (128, 28): (1.1, 1.5), (512, 32): (10, 8), (256, 64): (6, 6)}
SWEEP_CHANNELS, SWEEP_SIZES = 128, (7, 10, 14, 20, 28, 40, 56, 80, 128)
Figures = dict[tuple[str, int, int, str], float]  # (layer, channels, size, step) -> seconds or bytes


class Conv3dLayer(LambdaLayer):
    """Our layer with the position lambdas from one 3-D convolution, as in most public implementations."""

    def forward(self, x: Tensor) -> Tensor:
        batch, _, *size = x.shape
        query, key, value = self.qkv_map(x).split(self.widths, 1)
        query = self.query_norm(query).reshape(batch, self.heads, self.dim_key, *size)
        value = self.value_norm(value)[:, None]
        content = content_matrix(key[:, None], value)
        kernel = self.position_table.transpose(0, 1)[:, :, None]
        position = F.conv3d(value, kernel, padding=(0, *(side // 2 for side in kernel.shape[3:])))
        out = torch.einsum('bhkyx,bkvyx->bhvyx', query, position + content[..., None, None])
        return out.reshape(batch, self.dim_out, *size)


class LocalAttention(nn.Module):
    """Self-attention to the same square of positions with four heads, by torch's attention with a mask."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.qkv_map = nn.Conv2d(dim, 3 * dim, 1, bias=False)
        places = torch.arange(size)
        near = (places[:, None] - places).abs() <= SCOPE // 2
        mask = near[:, None, :, None] & near[None, :, None, :]
        self.register_buffer('mask', mask.reshape(size**2, size**2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.flatten(2).unflatten(1, (4, -1)).mT for part in self.qkv_map(x).chunk(3, 1))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask).mT.reshape(x.shape)


OURS = 'mmkron'
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    OURS: lambda dim, size: LambdaLayer(dim, scope=SCOPE),
    'timm': lambda dim, size: TimmLayer(dim, r=SCOPE),
    'lambda-networks': lambda dim, size: LambdaNetworksLayer(dim=dim, dim_k=16, r=SCOPE),
    'conv3d': lambda dim, size: Conv3dLayer(dim, scope=SCOPE),
}
OTHERS: dict[str, Callable[[int, int], nn.Module]] = {
    'timm, global': lambda dim, size: TimmLayer(dim, r=None, feat_size=size),
    'local attention': LocalAttention,
}


def build(name: str, channels: int, size: int) -> nn.Module:
    torch.manual_seed(0)
    return {**LAYERS, **OTHERS}[name](channels, size)


def forward_step(module: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        module.eval()(x)
    finish(x)


def both_step(module: nn.Module, x: Tensor) -> None:
    module.train().zero_grad(set_to_none=True)
    out = module(x.detach().requires_grad_())
    out = out[-1] if isinstance(out, tuple) else out
    out.backward(torch.ones_like(out))
    finish(x)


def finish(x: Tensor) -> None:
    """Wait for a GPU."""
    if x.is_cuda:
        torch.cuda.synchronize()


STEPS = {'forward': forward_step, 'both': both_step}


def image(batch: int, channels: int, size: int) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def check_peers() -> None:
    """Check that the layers compute the same from the same weights."""
    theirs = build('lambda-networks', 32, 20).double().eval()
    state = convert_lambda_networks(theirs.state_dict())
    bias = state.pop('position_bias')
    theirs.pos_conv.bias.sub_(bias)
    x = image(2, 32, 20).double()
    for name in (OURS, 'conv3d'):
        ours = build(name, 32, 20).double().eval()
        ours.load_state_dict(state)
        torch.testing.assert_close(ours(x), theirs(x))


def measure_time(cases: list[tuple[str, int, int]], batch: int, rounds: int, device: str = 'cpu') -> Figures:
    """Measure all layers; layers on equal maps take turns."""
    figures: Figures = {}
    for channels, size in dict.fromkeys(case[1:] for case in cases):
        x = image(batch, channels, size).to(device)
        names = [name for name, *rest in cases if tuple(rest) == (channels, size)]
        layers = {name: build(name, channels, size).to(device) for name in names}
        for step, run in STEPS.items():
            forms = {name: partial(run, layer, x) for name, layer in layers.items()}
            for name, seconds in medians(forms, rounds=rounds, least=0.01).items():
                figures[name, channels, size, step] = seconds
                print(name, channels, size, step, f'{1e3 * seconds:.1f} ms', flush=True)
    return figures


def peak(case: tuple[str, int, int, int, str]) -> int:
    """Return the peak memory of one step of one layer, on one thread."""
    torch.set_num_threads(1)
    check_memory()
    name, batch, channels, size, step = case
    layer = build(name, channels, size)
    if name in LAYERS:
        STEPS[step](layer, image(1, channels, 4))
        layer.zero_grad(set_to_none=True)
    x = image(batch, channels, size)
    return memory_of(partial(STEPS[step], layer, x))


def measure_memory(cases: list[tuple[str, int, int]], batch: int) -> Figures:
    figures: Figures = {}
    keys = [(name, batch, channels, size, step) for name, channels, size in cases for step in STEPS]
    for (name, _, channels, size, step), value in in_own_processes(peak, keys):
        figures[name, channels, size, step] = value
        print(name, channels, size, step, f'{1e-6 * value:.1f} MB', flush=True)
    return figures


def measure_cuda_memory(cases: list[tuple[str, int, int]], batch: int) -> Figures:
    figures: Figures = {}
    for name, channels, size in cases:
        layer, x = build(name, channels, size).cuda(), image(batch, channels, size).cuda()
        for step, run in STEPS.items():
            run(layer, x)
            layer.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(layer, x)
            figures[name, channels, size, step] = torch.cuda.max_memory_allocated() - before
            layer.zero_grad(set_to_none=True)
    return figures


def compare_layers(times: dict[int, Figures], held: Figures) -> str:
    """Return one table per map: times at each number of threads, memory, and their ratios to ours."""
    text = ''
    for channels, size in GOALS:
        rows = []
        for name in (*LAYERS, *OTHERS):
            if (name, channels, size, 'both') not in held:
                continue
            row = [name]
            for threads in times:
                for step in STEPS:
                    seconds = times[threads][name, channels, size, step]
                    ratio = seconds / times[threads][OURS, channels, size, step]
                    row.append(f'{1e3 * seconds:.1f} ({ratio:.2f})')
            for step in STEPS:
                value = held[name, channels, size, step]
                row.append(f'{1e-6 * value:.1f} ({value / held[OURS, channels, size, step]:.2f})')
            rows.append(row)
        header = ['layer', *(f'{step} ms, {n} thread(s)' for n in times for step in STEPS)]
        header += [f'{step} MB' for step in STEPS]
        text += f'\n### ({BATCH}, {channels}, {size}, {size})\n\n{table(header, rows)}\n'
    return text


def goals(times: dict[int, Figures], held: Figures) -> str:
    """Judge the goals by the figures of two threads; peers are the public layers and the 3-D convolution."""
    rows = []
    peers = [name for name in LAYERS if name != OURS]
    figures = times[max(times)]
    for (channels, size), wanted in GOALS.items():
        for goal, step in zip(wanted, STEPS):
            best = min(peers, key=lambda name: figures[name, channels, size, step])
            ratio = figures[best, channels, size, step] / figures[OURS, channels, size, step]
            less = min(held[name, channels, size, step] for name in peers) / held[OURS, channels, size, step]
            case, verdict = f'({channels}, {size}), {step}', 'met' if ratio >= goal else 'not met'
            rows.append([case, str(goal), f'{ratio:.2f}', best, verdict, f'{less:.2f}'])
    header = ['layer, step', 'speedup, at least', 'measured', 'fastest peer', 'verdict', 'memory of the smallest peer']
    return table(header, rows)


def never_slower(seconds: Figures, held: Figures) -> str:
    """Return the ratio of the best peer to ours at each map size of the sweep, and whether it is ever below 1."""
    peers = [name for name in LAYERS if name != OURS]
    columns = {
        'time, forward': (seconds, 'forward'),
        'time, both': (seconds, 'both'),
        'memory, forward': (held, 'forward'),
        'memory, both': (held, 'both'),
    }
    ratios = {
        title: [
            min(figures[name, SWEEP_CHANNELS, size, step] for name in peers) / figures[OURS, SWEEP_CHANNELS, size, step]
            for size in SWEEP_SIZES
        ]
        for title, (figures, step) in columns.items()
    }
    lines = []
    for title, values in ratios.items():
        misses = [f'{size} ({value:.2f})' for size, value in zip(SWEEP_SIZES, values) if value < 1]
        verdict = f'**Not met** at {", ".join(misses)}' if misses else '**Met**'
        lines.append(f'- {title}, no more than the best peer at any size: {verdict}')
    rows = [[f'{size} x {size}', *(f'{of[i]:.2f}' for of in ratios.values())] for i, size in enumerate(SWEEP_SIZES)]
    return '\n'.join(lines) + '\n\n' + table(['map', *columns], rows)


def compare_networks() -> str:
    """Measure networks on 224 x 224, in milliseconds per image."""

    def convolved(module: nn.Module) -> nn.Module:
        """Compute all position lambdas of the module by convolution."""
        inner, chosen = module.forward, lambdas.choose_form

        def forward(x: Tensor) -> Tensor:
            lambdas.choose_form = lambda *_: 'conv'
            try:
                return inner(x)
            finally:
                lambdas.choose_form = chosen

        module.forward = forward
        return module

    def layout(letters: str) -> LambdaResNet:
        return LambdaResNet(50, stage_layers=letters, skeleton='v1.5')

    torch.manual_seed(0)
    networks = {
        'ResNet-50 (torchvision)': resnet50(),
        'LambdaResNet-50, CCCL': layout('CCCL'),
        'LambdaResNet-50, CCLL': layout('CCLL'),
        'LambdaResNet-50, LLLL': layout('LLLL'),
        'LambdaResNet-50, LLLL, by convolution': convolved(layout('LLLL')),
        'LambdaResNet-50 (rs)': LambdaResNet(50),
    }
    x = image(2, 3, 224)
    figures = {}
    for step, run in STEPS.items():
        figures[step] = medians({name: partial(run, net, x) for name, net in networks.items()}, rounds=3, least=0)
        print(step, figures[step], flush=True)
    rows = []
    for name in networks:
        seconds = [figures[step][name] for step in STEPS]
        ratios = [f'{figures[step][name] / figures[step]["ResNet-50 (torchvision)"]:.2f}' for step in STEPS]
        rows.append([name, *(f'{500 * value:.0f}' for value in seconds), *ratios])
    header = ['network', *(f'{step} ms per image' for step in STEPS), *(f'times ResNet-50, {step}' for step in STEPS)]
    return table(header, rows)


def draw(path: Path, seconds: Figures, held: Figures) -> None:
    """Plot time and memory against the size of the map."""
    figure = Figure(figsize=(11, 4.5), layout='constrained')
    axes = figure.subplots(1, 3)
    panels = [(seconds, 'forward', 1e3, 'median time, forward, ms'), (seconds, 'both', 1e3, 'training step, ms')]
    panels.append((held, 'both', 1e-6, 'peak memory, training step, MB'))
    for axis, (figures, step, factor, title) in zip(axes, panels):
        for name, marker in zip(LAYERS, 'osd^'):
            values = [factor * figures[name, SWEEP_CHANNELS, size, step] for size in SWEEP_SIZES]
            axis.plot(SWEEP_SIZES, values, marker=marker, label=name)
        axis.set(xscale='log', yscale='log', title=title, xlabel='height and width of the map')
        axis.set_xticks(SWEEP_SIZES, [str(size) for size in SWEEP_SIZES], minor=False)
        axis.tick_params(axis='x', labelsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f'Lambda layers, ({BATCH}, {SWEEP_CHANNELS}, H, W), k 16, h 4, r {SCOPE}, float32, CPU, one thread')
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    device = parser.parse_args().device
    check_peers()
    named = [(name, *case) for case in GOALS for name in LAYERS]
    named += [('timm, global', 256, 14), *(('local attention', *case) for case in GOALS)]
    if device == 'cuda':
        held, times = measure_cuda_memory(named, BATCH), {1: measure_time(named, BATCH, rounds=9, device=device)}
        text = (
            f'# Lambda layers on {torch.cuda.get_device_name()}\n\n{goals(times, held)}\n{compare_layers(times, held)}'
        )
        (FOLDER / 'lambdas_cuda.md').write_text(text)
        print(text)
        return
    sweep = [(name, SWEEP_CHANNELS, size) for size in SWEEP_SIZES for name in LAYERS]
    held = measure_memory(named, BATCH)
    held_sweep = measure_memory(sweep, BATCH)
    times = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times[threads] = measure_time(named, BATCH, rounds=5)
    torch.set_num_threads(1)
    seconds_sweep = measure_time(sweep, BATCH, rounds=5)
    draw(FOLDER / 'lambdas.png', seconds_sweep, held_sweep)
    text = f"""# Lambda layers

{machine()}; two threads where stated.
k 16, h 4, u 1, r {SCOPE}, float32. Medians of 5 rounds in which the layers take turns. "forward" is inference, "both" a
training step of the layer. In brackets: the ratio to ours. The goals are for two threads.

{goals(times, held)}

## Layers
{compare_layers(times, held)}
"timm, global" has a table for the whole map instead of a scope. "local attention" is torch's attention with a mask
of the same {SCOPE} x {SCOPE} positions, four heads.

## Against the best peer at each map size, ({BATCH}, {SWEEP_CHANNELS}, H, W), one thread

Ratio of the best peer (public layers and the 3-D convolution) to ours; above 1, ours takes less.

{never_slower(seconds_sweep, held_sweep)}

## Networks, 224 x 224, batch 2, one thread

{compare_networks()}
"""
    (FOLDER / 'lambdas.md').write_text(text)
    print(text)


if __name__ == '__main__':
    main()
