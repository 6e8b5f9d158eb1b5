"""Draws what an attention layer weighs for one pixel of an image: the rows, columns and positions of its map.

    python tools/visualizations/kao_coefficients.py CONFIG CHECKPOINT IMAGE --pixel X Y

The config is one of MMPretrain, MMSegmentation or MMDetection whose model holds mmkron.KroneckerAttention2d. The whole
image goes through the config's test pipeline, without its crops.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import mmcv
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from mmengine.config import Config, DictAction
from mmengine.dataset import Compose, pseudo_collate
from mmengine.logging import MMLogger
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, VISUALIZERS
from mmengine.runner import load_checkpoint
from mmengine.visualization.utils import img_from_canvas
from torch import Tensor, nn

from mmkron.analysis import PositionWeights, position_weights
from mmkron.datasets import LoadImageFromFile
from mmkron.engine import launch
from mmkron.engine.data_check import leaf_datasets, type_name
from mmkron.engine.launch import LaunchError
from mmkron.layers import KroneckerAttention2d

QUERY_COLORS = ('tab:blue', 'tab:orange')
STRONGEST = 5


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


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help="weights; 'none' for the initial ones")
    parser.add_argument('image', help='image file')
    parser.add_argument('--pixel', nargs=2, type=int, required=True, metavar=('X', 'Y'), help='in the image, from 0')
    parser.add_argument('--layer', metavar='NAME', help='attention layer; default: the last one that the model runs')
    parser.add_argument('--out-dir', default='work_dirs/kao_coefficients', metavar='DIR', help='default: %(default)s')
    parser.add_argument('--device', default='cpu', help='default: %(default)s')
    options = 'change the config: a.b=1 a.c="[1,2]" a.0.d=x; no white space in a value'
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE', help=options)
    parser.set_defaults(launcher='none', local_rank=0, work_dir=None)
    return parser.parse_args(argv)


def read_image(path: str, pixel: tuple[int, int]) -> np.ndarray:
    """(H, W, 3), uint8, RGB. The pixel (x, y) has to be in it."""
    try:
        image = LoadImageFromFile().transform(dict(img_path=path))['img']
    except (OSError, ValueError) as error:
        raise LaunchError(f'image {path!r} cannot be read: {error}') from error
    height, width = image.shape[:2]
    if not (0 <= pixel[0] < width and 0 <= pixel[1] < height):
        raise LaunchError(
            f'--pixel {pixel[0]} {pixel[1]} is outside the image: X must be in [0, {width - 1}], Y in [0, {height - 1}]'
        )
    return image[..., ::-1].copy()


def build_model(cfg: Config, device: str) -> nn.Module:
    """The config's model with the weights of ``cfg.load_from``, or its initial weights if that is None."""
    if cfg.get('model') is None:
        raise LaunchError('the config has no model')
    if cfg.get('data_preprocessor') is not None:
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    torch.manual_seed((cfg.get('randomness') or {}).get('seed') or 0)
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    try:
        if cfg.load_from is None:
            model.init_weights()
        else:
            load_checkpoint(model, cfg.load_from, map_location='cpu', strict=True, logger='current')
    except (EOFError, OSError, RuntimeError) as error:
        reason = ' '.join(str(error).split()) or 'the file is empty or cut off'
        weights = cfg.load_from or 'what the config starts from'
        raise LaunchError(f'{weights} cannot be loaded into the model: {reason:.600}') from error
    try:
        return model.to(device).eval()
    except (AssertionError, RuntimeError) as error:
        raise LaunchError(f'--device {device}: {error}') from error


def prepare(cfg: Config, path: str, model: nn.Module) -> dict:
    """The image as a batch of one, through the test pipeline without annotations and crops."""
    dataset = (cfg.get('test_dataloader') or {}).get('dataset')
    pipelines = [leaf.get('pipeline') for _, leaf in leaf_datasets(dataset, 'test_dataloader.dataset')]
    pipeline = next(filter(None, [*pipelines, cfg.get('test_pipeline')]), None)
    if pipeline is None:
        raise LaunchError('the config has neither test_dataloader.dataset.pipeline nor test_pipeline')
    steps = [step for step in pipeline if not any(word in type_name(step) for word in ('Annotations', 'Crop'))]
    sample: dict[str, Any] = dict(img_path=path, img_id=0)
    if not any(type_name(step).startswith('Load') for step in steps):
        # The dataset makes the images, of as many channels as the network takes.
        channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
        sample = LoadImageFromFile(color_type='grayscale' if channels == 1 else 'color').transform(sample)
    packed = Compose(steps)(sample)
    if not isinstance(packed, dict) or not isinstance(packed.get('inputs'), Tensor):
        raise LaunchError('the test pipeline does not make one input of an image; --cfg-options can change it')
    return model.data_preprocessor(pseudo_collate([packed]), False)


def run_layers(model: nn.Module, batch: dict, wanted: str | None) -> tuple[str, tuple[Tensor, ...]]:
    """Name of the wanted attention layer, or of the last that runs, and the maps it gets: x and maybe a context."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, KroneckerAttention2d)}
    if not layers:
        raise LaunchError('the model has no KroneckerAttention2d layer')
    names, maps = {layer: name for name, layer in layers.items()}, {}
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: maps.setdefault(names[layer], args)) for layer in names
    ]
    model(**batch, mode='tensor')
    for hook in hooks:
        hook.remove()
    if wanted in maps or (wanted is None and maps):
        name = wanted or list(maps)[-1]
        return name, maps[name]
    lines = []
    for name, layer in layers.items():
        size = 'map {} x {}'.format(*maps[name][0].shape[2:]) if name in maps else 'does not run in prediction'
        lines.append(f'\n  {name}: mode {layer.mode}, {size}')
    problem = 'no attention layer runs' if wanted is None else f'--layer {wanted!r} is no attention layer that runs'
    raise LaunchError(f'{problem}; the model has{"".join(lines)}')


@torch.no_grad()
def view_pixel(model: nn.Module, batch: dict, shape: tuple[int, int], pixel: tuple[int, int], wanted: str) -> View:
    """Runs the model on the batch of one image of ``shape`` (H, W) and takes the weights of ``pixel`` (x, y)."""
    name, (x, *rest) = run_layers(model, batch, wanted)
    layer, context = model.get_submodule(name), rest[0] if rest and rest[0] is not None else x
    meta, padded = batch['data_samples'][0].metainfo, batch['inputs'].shape[2:]
    # Padding lies below the image and at its right.
    end = meta.get('img_shape', padded)[:2]
    if 'scale_factor' in meta:
        end = (shape[0] * meta['scale_factor'][1], shape[1] * meta['scale_factor'][0])
    bottom, right = (length * max(1.0, whole / part) for length, whole, part in zip(shape, padded, end))
    size, context_size = tuple(x.shape[2:]), tuple(context.shape[2:])
    i, j = int((pixel[1] + 0.5) / bottom * size[0]), int((pixel[0] + 0.5) / right * size[1])
    if layer.mode == 'qkv':
        weights = position_weights(layer.coefficients(x, context), 'qkv', size, (i, j), context_size)
    else:  # one query alone, since the coefficients of all may be too many to hold
        coefficients = layer.coefficients(x[:, :, i : i + 1, j : j + 1], context)
        weights = position_weights(coefficients, layer.mode, (1, 1), (0, 0), context_size)
    weights = PositionWeights(*(part[0].float().cpu() for part in weights))
    return View(name, layer.mode, size, (i, j), (right, bottom), weights)


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
    for axes, weights, length, orientation in sides:
        base, edges = np.zeros(weights.shape[1]), np.linspace(-0.5, length - 0.5, weights.shape[1] + 1)
        for part, color in zip(weights.numpy(), QUERY_COLORS):
            axes.stairs(base + part, edges, baseline=base, orientation=orientation, fill=True, color=color)
            base = base + part
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


def run(args: argparse.Namespace) -> None:
    started, pixel, out_dir = time.time_ns(), tuple(args.pixel), Path(args.out_dir)
    cfg = launch.load_config(args.config)
    launch.merge_common_args(cfg, args)
    cfg.load_from = None if args.checkpoint == 'none' else launch.checkpoint_path(args.checkpoint, 'checkpoint')
    image = read_image(args.image, pixel)
    MMLogger.get_instance('kao_coefficients', log_level='WARNING')
    with launch.environment(cfg, args):
        model = build_model(cfg, args.device)
        view = view_pixel(model, prepare(cfg, args.image, model), image.shape[:2], pixel, args.layer)
        picture, name = draw(image, pixel, view), f'{Path(args.image).stem}_{view.layer}_x{pixel[0]}_y{pixel[1]}'
        mmcv.imwrite(picture[..., ::-1], str(out_dir / f'{name}.png'))
        backends = cfg.get('vis_backends') or [dict(type='LocalVisBackend')]
        settings = cfg.get('visualizer') or dict(type='Visualizer', vis_backends=backends)
        try:  # visualizers are found by name, and one of that name may have other backends
            visualizer = VISUALIZERS.build(dict(settings, name=f'{name}_{started}', save_dir=str(out_dir)))
            visualizer.add_image(name, picture)
            visualizer.close()
        except ImportError as error:
            raise LaunchError(f'a backend of the visualizer lacks a package: {error}') from error
    for kind, weights in (('columns', view.weights.columns.sum(0)), ('rows', view.weights.rows.sum(0))):
        best = weights.topk(min(STRONGEST, len(weights)))
        pairs = [f'{k} ({value:.3g})' for k, value in zip(best.indices.tolist(), best.values.tolist())]
        print(f'strongest {kind} of {len(weights)}: {", ".join(pairs)}')
    print('written:')
    for path in sorted(out_dir.rglob('*')):
        if path.is_file() and path.stat().st_mtime_ns >= started:
            print(f'  {path}')


def main(argv: list[str] | None = None) -> None:
    launch.main(run, parse_args(argv))


if __name__ == '__main__':
    main()
