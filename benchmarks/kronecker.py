"""Kronecker attention against dense attention and against the one public package, on the CPU.

Writes kronecker.md and kronecker.png next to this script. Ratios within one run count; absolute times do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from kronecker_attention_pytorch import KroneckerSelfAttention
from matplotlib.figure import Figure
from torch import Tensor

from mmkron.analysis import attention_cost
from mmkron.layers import KroneckerAttention2d
from mmkron.ops import (
    attend,
    axis_means,
    column_attention,
    dense_attention,
    kronecker_attention_kv,
    kronecker_attention_qkv,
    pooled_attention,
)
from mmkron.ops.column_attention import attend_plain
from timing import machine, medians, table

FOLDER = Path(__file__).resolve().parent
SIZES = (56, 28, 14)
OPERATORS = {
    'dense': dense_attention,
    'pooled': pooled_attention,
    'kv': kronecker_attention_kv,
    'qkv': kronecker_attention_qkv,
}


def two_products(x: Tensor) -> Tensor:
    columns = x.flatten(2)
    return (columns @ torch.softmax(columns.mT @ columns, 1)).view_as(x)


def sdpa(x: Tensor) -> Tensor:
    """torch's attention on the flattened map as it lies in memory, the way it is usually called."""
    rows = x.flatten(2).mT
    return F.scaled_dot_product_attention(rows, rows, rows, scale=1.0).mT.view_as(x)


def sdpa_contiguous(x: Tensor) -> Tensor:
    """The same after a copy with channels last and a head dimension, which lets torch take its tiled kernel."""
    rows = x.flatten(2).mT.contiguous()[:, None]
    return F.scaled_dot_product_attention(rows, rows, rows, scale=1.0)[:, 0].mT.reshape(x.shape)


def train_step(form: Callable[[Tensor], Tensor], x: Tensor) -> None:
    if isinstance(form, torch.nn.Module):
        form.zero_grad(set_to_none=True)
    form(x.detach().requires_grad_()).sum().backward()


def no_grad_step(form: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        form(x)


def compare_operators() -> str:
    rows = []
    for size in SIZES:
        x = torch.randn(8, 8, size, size)
        forms = {'two products': two_products, 'SDPA': sdpa, 'SDPA, contiguous copy': sdpa_contiguous}
        forms.update({f'mmkron {name}': operator for name, operator in OPERATORS.items()})
        with torch.no_grad():
            expected = two_products(x)
            for name in ('SDPA', 'SDPA, contiguous copy', 'mmkron dense'):
                torch.testing.assert_close(forms[name](x), expected, rtol=1e-3, atol=1e-4)
            seconds = medians({name: partial(form, x) for name, form in forms.items()}, rounds=9)
        named = min(seconds['two products'], seconds['SDPA'])
        best = min(named, seconds['SDPA, contiguous copy'])
        rows += [
            [f'{name}, {size} x {size}', f'{1e3 * s:.3f}', f'{named / s:.1f}', f'{best / s:.1f}']
            for name, s in seconds.items()
        ]
    header = ['form, map', 'median ms', 'faster than two products and SDPA', 'faster than the best dense form']
    return table(header, rows)


def compare_memory() -> str:
    rows = []
    for size in SIZES:
        costs = {mode: attention_cost(mode, (size, size), 8, batch=8) for mode in OPERATORS}
        for mode, cost in costs.items():
            saved = 1 - cost.held / costs['dense'].held
            with_coefficients = cost.coefficients + 8 * 8 * size * size
            strict = 1 - with_coefficients / costs['dense'].held
            megabytes = f'{4e-6 * cost.held:.3f}'
            rows.append([f'{mode}, {size} x {size}', f'{cost.madds:,}', megabytes, f'{saved:.2%}', f'{strict:.2%}'])
    return table(['operator, map', 'MAdds', 'MB', 'saved', 'saved, coefficients + output'], rows)


def compare_package() -> str:
    """The QKV layer of kronecker-attention-pytorch, one head, with its four maps, against ours at that width."""
    rows = []
    for channels, size in ((8, 56), (64, 56), (64, 14), (256, 32), (512, 64)):
        x = torch.randn(8 if channels < 256 else 2, channels, size, size)
        theirs = KroneckerSelfAttention(dim=channels, heads=1, dim_heads=channels)
        ours = KroneckerAttention2d(channels, 'qkv', maps='qkv')
        value_only = KroneckerAttention2d(channels, 'qkv')
        with torch.no_grad():
            ours.query_map.weight.copy_(theirs.to_qkv.weight[:channels])
            ours.key_map.weight.copy_(theirs.to_qkv.weight[channels : 2 * channels])
            # Their output map directly follows the value map but for the attention, so the two are one linear map; the
            # outer sum after it adds its bias twice.
            out = theirs.to_out
            ours.value_map.weight.copy_((out.weight[:, :, 0] @ theirs.to_qkv.weight[2 * channels :, :, 0])[..., None])
            expected = theirs(x) - 2 * out.bias[:, None, None]
            torch.testing.assert_close(ours(x), expected, rtol=1e-3, atol=1e-4)
        layers = {'package': theirs, 'mmkron, maps q, k, v': ours, 'mmkron, map v': value_only}

        with torch.no_grad():
            forward = medians({name: partial(layer, x) for name, layer in layers.items()}, rounds=9)
        both = medians({name: partial(train_step, layer, x) for name, layer in layers.items()}, rounds=9)
        for name in layers:
            ratios = [f'{seconds["package"] / seconds[name]:.2f}' for seconds in (forward, both)]
            rows.append([f'{name}, {tuple(x.shape)}', f'{1e3 * forward[name]:.3f}', f'{1e3 * both[name]:.3f}', *ratios])
    header = ['layer, input', 'forward ms', 'forward + backward ms', 'faster, forward', 'faster, both']
    return table(header, rows)


def compare_batch_norm() -> str:
    """bn_softmax in training, forward and backward: coefficients normalized in memory against second moments."""
    rows = []
    for channels, size in ((8, 56), (32, 28), (64, 14), (160, 7), (16, 112)):
        x = torch.randn(8, channels, size, size) / channels**0.5
        forms = {
            'KV, in memory': lambda x: attend_plain(x.flatten(2), *[axis_means(x)] * 2, 'bn_softmax'),
            'KV, as chosen': lambda x: attend(x.flatten(2), *[axis_means(x)] * 2, 'bn_softmax'),
        }
        if size < 56:
            forms['dense, in memory'] = lambda x: attend_plain(*[x.flatten(2)] * 3, 'bn_softmax')
            forms['dense, as chosen'] = lambda x: attend(*[x.flatten(2)] * 3, 'bn_softmax')

        seconds = medians({name: partial(train_step, form, x) for name, form in forms.items()}, rounds=7)
        for kind in ('KV', 'dense'):
            if f'{kind}, in memory' in seconds:
                plain, chosen = seconds[f'{kind}, in memory'], seconds[f'{kind}, as chosen']
                ms = [f'{1e3 * value:.3f}' for value in (plain, chosen)]
                rows.append([f'{kind}, (8, {channels}, {size}, {size})', *ms, f'{plain / chosen:.2f}'])
    return table(['attention, input', 'in memory ms', 'as chosen ms', 'faster'], rows)


def compare_tiled() -> str:
    """dense_attention by its two products and by torch's tiled attention, around the size where it changes over."""
    rows = []
    chosen = column_attention.TILED_MIN_KEYS
    for channels in (8, 64, 256):
        for size in (20, 28, 32, 40):
            x = torch.randn(8, channels, size, size) / channels**0.5

            def run(least_keys: int, step: Callable, x: Tensor = x) -> None:
                column_attention.TILED_MIN_KEYS = least_keys
                step(dense_attention, x)

            seconds = []
            for step in (no_grad_step, train_step):
                forms = {'products': partial(run, size**2 + 1, step), 'tiled': partial(run, 0, step)}
                seconds.append(medians(forms, rounds=5))
            ratios = [f'{each["products"] / each["tiled"]:.2f}' for each in seconds]
            rows.append([f'(8, {channels}, {size}, {size})', f'{size**2}', *ratios])
    column_attention.TILED_MIN_KEYS = chosen
    return table(['input', 'keys', 'tiled is faster, forward', 'forward + backward'], rows)


def draw(path: Path) -> None:
    """Time and memory against the size of the map, all four operators."""
    sizes = (7, 10, 14, 20, 28, 40, 56, 80)
    seconds: dict[str, list[float]] = {name: [] for name in OPERATORS}
    for size in sizes:
        x = torch.randn(8, 8, size, size)
        with torch.no_grad():
            forms = {name: partial(operator, x) for name, operator in OPERATORS.items()}
            for name, value in medians(forms, rounds=5).items():
                seconds[name].append(1e3 * value)
    figure = Figure(figsize=(10, 4), layout='constrained')
    axes = figure.subplots(1, 2)
    labels = {'dense': 'dense', 'pooled': 'pooled', 'kv': 'KAO_KV', 'qkv': 'KAO_QKV'}
    for name, marker in zip(OPERATORS, 'osd^'):
        axes[0].plot(sizes, seconds[name], marker=marker, label=labels[name])
        held = [4e-6 * attention_cost(name, (size, size), 8, batch=8).held for size in sizes]
        axes[1].plot(sizes, held, marker=marker, label=labels[name])
    for axis, title in zip(axes, ('median time, ms', 'coefficients and output in closed form, MB')):
        axis.set(xscale='log', yscale='log', title=title, xlabel='height and width of the map')
        axis.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f'Batch 8, 8 channels, float32, {torch.get_num_threads()} thread')
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--threads', type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    parts = [f'# Kronecker attention: measured figures\n\n{machine()}; medians, forms taking turns in one run.']
    for title, part in (
        ('Operators without maps, (8, 8, H, W), forward', compare_operators),
        ('Multiply-adds and memory in closed form, (8, 8, H, W), float32', compare_memory),
        ('QKV layer against kronecker-attention-pytorch', compare_package),
        ('Batch norm of the coefficients, forward + backward', compare_batch_norm),
        ('Dense attention: two products or tiled', compare_tiled),
    ):
        print(title, flush=True)
        text = part()
        print(text, flush=True)
        parts.append(f'## {title}\n\n{text}')
    draw(FOLDER / 'kronecker.png')
    (FOLDER / 'kronecker.md').write_text('\n\n'.join(parts) + '\n')


if __name__ == '__main__':
    main()
