"""Report firing rates and energy of a spiking network on its validation data, in three conventions.

    python tools/analysis_tools/energy.py CONFIG CHECKPOINT

The model of the config, of MMPretrain, MMSegmentation or MMDetection, must have spiking layers of mmkron, such as a
mmkron.QKFormer. The tool prints a table and writes energy.json, energy.png (millijoules of each block) and activity.png
(firing rates, and the spikes of some neurons for one sample). mmkron.analysis.spike_energy defines what is counted.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from mmengine.logging import MMLogger
from mmengine.runner import Runner

from mmkron import data_checks
from mmkron.analysis import LayerActivity, Operations, SpikeActivity, measure_activity
from mmkron.analysis.spike_energy import AC_PJ, CONVENTIONS, MAC_PJ
from mmkron.engine import runner as launch
from mmkron.layers import SpikingConv
from mmkron.utils import cli
from mmkron.utils.errors import LaunchError

MEANING = {
    'paper': 'mean of the input x multiply-adds x T accumulates; sums of spikes count with their value',
    'strict': 'inputs that are not exactly 0 or 1 cost all multiply-adds',
    'events': 'inputs other than 0, whatever their value, x the outputs that each reaches',
}
COLORS = {'paper': 'tab:blue', 'strict': 'tab:orange', 'events': 'tab:green'}
# The end of a layer's name, after the name of its block.
PARTS = re.compile(r'\.(convs\.\d+|shortcut|operand_map|project|expand|[qkv]|k\*[qv])$')


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_common_arguments(parser, distributed=False)
    parser.add_argument('checkpoint', help="checkpoint file or URL; 'none' for initial weights")
    batches = 'number of batches of val_dataloader; default: %(default)s'
    parser.add_argument('--batches', type=int, default=8, metavar='N', help=batches)
    out = 'folder of the report; default: %(default)s'
    parser.add_argument('--out', default='work_dirs/energy', metavar='DIR', help=out)
    parser.add_argument('--device', default='cpu', help='device of the model; default: %(default)s')
    return parser.parse_args(argv)


def is_silent(layer: LayerActivity) -> bool:
    """Return whether all inputs were 0, so that it is unknown whether they are binary."""
    return layer.values == 'binary' and not layer.maximum


def describe_values(layer: LayerActivity) -> str:
    return f'0..{layer.maximum:.0f}' if layer.values == 'integer' else '0' if is_silent(layer) else layer.values


def describe_first(layer: LayerActivity) -> str:
    """Return the kind of input of the first convolution, and how often it runs."""
    if layer.once:
        return f'an image, the same at all {layer.steps:g} steps: computed once, {MAC_PJ} pJ per multiply-add'
    what = {
        'binary': 'binary events',
        'integer': f'event counts up to {layer.maximum:.0f}',
        'real': f'real values: {MAC_PJ} pJ per multiply-add',
    }[layer.values]
    return f'frames of {what}, computed at each of {layer.steps:g} steps'


def unit_of(activity: SpikeActivity) -> tuple[str, float]:
    """Return a unit for the energies of a network, and how many of it are a millijoule."""
    return ('mJ', 1.0) if activity.total('paper').energy >= 0.1 else ('uJ', 1e3)


def table(activity: SpikeActivity) -> str:
    """Return layers with their inputs and energies, and the totals, as aligned text."""
    unit, scale = unit_of(activity)
    titles = [f'{name} ({unit})' for name in CONVENTIONS]
    rows = [['layer', 'kind', 'T', 'MACs (M)', 'mean', 'non-zero', 'input', *titles]]
    for layer in activity.layers:
        times = f'1 of {layer.steps:g}' if layer.once else '-' if layer.kind == 'dense' else f'{layer.steps:g}'
        energies = [f'{layer.operations(name).energy * scale:.4f}' for name in CONVENTIONS]
        numbers = [f'{layer.macs / 1e6:.3f}', f'{layer.mean:.4f}', f'{layer.nonzero:.2%}', describe_values(layer)]
        rows.append([layer.name, layer.kind, times, *numbers, *energies])
    stages = dict.fromkeys(layer.stage for layer in activity.layers if layer.kind != 'dense')
    for title, stage in (*((stage, stage) for stage in stages), ('total', None)):
        energies = [f'{activity.total(name, stage).energy * scale:.4f}' for name in CONVENTIONS]
        macs = sum(x.macs for x in activity.layers if stage in (None, x.stage) and x.kind != 'dense')
        rows.append([f'= {title}', '', '', f'{macs / 1e6:.3f}', '', '', '', *energies])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append('  '.join(cells).rstrip())
    return '\n'.join(lines)


def summary(activity: SpikeActivity) -> str:
    """Return text on the inputs, the conventions and the firing rates."""
    layers = [layer for layer in activity.layers if layer.kind != 'dense']
    unit, scale = unit_of(activity)
    lines = [f'first convolution: {describe_first(layers[0])}']
    for title, kind in (('exactly 0 or 1', 'binary'), ('sums of spikes or counts', 'integer'), ('real', 'real')):
        names = [
            f'{x.name} ({describe_values(x)})' if kind == 'integer' else x.name
            for x in layers
            if x.values == kind and not is_silent(x)
        ]
        lines.append(f'inputs {title}: {", ".join(names) or "none"}')
    if silent := [x.name for x in layers if is_silent(x)]:
        lines.append(f'inputs that were always 0: {", ".join(silent)}')
    dense = Operations.total(x.operations('paper') for x in activity.layers if x.kind == 'dense')
    names = list(dict.fromkeys(x.stage for x in activity.layers if x.kind == 'dense'))
    if names:
        cost = f'{dense.macs / 1e6:.3f} M multiply-adds, {dense.energy * scale:.4f} {unit}'
        lines.append(f'dense layers ({", ".join(names)}) are not in the totals: {cost}')
    lines += [f'{name}: {MEANING[name]}' for name in CONVENTIONS]
    lines += [f'firing rate of {stage}: {rate:.4f}' for stage, rate in stage_rates(activity).items()]
    lines = [textwrap.fill(line, 120, subsequent_indent='  ', break_long_words=False) for line in lines]
    return '\n'.join(lines)


def stage_rates(activity: SpikeActivity) -> dict[str, float]:
    """Return the mean rate of the neuron layers of each stage."""
    rates: dict[str, list[float]] = {}
    for neuron in activity.neurons:
        rates.setdefault(neuron.stage, []).append(neuron.rate)
    return {stage: sum(values) / len(values) for stage, values in rates.items()}


def as_dict(activity: SpikeActivity) -> dict[str, Any]:
    """Return all figures; operations and energies (mJ) are per sample."""

    def costs(of: dict[str, Operations]) -> dict[str, Any]:
        return {
            name: dict(accumulates=parts.accumulates, macs=parts.macs, mJ=parts.energy) for name, parts in of.items()
        }

    spiking = [layer for layer in activity.layers if layer.kind != 'dense']
    dense = Operations.total(x.operations('paper') for x in activity.layers if x.kind == 'dense')
    stages = dict.fromkeys(layer.stage for layer in spiking)
    return dict(
        samples=activity.samples,
        pJ=dict(mac=MAC_PJ, accumulate=AC_PJ),
        conventions=MEANING,
        first_convolution=describe_first(spiking[0]),
        total=costs({name: activity.total(name) for name in CONVENTIONS}),
        dense_not_in_total=dict(macs=dense.macs, mJ=dense.energy),
        stages={stage: costs({name: activity.total(name, stage) for name in CONVENTIONS}) for stage in stages},
        rates=stage_rates(activity),
        layers=[
            dict(layer._asdict(), cost=costs({name: layer.operations(name) for name in CONVENTIONS}))
            for layer in activity.layers
        ],
        neurons=[dict(name=neuron.name, stage=neuron.stage, rate=neuron.rate) for neuron in activity.neurons],
    )


def block_energies(activity: SpikeActivity) -> dict[str, dict[str, float]]:
    """Return the mJ of each block by convention; the convolution of an image and dense layers are separate blocks."""
    blocks: dict[str, list[LayerActivity]] = {}
    for layer in activity.layers:
        name = PARTS.sub('', layer.name)
        if layer.kind == 'dense':
            name = f'{layer.stage}, dense (not in the total)'
        elif layer.once:
            name = f'{layer.name} (image, once)'
        blocks.setdefault(name, []).append(layer)
    return {
        block: {name: Operations.total(layer.operations(name) for layer in layers).energy for name in CONVENTIONS}
        for block, layers in blocks.items()
    }


def draw_energy(activity: SpikeActivity) -> Figure:
    """Draw the energy of each block in the three conventions, in the order of the network."""
    blocks, (unit, scale) = block_energies(activity), unit_of(activity)
    figure = Figure((9, 1.5 + 0.42 * len(blocks)), dpi=120, layout='constrained')
    axes = figure.add_subplot()
    for index, convention in enumerate(CONVENTIONS):
        total = activity.total(convention).energy * scale
        places = [row + 0.27 * (index - 1) for row in range(len(blocks))]
        values = [energies[convention] * scale for energies in blocks.values()]
        bars = axes.barh(
            places, values, 0.25, color=COLORS[convention], label=f'{convention}: {total:.3g} {unit} in total'
        )
        axes.bar_label(bars, [f'{value:.2g}' for value in values], padding=2, fontsize=6.5)
    axes.set_yticks(range(len(blocks)), list(blocks), fontsize=8)
    axes.set_ylim(len(blocks) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.set_xlabel(f'energy per sample ({unit})')
    axes.set_title(f'Mean of {activity.samples} samples', fontsize=10)
    axes.grid(axis='x', alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
    figure.legend(loc='outside lower center', ncols=3, fontsize=9, frameon=False)
    return figure


def draw_activity(activity: SpikeActivity) -> Figure:
    """Draw the firing rate of each neuron layer by stage, and spikes of some neurons of the last layer."""
    stages: dict[str, list] = {}
    for neuron in activity.neurons:
        stages.setdefault(neuron.stage, []).append(neuron)
    heights = [max(1.9, 0.5 + 0.19 * len(neurons)) for neurons in stages.values()]
    figure = Figure((10, 0.6 + sum(heights)), dpi=120, layout='constrained')
    grid = figure.add_gridspec(len(stages), 2, width_ratios=(1.6, 1), height_ratios=heights)
    highest = max(neuron.rate for neuron in activity.neurons)
    for row, ((stage, mean), neurons) in enumerate(zip(stage_rates(activity).items(), stages.values())):
        axes = figure.add_subplot(grid[row, 0])
        bars = axes.barh(range(len(neurons)), [neuron.rate for neuron in neurons], 0.7, color=f'C{row}')
        axes.bar_label(bars, [f'{neuron.rate:.3f}' for neuron in neurons], padding=2, fontsize=6.5)
        axes.set_yticks(range(len(neurons)), [neuron.name for neuron in neurons], fontsize=6.5)
        axes.set_ylim(len(neurons) - 0.4, -0.6)
        axes.set_xlim(0, 1.12 * highest or 1)
        axes.set_title(f'{stage}: mean rate {mean:.3f}', fontsize=9)
        axes.spines[['top', 'right']].set_visible(False)
        axes.tick_params(axis='x', labelsize=7)
        if row == len(stages) - 1:
            axes.set_xlabel('spikes per neuron and step', fontsize=8)
        draw_raster(figure.add_subplot(grid[row, 1]), neurons[-1])
    return figure


def draw_raster(axes: Any, neuron: Any) -> None:
    """Draw the spikes of some neurons as black cells, with time to the right."""
    count, steps = neuron.raster.shape
    edges = np.arange(steps + 1) + 0.5, np.arange(count + 1) - 0.5
    cells = dict(cmap='Greys', vmin=0, vmax=1, edgecolors='0.85', linewidth=0.4)
    axes.pcolormesh(*edges, neuron.raster.numpy(), **cells)
    axes.invert_yaxis()
    axes.set_xticks(range(1, steps + 1, max(1, steps // 8)))
    axes.tick_params(labelsize=7)
    axes.set_xlabel('time step', fontsize=8)
    axes.set_ylabel('neuron', fontsize=8)
    axes.set_title(f'{neuron.name}\n{count} neurons, first sample', fontsize=7.5)


def save(activity: SpikeActivity, out: Path, source: dict[str, str]) -> list[Path]:
    """Write energy.json, energy.png and activity.png, and return their paths."""
    paths = [out / name for name in ('energy.json', 'energy.png', 'activity.png')]
    try:
        paths[0].write_text(json.dumps({**source, **as_dict(activity)}, indent=1) + '\n', encoding='utf-8')
        for path, draw in zip(paths[1:], (draw_energy, draw_activity)):
            figure = draw(activity)
            FigureCanvasAgg(figure)
            figure.savefig(path)
    except OSError as error:
        raise LaunchError(f'the report cannot be written: {error}') from error
    return paths


def run(args: argparse.Namespace) -> None:
    """Measure the network of a config and write the report."""
    if args.batches < 1:
        raise LaunchError(f'--batches must be at least 1, got {args.batches}')
    cfg = cli.load_model_config(args)
    if cfg.get('val_dataloader') is None:
        raise LaunchError(f'config {args.config!r} has no val_dataloader')
    data_checks.run(cfg, args.config, ('val',))
    MMLogger.get_instance('energy', log_level='WARNING')
    with launch.environment(cfg, args):
        model = launch.build_model(cfg, args.device, SpikingConv, 'spiking layer of mmkron')
        cli.check_writable(args.out, '--out')
        loader = Runner.build_dataloader(cfg.val_dataloader, seed=0)
        batches = islice(loader, args.batches)
        activity = measure_activity(model, batches, lambda model, batch: model.val_step(batch))
    print(table(activity))
    print(f'\nmean of {activity.samples} samples; batches: {min(args.batches, len(loader))} of {len(loader)}')
    print(summary(activity))
    print('written:', *save(activity, Path(args.out), dict(config=args.config, checkpoint=args.checkpoint)), sep='\n  ')


def main(argv: list[str] | None = None) -> None:
    cli.main(run, parse_args(argv))


if __name__ == '__main__':
    main()
