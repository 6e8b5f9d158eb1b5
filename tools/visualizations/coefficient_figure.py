"""Draw the figure of ``kao_coefficients.py``: an image and the attention weights for one of its pixels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from mmengine.visualization.utils import img_from_canvas
from torch import Tensor

from mmkron.analysis import PositionWeights
from mmkron.ops.kronecker import MODES

QUERY_COLORS = ('tab:blue', 'tab:orange')

# Sizes in inches.
LONG_SIDE, MIN_WIDTH, MIN_HEIGHT = 4.6, 1.8, 1.2
STRIP, GAP, LEFT, BOTTOM, COLORBAR = 0.85, 0.1, 0.5, 0.4, 0.14


class View(NamedTuple):
    """Attention weights of a layer for one pixel.

    Attributes:
        layer: Name of the layer.
        mode: Mode of the layer.
        size: (h, w) of the layer's map.
        position: (i, j), row and column of the pixel in the map.
        extent: (x, y) in pixels of the image at which the map ends; outside the image if it was padded.
        weights: Weights without a batch dimension, on the CPU.
    """

    layer: str
    mode: str
    size: tuple[int, int]
    position: tuple[int, int]
    extent: tuple[float, float]
    weights: PositionWeights


class Panels(NamedTuple):
    """Axes of the figure."""

    image: Axes
    map: Axes
    columns: Axes
    rows: Axes
    colors: Axes


def draw(image: np.ndarray, pixel: tuple[int, int], view: View) -> np.ndarray:
    """Return the figure, (H, W, 3), uint8, RGB: the image, and the weights over it and along its sides."""
    figure, panels = _make_figure(image.shape[:2], view.layer)
    panels.image.imshow(image, aspect='auto')
    panels.map.imshow(image.mean(2), cmap='gray', vmin=0, vmax=255, aspect='auto')
    heat = _draw_positions(panels.map, view)
    figure.colorbar(heat, cax=panels.colors, label='weight of a position', ticks=MaxNLocator(5))
    for axes in (panels.image, panels.map):
        _mark_pixel(axes, pixel, image.shape[:2])
    _draw_sides(panels, view)
    _write_caption(figure, panels, pixel, view)
    figure.canvas.draw()
    return img_from_canvas(figure.canvas)


def _make_figure(shape: tuple[int, int], layer: str) -> tuple[Figure, Panels]:
    inches = LONG_SIDE / max(shape)
    width, height = max(shape[1] * inches, MIN_WIDTH), max(shape[0] * inches, MIN_HEIGHT)
    # The caption with the layer's name is above the image and must not reach the map's panels.
    middle = LEFT + max(width, 0.08 * len(layer)) + 0.8
    total = (middle + width + STRIP + 1.5, BOTTOM + height + STRIP + 0.5)
    figure = Figure(total, dpi=120)
    FigureCanvasAgg(figure)

    def place(x: float, y: float, w: float, h: float, **kwargs: Axes) -> Axes:
        return figure.add_axes((x / total[0], y / total[1], w / total[0], h / total[1]), **kwargs)

    plain, main = place(LEFT, BOTTOM, width, height), place(middle, BOTTOM, width, height)
    columns = place(middle, BOTTOM + height + GAP, width, STRIP, sharex=main)
    rows = place(middle + width + GAP, BOTTOM, STRIP, height, sharey=main)
    colors = place(middle + width + 2 * GAP + STRIP, BOTTOM, COLORBAR, height)
    return figure, Panels(plain, main, columns, rows, colors)


def _draw_positions(axes: Axes, view: View) -> AxesImage:
    """Draw the weights of the positions over the image, and the cell of the query."""
    values = view.weights.positions.numpy()
    least, most = float(values.min()), float(values.max())
    signed = least < 0  # batch norm without softmax
    if signed:
        least, most = -max(-least, most), max(-least, most)
    norm = Normalize(least if most - least > 1e-5 * most else 0.0, most)
    strength = np.asarray(np.abs(2 * norm(values) - 1) if signed else norm(values))
    right, bottom = view.extent
    heat = axes.imshow(
        values,
        extent=(-0.5, right - 0.5, bottom - 0.5, -0.5),
        aspect='auto',
        cmap='RdBu_r' if signed else 'inferno',
        norm=norm,
        alpha=0.3 + 0.55 * strength,
    )
    (i, j), width, height = view.position, right / view.size[1], bottom / view.size[0]
    corner = (j * width - 0.5, i * height - 0.5)
    axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor='white', ls=':'))
    return heat


def _mark_pixel(axes: Axes, pixel: tuple[int, int], shape: tuple[int, int]) -> None:
    for color, thickness in (('black', 3.5), ('white', 1.5)):
        axes.plot(*pixel, 'o', ms=11, markerfacecolor='none', markeredgecolor=color, markeredgewidth=thickness)
    axes.set(xlim=(-0.5, shape[1] - 0.5), ylim=(shape[0] - 0.5, -0.5))


def _draw_sides(panels: Panels, view: View) -> None:
    """Draw the weights of the columns above the map and of the rows at its right."""
    rows, columns, _ = view.weights
    # The bars of two queries are stacked, but with negative weights each query is a line of steps.
    stacked = all(len(weights) == 1 or weights.min() >= 0 for weights in (rows, columns))
    _draw_bars(panels.columns, columns, view.extent[0], 'vertical', stacked)
    _draw_bars(panels.rows, rows, view.extent[1], 'horizontal', stacked)
    panels.columns.tick_params(labelbottom=False)
    panels.columns.yaxis.set_major_locator(MaxNLocator(3))
    panels.rows.tick_params(labelleft=False)
    panels.rows.xaxis.set_major_locator(MaxNLocator(2, prune='lower'))
    kind = ' means' if MODES[view.mode].context.means else 's'
    panels.columns.set_title(f'column{kind}, sum {float(columns.sum()):.2f}', fontsize=10)
    panels.rows.set_title(f'row{kind}\nsum {float(rows.sum()):.2f}', fontsize=10, loc='left')


def _draw_bars(axes: Axes, weights: Tensor, length: float, orientation: str, stacked: bool) -> None:
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


def _write_caption(figure: Figure, panels: Panels, pixel: tuple[int, int], view: View) -> None:
    (x, y), (i, j) = pixel, view.position
    lines = [view.layer, f'mode {view.mode}, map {view.size[0]} x {view.size[1]}']
    lines += [f'pixel ({x}, {y}) in row {i}, column {j}']
    texts = [('\n'.join(lines), 'black', 0.0)]
    if len(view.weights.columns) == 2:
        texts += [(f'query of row {i}', QUERY_COLORS[0], 0.7), (f'query of column {j}', QUERY_COLORS[1], 0.9)]
    left, top, inches = panels.image.get_position().x0, panels.columns.get_position().y1, figure.get_figheight()
    for text, color, offset in texts:
        figure.text(left, top + (0.3 - offset) / inches, text, color=color, va='top', linespacing=1.4)
