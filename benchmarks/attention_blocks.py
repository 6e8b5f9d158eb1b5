"""Time and peak memory of the attention blocks of segmentation heads, 512 channels in and out, on the CPU.

Writes attention_blocks.md and attention_blocks.png next to this script. Ratios within one run count; absolute times do
not. "forward" is inference, without a graph and with batch norm in evaluation; "both" is a training step of the block,
with the gradients of the input and of all weights, from a given gradient of the output.

Peak memory (memory.py) holds the output, what backward needs, the gradients, and what libraries take for themselves,
and not the input, the weights or the given gradient.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from mmcv.cnn import NonLocal2d
from mmcv.ops import CrissCrossAttention
from mmseg.models.decode_heads import ISAHead
from torch import Tensor, nn

from memory import check_memory, in_own_processes, memory_of
from mmkron.layers import KroneckerAttention2d
from timing import machine, medians, table

FOLDER = Path(__file__).resolve().parent
CHANNELS = 512
SIZES = (64, 128)
Figures = dict[tuple[str, int, str], float]  # (block, size, step) -> seconds or bytes


class ISABlock(nn.Module):
    """ISAHead's own code without the convolution before its attention and the classifier after it.

    The convolution that joins the two relations with the residual stays.
    """

    def __init__(self, head: ISAHead) -> None:
        super().__init__()
        self.head = copy.deepcopy(head)
        self.head.in_conv = nn.Identity()
        self.head.conv_seg = nn.Identity()
        self.head.dropout = None

    def forward(self, x: Tensor) -> Tensor:
        return self.head([x])


def kronecker(mode: str, width: int) -> KroneckerAttention2d:
    scale = width**-0.5
    return KroneckerAttention2d(CHANNELS, mode, maps='qkv', key_channels=width, scale=scale, residual=True)


def isa_head() -> ISAHead:
    widths = dict(in_channels=CHANNELS, channels=CHANNELS, isa_channels=256, num_classes=19)
    return ISAHead(**widths, down_factor=(8, 8), norm_cfg=dict(type='BN'))


NON_LOCAL, CRISS_CROSS = 'NonLocal2d (NLHead)', 'CrissCrossAttention'
QKV, KV = ([f'mmkron {mode}, keys {width}' for width in (256, 512)] for mode in ('QKV', 'KV'))
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(kronecker, 'qkv', width) for name, width in zip(QKV, (256, 512))},
    **{name: partial(kronecker, 'kv', width) for name, width in zip(KV, (256, 512))},
    'mmkron pooled, keys 256': partial(kronecker, 'pooled', 256),
    'mmkron dense, keys 256': partial(kronecker, 'dense', 256),
    'mmkron dense, keys 512': partial(kronecker, 'dense', 512),
    NON_LOCAL: partial(NonLocal2d, CHANNELS, reduction=2, use_scale=True, mode='embedded_gaussian'),
    CRISS_CROSS: partial(CrissCrossAttention, CHANNELS),
    f'{CRISS_CROSS} twice (CCHead)': lambda: nn.Sequential(*[CrissCrossAttention(CHANNELS)] * 2),
    'ISA (ISAHead)': lambda: ISABlock(isa_head()),
}
# The number of their coefficients is the square of that of the positions: seconds a call, so they get fewer rounds.
QUADRATIC = [name for name in BLOCKS if name == NON_LOCAL or 'dense' in name or 'pooled' in name]


def build(name: str) -> nn.Module:
    """The block; what starts at zero (gamma, the value map, conv_out, biases) is filled, so that nothing is skipped."""
    torch.manual_seed(0)
    block = BLOCKS[name]()
    for weight in block.parameters():
        if not weight.any():
            nn.init.normal_(weight, std=0.05)
    return block


def forward_step(block: nn.Module, x: Tensor, gradient: Tensor) -> None:
    with torch.no_grad():
        block.eval()(x)


def both_step(block: nn.Module, x: Tensor, gradient: Tensor) -> None:
    block.train().zero_grad(set_to_none=True)
    torch.autograd.backward(block(x.detach().requires_grad_()), gradient)


STEPS = {'forward': forward_step, 'both': both_step}


def inputs(size: int) -> tuple[Tensor, Tensor]:
    """Input and gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(1, CHANNELS, size, size, generator=generator) for _ in range(2))
    return x, gradient


@torch.no_grad()
def check_peers() -> None:
    """Our dense block computes what NonLocal2d does, and the ISA block what its head does."""
    theirs = build(NON_LOCAL)
    ours = kronecker('dense', 256)
    for name, weight in theirs.named_parameters():
        weight.zero_() if name.endswith('bias') else weight.normal_(std=0.1)
    ours.query_map.weight.copy_(theirs.theta.conv.weight[..., 0])
    ours.key_map.weight.copy_(theirs.phi.conv.weight[..., 0])
    # Only the attention is between their g and conv_out, so the two are one linear map.
    ours.value_map.weight.copy_((theirs.conv_out.conv.weight[:, :, 0, 0] @ theirs.g.conv.weight[:, :, 0, 0])[..., None])
    x, _ = inputs(24)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-3)

    head = isa_head().eval()
    block = ISABlock(head).eval()
    torch.testing.assert_close(head.cls_seg(block(head.in_conv(x))), head([x]))


def peak(case: tuple[str, int, str], threads: int) -> int:
    """Peak memory of one step of one block; in a process of its own."""
    torch.set_num_threads(threads)
    check_memory()
    name, size, step = case
    block = build(name)
    STEPS[step](block, *inputs(8))
    block.zero_grad(set_to_none=True)
    return memory_of(partial(STEPS[step], block, *inputs(size)))


def measure_memory() -> Figures:
    cases = [(name, size, step) for size in SIZES for step in STEPS for name in BLOCKS]
    figures = {}
    for case, value in in_own_processes(partial(peak, threads=torch.get_num_threads()), cases):
        figures[case] = value
        print(*case, f'{1e-6 * value:.1f} MB', flush=True)
    return figures


def measure_time() -> Figures:
    figures = {}
    blocks = {name: build(name) for name in BLOCKS}
    for size in SIZES:
        x, gradient = inputs(size)
        for step, run in STEPS.items():
            for rounds, names in ((15, [name for name in BLOCKS if name not in QUADRATIC]), (3, QUADRATIC)):
                forms = {name: partial(run, blocks[name], x, gradient) for name in names}
                for name, seconds in medians(forms, rounds=rounds, least=0).items():
                    figures[name, size, step] = seconds
                    print(name, size, step, f'{1e3 * seconds:.1f} ms', flush=True)
            for block in blocks.values():
                block.zero_grad(set_to_none=True)
    return figures


def goals(seconds: Figures, held: Figures) -> str:
    """Return a table of the goals of the Kronecker blocks; the worse of the two key widths counts."""
    rows = []
    for step in STEPS:
        ratio = held[NON_LOCAL, 128, step] / max(held[name, 128, step] for name in KV)
        met = 'met' if ratio >= 10 else 'not met'
        rows.append([f'128 x 128, {step}', f'memory of {NON_LOCAL} to KV', '10', f'{ratio:.1f}', met])
    others = [name for name in BLOCKS if name not in QKV]
    for size in SIZES:
        for step in STEPS:
            at = f'{size} x {size}, {step}'
            next_one = min(others, key=lambda name: seconds[name, size, step])
            ratio = seconds[next_one, size, step] / max(seconds[name, size, step] for name in QKV)
            met = 'met' if ratio > 1 else 'not met'
            rows.append([at, f'time of {next_one} to QKV', '1', f'{ratio:.1f}', met])
            slower = max(seconds[name, size, step] for name in KV)
            for peer in (NON_LOCAL, CRISS_CROSS):
                ratio = seconds[peer, size, step] / slower
                met = 'met' if ratio > 1 else 'not met'
                rows.append([at, f'time of {peer} to KV', '1', f'{ratio:.2f}', met])
    return table(['map, step', 'ratio', 'goal', 'measured', 'verdict'], rows)


def tabulate(size: int, seconds: Figures, held: Figures) -> str:
    rows = []
    for name in BLOCKS:
        times = [f'{1e3 * seconds[name, size, step]:.1f}' for step in STEPS]
        memory = [f'{1e-6 * held[name, size, step]:.1f}' for step in STEPS]
        ratios = [f'{of[NON_LOCAL, size, step] / of[name, size, step]:.1f}' for of in (seconds, held) for step in STEPS]
        rows.append([name, *times, *memory, *ratios])
    header = ['block', *(f'{step} {unit}' for unit in ('ms', 'MB') for step in STEPS)]
    return table(header + [f'{what}, {step}' for what in ('faster', 'smaller') for step in STEPS], rows)


def draw(path: Path, seconds: Figures, held: Figures) -> None:
    """Forward and backward: time and peak memory of each block, on both sizes."""
    figure = Figure(figsize=(11, 5.5), layout='constrained')
    axes = figure.subplots(1, 2, sharey=True)
    for axis, of, factor, title in zip(axes, (seconds, held), (1e3, 1e-6), ('median time, ms', 'peak memory, MB')):
        for offset, size, color in zip((-0.2, 0.2), SIZES, ('#8fb8de', '#1f4e79')):
            values = [factor * of[name, size, 'both'] for name in BLOCKS]
            places = [place + offset for place in range(len(BLOCKS))]
            bars = axis.barh(places, values, height=0.38, color=color, label=f'{size} x {size}')
            axis.bar_label(bars, [f'{value:,.0f}' for value in values], padding=2, fontsize=8)
        axis.set(xscale='log', title=title)
        axis.margins(x=0.15, y=0.01)
        axis.grid(axis='x', alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].set_yticks(range(len(BLOCKS)), list(BLOCKS))
    axes[0].invert_yaxis()
    axes[1].legend(loc='upper right')
    threads = torch.get_num_threads()
    figure.suptitle(f'Attention blocks, (1, {CHANNELS}, H, W), float32, forward + backward, CPU, {threads} thread(s)')
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--threads', type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    check_peers()
    held = measure_memory()
    seconds = measure_time()
    draw(FOLDER / 'attention_blocks.png', seconds, held)
    text = f"""# Attention blocks of segmentation heads

{machine()}. Input (1, {CHANNELS}, H, W), float32. Times are medians of 15 rounds, of 3 for
NonLocal2d, dense and pooled; within these two groups the blocks take turns. Memory is the peak over input and weights,
with the output. "forward" is inference, "both" a training step; "faster" and "smaller" are against NonLocal2d.
CrissCrossAttention has keys of {CHANNELS // 8}, NonLocal2d and ISA of 256.

The goals are lower bounds; the worse of the two key widths counts, and QKV is compared with the fastest other block.

{goals(seconds, held)}
"""
    for size in SIZES:
        text += f'\n## {size} x {size}\n\n{tabulate(size, seconds, held)}\n'
    print(text)
    (FOLDER / 'attention_blocks.md').write_text(text)


if __name__ == '__main__':
    main()
