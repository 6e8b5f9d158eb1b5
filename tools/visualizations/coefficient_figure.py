"""The picture of ``kao_coefficients.py``: an image with what an attention layer weighs for one of its pixels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from mmengine.visualization.utils import img_from_canvas

from mmkron.analysis import PositionWeights

QUERY_COLORS = ('tab:blue', 'tab:orange')


class View(NamedTuple):
    """What a layer weighs for one pixel.

    Attributes:
        layer, mode, size: name and mode of the layer, (h, w) of its map.
        position: (i, j), the pixel's row and column in the map.
        extent: (x, y) in pixels of the image at which the map ends; beyond the image if that was padded.
        weights: without batch dimension, on the CPU.
    """

    layer: str
    mode: str
    size: tuple[int, int]
    position: tuple[int, int]
    extent: tuple[float, float]
    weights: PositionWeights


def draw(image: np.ndarray, pixel: tuple[int, int], view: View) -> np.ndarray:
    """The picture, (H, W, 3), uint8, RGB: the image, and the weights over it and along its sides."""
    (height, width), (x, y), (i, j), (right, bottom) = image.shape[:2], pixel, view.position, view.extent
    inches = 4.6 / max(height, width)
    w, h, strip, gap, left, low = max(width * inches, 1.8), max(height * inches, 1.2), 0.85, 0.1, 0.5, 0.4
    middle = left + max(w, 0.08 * len(view.layer)) + 0.8
    total = (middle + w + strip + 1.5, low + h + strip + 0.5)
    figure = Figure(total, dpi=120)
    FigureCanvasAgg(figure)

    def place(x: float, y: float, w: float, h: float, **kwargs: Any) -> Any:
        return figure.add_axes((x / total[0], y / total[1], w / total[0], h / total[1]), **kwargs)

    plain, main = place(left, low, w, h), place(middle, low, w, h)
    top = place(middle, low + h + gap, w, strip, sharex=main)
    side = place(middle + w + gap, low, strip, h, sharey=main)

    values = view.weights.positions.numpy()
    least, most = float(values.min()), float(values.max())
    signed = least < 0  # batch norm without softmax
    if signed:
        least, most = -max(-least, most), max(-least, most)
    norm = Normalize(least if most - least > 1e-5 * most else 0.0, most)
    strength = np.abs(2 * norm(values) - 1) if signed else norm(values)
    style = dict(cmap='RdBu_r' if signed else 'inferno', norm=norm, alpha=np.asarray(0.3 + 0.55 * strength))
    plain.imshow(image, aspect='auto')
    main.imshow(image.mean(2), cmap='gray', vmin=0, vmax=255, aspect='auto')
    heat = main.imshow(values, extent=(-0.5, right - 0.5, bottom - 0.5, -0.5), aspect='auto', **style)
    colors = place(middle + w + 2 * gap + strip, low, 0.14, h)
    figure.colorbar(heat, cax=colors, label='weight of a position', ticks=MaxNLocator(5))
    for axes in (plain, main):
        for color, thickness in (('black', 3.5), ('white', 1.5)):
            axes.plot(x, y, 'o', ms=11, markerfacecolor='none', markeredgecolor=color, markeredgewidth=thickness)
        axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    cell = (right / view.size[1], bottom / view.size[0])
    main.add_patch(Rectangle((j * cell[0] - 0.5, i * cell[1] - 0.5), *cell, fill=False, edgecolor='white', ls=':'))

    sides = ((top, view.weights.columns, right, 'vertical'), (side, view.weights.rows, bottom, 'horizontal'))
    # The bars of two queries stand on each other; where some are negative, each query is a line of steps.
    stacked = all(len(weights) == 1 or weights.min() >= 0 for weights in view.weights[:2])
    for axes, weights, length, orientation in sides:
        base, edges = np.zeros(weights.shape[1]), np.linspace(-0.5, length - 0.5, weights.shape[1] + 1)
        if not stacked:
            axes.stairs(base, edges, baseline=None, orientation=orientation, color='gray', linewidth=0.8)
        for part, color in zip(weights.numpy(), QUERY_COLORS):
            if stacked:
                axes.stairs(base + part, edges, baseline=base, orientation=orientation, fill=True, color=color)
                base = base + part
            else:
                axes.stairs(part, edges, baseline=None, orientation=orientation, color=color, linewidth=1.5)
        axes.spines[['top', 'right']].set_visible(False)
    top.tick_params(labelbottom=False)
    top.yaxis.set_major_locator(MaxNLocator(3))
    side.tick_params(labelleft=False)
    side.xaxis.set_major_locator(MaxNLocator(2, prune='lower'))
    kind = ' means' if view.mode in ('kv', 'qkv') else 's'
    top.set_title(f'column{kind}, sum {float(view.weights.columns.sum()):.2f}', fontsize=10)
    side.set_title(f'row{kind}\nsum {float(view.weights.rows.sum()):.2f}', fontsize=10, loc='left')
    lines = [view.layer, f'mode {view.mode}, map {view.size[0]} x {view.size[1]}']
    lines += [f'pixel ({x}, {y}) in row {i}, column {j}']
    texts = [('\n'.join(lines), 'black')]
    if view.mode == 'qkv':
        texts += zip((f'query of row {i}', f'query of column {j}'), QUERY_COLORS)
    for k, (text, color) in enumerate(texts):
        place_y = low + h + gap + strip + 0.3 - (0.5 + 0.2 * k if k else 0)
        figure.text(left / total[0], place_y / total[1], text, color=color, va='top', linespacing=1.4)
    figure.canvas.draw()
    return img_from_canvas(figure.canvas)
