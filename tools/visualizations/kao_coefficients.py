"""Draw the weights of an attention layer for one pixel of an image, for the rows, columns and positions of its map.

    python tools/visualizations/kao_coefficients.py CONFIG CHECKPOINT IMAGE --pixel X Y

The config is one of MMPretrain, MMSegmentation or MMDetection whose model has mmkron.KroneckerAttention2d layers. The
whole image passes through the config's test pipeline, without its crops.
"""

from __future__ import annotations

import argparse
import inspect
import time
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
import torch
from mmcv.transforms import Pad
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.logging import MMLogger
from mmengine.registry import VISUALIZERS
from torch import Tensor, nn

from coefficient_figure import View, draw
from mmkron.analysis import PositionWeights, position_weights
from mmkron.data_checks.common import leaf_datasets, type_name
from mmkron.datasets import LoadImageFromFile
from mmkron.engine import runner as launch
from mmkron.layers import KroneckerAttention2d
from mmkron.ops.kronecker import MODES
from mmkron.utils import cli
from mmkron.utils.errors import LaunchError

STRONGEST = 5


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_common_arguments(parser, distributed=False)
    parser.add_argument('checkpoint', help="weights; 'none' for the initial ones")
    parser.add_argument('image', help='image file')
    parser.add_argument('--pixel', nargs=2, type=int, required=True, metavar=('X', 'Y'), help='in the image, from 0')
    parser.add_argument('--layer', metavar='NAME', help='attention layer; default: the last one that the model runs')
    parser.add_argument('--out-dir', default='work_dirs/kao_coefficients', metavar='DIR', help='default: %(default)s')
    parser.add_argument('--device', default='cpu', help='default: %(default)s')
    return parser.parse_args(argv)


def read_image(path: str, pixel: tuple[int, int]) -> np.ndarray:
    """Return the image (H, W, 3), uint8, RGB, or raise LaunchError if it cannot be read or has no pixel (x, y)."""
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


def attention_layers(model: nn.Module) -> dict[str, KroneckerAttention2d]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, KroneckerAttention2d)}


def pipeline_steps(cfg: Config) -> list[dict]:
    """Return the steps of the test pipeline, without annotations and crops."""
    dataset = (cfg.get('test_dataloader') or {}).get('dataset')
    pipelines = [leaf.get('pipeline') for _, leaf in leaf_datasets(dataset, 'test_dataloader.dataset')]
    pipeline = next(filter(None, [*pipelines, cfg.get('test_pipeline')]), None)
    if pipeline is None:
        raise LaunchError('the config has neither test_dataloader.dataset.pipeline nor test_pipeline')
    for step in pipeline:
        if 'transforms' in step:
            raise LaunchError(
                f'the test pipeline has {type_name(step)}, whose nested steps are not supported; '
                'use --cfg-options or another config with a pipeline that makes one input of an image'
            )
    return [step for step in pipeline if not any(word in type_name(step) for word in ('Annotations', 'Crop'))]


def prepare(cfg: Config, path: str, shape: tuple[int, int], model: nn.Module) -> tuple[dict, tuple[float, float]]:
    """Return the batch that the test pipeline makes of an image of ``shape`` (H, W), and the extent of the batch.

    The extent is (x, y) in pixels of the image; it is outside the image if padding was added, below and at the right.
    """
    steps, padding = pipeline_steps(cfg), np.ones(2)
    sample: dict[str, Any] = dict(img_path=path, img_id=0)
    if not any(type_name(step).startswith('Load') for step in steps):
        # The dataset makes the images, with as many channels as the network takes.
        channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
        sample = LoadImageFromFile(color_type='grayscale' if channels == 1 else 'color').transform(sample)
    for step in Compose(steps).transforms:
        size = sample['img'].shape[:2] if isinstance(step, Pad) else None
        sample = step(sample)
        if not isinstance(sample, dict):
            break
        if size is not None:
            padding *= np.divide(sample['img'].shape[:2], size)
    if not isinstance(sample, dict) or not isinstance(sample.get('inputs'), Tensor):
        raise LaunchError('the test pipeline does not make one input of an image; --cfg-options can change it')
    batch = model.data_preprocessor(pseudo_collate([sample]), False)
    padding *= np.divide(batch['inputs'].shape[2:], sample['inputs'].shape[1:])
    return batch, (shape[1] * float(padding[1]), shape[0] * float(padding[0]))


def run_layers(model: nn.Module, batch: dict, wanted: str | None) -> tuple[str, Tensor, Tensor]:
    """Return the name of the wanted attention layer, or of the last that runs, with its input map and its context."""
    layers = attention_layers(model)
    names, maps = {layer: name for name, layer in layers.items()}, {}

    def keep(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        maps.setdefault(names[layer], inspect.signature(layer.forward).bind(*args, **kwargs).arguments)

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in names]
    model(**batch, mode='tensor')
    for hook in hooks:
        hook.remove()
    # A single region is a batch of one, too.
    regions = [name for name in maps if len(maps[name]['x']) != 1 or 'roi_head' in name.split('.')]
    name = wanted or next(reversed(maps), None)
    if name in maps and name not in regions:
        x, context = maps[name]['x'], maps[name].get('context')
        return name, x, x if context is None else context
    lines = []
    for layer in layers:
        size = 'map {} x {}'.format(*maps[layer]['x'].shape[2:]) if layer in maps else 'does not run in prediction'
        lines.append(f'\n  {layer}: mode {layers[layer].mode}, {size}{", of regions" if layer in regions else ""}')
    problem = 'no attention layer runs' if wanted is None else f'--layer {wanted!r} is not an attention layer that runs'
    if name in regions:
        problem = f'the maps of layer {name!r} are of regions, not of the image'
    raise LaunchError(f'{problem}; the model has{"".join(lines)}')


@torch.no_grad()
def view_pixel(
    model: nn.Module, batch: dict, extent: tuple[float, float], pixel: tuple[int, int], wanted: str | None
) -> View:
    """Run the model on the batch of one image, which ends at ``extent``, and return the weights for ``pixel``."""
    name, x, context = run_layers(model, batch, wanted)
    layer, size, context_size = model.get_submodule(name), tuple(x.shape[2:]), tuple(context.shape[2:])
    j, i = (int((p + 0.5) / end * cells) for p, end, cells in zip(pixel, extent, reversed(size)))
    if MODES[layer.mode].query.means:
        weights = position_weights(layer.coefficients(x, context), layer.mode, size, (i, j), context_size)
    else:  # one query only, because the coefficients of all may exceed the memory
        coefficients = layer.coefficients(x[:, :, i : i + 1, j : j + 1], context)
        weights = position_weights(coefficients, layer.mode, (1, 1), (0, 0), context_size)
    weights = PositionWeights(*(part[0].float().cpu() for part in weights))
    return View(name, layer.mode, size, (i, j), extent, weights)


def save(picture: np.ndarray, name: str, out_dir: Path, cfg: Config, started: int) -> list[Path]:
    """Write the picture, pass it to the config's visualizer, and return the files written since ``started``."""
    backends = cfg.get('vis_backends') or [dict(type='LocalVisBackend')]
    settings = cfg.get('visualizer') or dict(type='Visualizer', vis_backends=backends)
    try:
        mmcv.imwrite(picture[..., ::-1], str(out_dir / f'{name}.png'))
        # Visualizers are looked up by name, and one of the same name may have other backends.
        visualizer = VISUALIZERS.build(dict(settings, name=f'{name}_{started}', save_dir=str(out_dir)))
        visualizer.add_image(name, picture)
        visualizer.close()
    except ImportError as error:
        raise LaunchError(f'a backend of the visualizer needs a package: {error}') from error
    except OSError as error:
        raise LaunchError(f'the picture cannot be written: {error}') from error
    return [path for path in sorted(out_dir.rglob('*')) if path.is_file() and path.stat().st_mtime_ns >= started]


def print_strongest(weights: PositionWeights) -> None:
    for kind, values in (('columns', weights.columns.sum(0)), ('rows', weights.rows.sum(0))):
        best = values.abs().topk(min(STRONGEST, len(values))).indices
        pairs = [f'{k} ({value:.3g})' for k, value in zip(best.tolist(), values[best].tolist())]
        print(f'strongest {kind} of {len(values)}: {", ".join(pairs)}')


def run(args: argparse.Namespace) -> None:
    started, pixel, out_dir = time.time_ns(), tuple(args.pixel), Path(args.out_dir)
    cfg = cli.load_model_config(args)
    image = read_image(args.image, pixel)
    MMLogger.get_instance('kao_coefficients', log_level='WARNING')
    with launch.environment(cfg, args):
        model = launch.build_model(cfg, args.device, KroneckerAttention2d, 'KroneckerAttention2d layer')
        batch, extent = prepare(cfg, args.image, image.shape[:2], model)
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f'--out-dir {args.out_dir!r} cannot be created: {error}') from error
        view = view_pixel(model, batch, extent, pixel, args.layer)
        name = f'{Path(args.image).stem}_{view.layer}_x{pixel[0]}_y{pixel[1]}'
        written = save(draw(image, pixel, view), name, out_dir, cfg, started)
    print_strongest(view.weights)
    print('written:', *written, sep='\n  ')


def main(argv: list[str] | None = None) -> None:
    cli.main(run, parse_args(argv))


if __name__ == '__main__':
    main()
