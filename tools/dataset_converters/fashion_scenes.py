"""Compose real garments into scenes: one folder that is both a PASCAL VOC and a COCO dataset.

The garments come from Fashion-MNIST: from its four IDX files in data/fashionmnist or, if they are missing, from the
Debian package dataset-fashion-mnist. Without both, the scenes are composed of scikit-learn's digits. Training scenes
contain training images only.

    python tools/dataset_converters/fashion_scenes.py                   # 2,000 + 200 scenes in data/fashion_scenes
    python tools/dataset_converters/fashion_scenes.py data/wide --size 120 200 --objects 5 9 --scale 1.5 3
    python tools/dataset_converters/fashion_scenes.py data/digit_scenes --source digits --train 100 --val 20

    JPEGImages/000001.jpg                    the scenes; the validation scenes follow the training scenes
    SegmentationClass/000001.png             0 background, k + 1 for class k
    SegmentationObject/000001.png            0 background, i + 1 for the i-th instance
    ImageSets/Segmentation/train.txt         val.txt, trainval.txt; classes.txt, the names with the background
    annotations/instances_train.json         instances_val.json, masks as RLE; classes.txt, the names of the classes
    samples.png                              some validation scenes with their annotations
"""

from __future__ import annotations

import gzip
import json
import tempfile
import zlib
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from mmengine.utils import track_iter_progress
from PIL import Image, ImageDraw
from pycocotools import mask as coco_mask
from scipy.ndimage import binary_fill_holes

FASHION = ('t-shirt', 'trouser', 'pullover', 'dress', 'coat', 'sandal', 'shirt', 'sneaker', 'bag', 'ankle-boot')
FILES = [f'{part}-{kind}' for part in ('train', 't10k') for kind in ('images-idx3-ubyte', 'labels-idx1-ubyte')]
FASHION_DIRS = (Path('data/fashionmnist'), Path('/usr/share/datasets/fashion-mnist'))
SPLITS = ('train', 'val')
SIDE = 28
INK = 16  # gray values up to this are the noise around a garment
MIN_PIXELS = 20
LEAST_SIZE, MOST_OBJECTS = 32, 254  # a mask's value 255 is "ignore" to VOC
ANGLE = 20.0
OVERHANG = 0.15
TRIES = 8
OBJECTS, CLUTTER, SCALE = (3, 5), 6, (1.5, 2.5)  # defaults of a scene


class Sprites(NamedTuple):
    images: np.ndarray  # (N, 28, 28) uint8, 0 around the object
    labels: np.ndarray  # (N,) uint8
    solid: bool  # holes belong to the object, and its mirror image has the same class


class Source(NamedTuple):
    name: str
    classes: tuple[str, ...]
    splits: dict[str, Sprites]


class Scene(NamedTuple):
    image: np.ndarray  # (H, W, 3) uint8
    class_map: np.ndarray  # (H, W) uint8, 0 background, k + 1 for class k
    object_map: np.ndarray  # (H, W) uint8, 0 background, i + 1 for the i-th object
    labels: list[int]
    areas: list[int]  # pixels of each object's whole mask, including those that are hidden or beyond the border


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Return the uint8 array of ``dims`` dimensions in an IDX file, plain or .gz."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f'{path} is not a complete .gz file: {e}') from None
    start = 4 + 4 * dims
    if len(content) < start or content[:4] != bytes((0, 0, 8, dims)):
        raise ValueError(f'{path} is not an IDX file of unsigned bytes in {dims} dimensions')
    shape = tuple(np.frombuffer(content, '>u4', dims, 4).tolist())
    values = np.frombuffer(content, np.uint8, offset=start)
    if len(values) != np.prod(shape):
        raise ValueError(f'{path} must hold {shape} bytes after its header, got {len(values)}')
    return values.reshape(shape)


def find_fashion(folder: Path) -> dict[str, Path]:
    """Return the files of Fashion-MNIST in a folder by their names without .gz; plain files take precedence."""
    return {name: path for name in FILES for path in (folder / f'{name}.gz', folder / name) if path.is_file()}


def read_fashion(folder: Path) -> Source:
    """Return the images of Fashion-MNIST that are not blank; raise ValueError for a missing or damaged file."""
    files, splits = find_fashion(folder), {}
    missing = [name for name in FILES if name not in files]
    if missing:
        raise ValueError(f'--source {folder} has no {", ".join(missing)} (plain or .gz)')
    for split, part in zip(SPLITS, ('train', 't10k')):
        image_file, label_file = files[f'{part}-images-idx3-ubyte'], files[f'{part}-labels-idx1-ubyte']
        images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
        if images.shape[1:] != (SIDE, SIDE):
            raise ValueError(f'{image_file} must hold images of {SIDE} x {SIDE} pixels, got {images.shape[1:]}')
        if len(images) != len(labels):
            raise ValueError(f'{label_file} must hold {len(images)} labels, one per image, got {len(labels)}')
        if len(labels) and labels.max() >= len(FASHION):
            raise ValueError(f'{label_file} must hold labels from 0 to {len(FASHION) - 1}, got {labels.max()}')
        usable = (images > INK).sum((1, 2)) >= MIN_PIXELS
        if not usable.any():
            raise ValueError(f'{image_file} must hold at least one image that is not blank')
        splits[split] = Sprites(images[usable], labels[usable], solid=True)
    return Source(f'Fashion-MNIST in {folder}', FASHION, splits)


def read_digits() -> Source:
    """Return scikit-learn's digits, enlarged to the size of a sprite, in the splits of ``mmkron.Digits``."""
    from mmkron.datasets import Digits

    splits = {}
    for split in SPLITS:
        samples = Digits(split, lazy_init=True).load_data_list()
        images = [Image.fromarray(sample['img']).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for sample in samples]
        # Cut the smooth slopes of the enlarged strokes at half height, so that a mask is as wide as its stroke.
        images = [np.where(image > np.uint8(100), image, np.uint8(0)) for image in map(np.asarray, images)]
        labels = np.array([sample['gt_label'] for sample in samples], np.uint8)
        splits[split] = Sprites(np.stack(images), labels, solid=False)
    return Source("scikit-learn's digits", tuple('0123456789'), splits)


def read_source(source: str) -> Source:
    """Return the images of ``--source``."""
    if source == 'digits':
        return read_digits()
    if source not in ('auto', 'fashion'):
        if not Path(source).is_dir():
            raise ValueError(
                f"--source must be 'auto', 'fashion', 'digits' or a folder of Fashion-MNIST's files, got {source!r}"
            )
        return read_fashion(Path(source))
    for folder in FASHION_DIRS:
        if len(find_fashion(folder)) == len(FILES):
            return read_fashion(folder)
    if source == 'fashion':
        raise ValueError(
            'Fashion-MNIST is not on disk: sudo apt-get install dataset-fashion-mnist, or put its four IDX files, '
            f'plain or .gz, into {FASHION_DIRS[0]}'
        )
    print('Fashion-MNIST is not on disk (Debian package dataset-fashion-mnist): composing digits instead.')
    return read_digits()


def make_background(rng: np.random.Generator, size: tuple[int, int], clutter: int) -> np.ndarray:
    """Draw ``clutter`` half-transparent shapes over colored noise of low frequency, (H, W, 3) uint8."""
    height, width = size
    noise = rng.uniform(20, 170, 3) + rng.normal(0, 30, (*rng.integers(3, 7, 2), 3))
    image = Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image, 'RGBA')
    for _ in range(clutter):
        color = (*rng.integers(0, 256, 3).tolist(), int(rng.integers(90, 210)))
        center, reach = rng.uniform(0, 1, 2) * (width, height), rng.uniform(0.05, 0.25, 2) * min(size)
        left, top, right, bottom = (float(v) for v in (*(center - reach), *(center + reach)))
        shape = rng.integers(4)
        if shape == 0:
            draw.ellipse((left, top, right, bottom), color)
        elif shape == 1:
            draw.rectangle((left, top, right, bottom), color)
        else:
            ends = (left, top, right, bottom) if shape == 2 else (left, bottom, right, top)
            draw.line(ends, color, max(1, round(min(size) * float(rng.uniform(0.01, 0.05)))))
    grain = rng.normal(0, 4, (height, width, 1))
    return np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8)


def transform(gray: np.ndarray, solid: bool, scale: float, angle: float, flip: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return texture and opacity of a scaled, mirrored and rotated sprite, both in 0..1 and cropped to the object."""
    inside = gray > INK
    if solid:
        inside = binary_fill_holes(inside)
    side = max(1, round(SIDE * scale))
    planes = []
    for plane in (inside * (gray / 255.0), inside):
        image = Image.fromarray(plane.astype(np.float32)).resize((side, side), Image.Resampling.BILINEAR)
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image
        planes.append(np.asarray(image.rotate(angle, Image.Resampling.BILINEAR, expand=True)))
    weighted, alpha = planes
    texture = np.clip(weighted / np.maximum(alpha, 1e-3), 0, 1)
    left, top, right, bottom = Image.fromarray(alpha > 0).getbbox()
    return texture[top:bottom, left:right], np.clip(alpha[top:bottom, left:right], 0, 1)


def pick_tint(rng: np.random.Generator, under: np.ndarray) -> np.ndarray:
    """Draw some random bright colors and return the one that differs most from the color ``under``."""
    tints = rng.uniform(60, 255, (6, 3))
    tints *= 255 / tints.max(1, keepdims=True)
    return tints[np.abs(0.75 * tints - under).sum(1).argmax()]


def place(
    mask: np.ndarray, object_map: np.ndarray, areas: list[int], rng: np.random.Generator
) -> tuple[np.ndarray, tuple[slice, slice], tuple[slice, slice]] | None:
    """Place one more object where at least half of it and of every earlier one stays visible.

    Returns:
        The new object map, the object's box in it and the part of ``mask`` in that box, or None if there is no place.
    """
    (h, w), (height, width) = mask.shape, object_map.shape
    whole = [*areas, mask.sum()]
    for attempt in range(TRIES):
        # The last try is inside the canvas, where there is always a place for the first object.
        beyond_y, beyond_x = (round(OVERHANG * n) if attempt < TRIES - 1 else 0 for n in (h, w))
        y = int(rng.integers(-beyond_y, height - h + beyond_y, endpoint=True))
        x = int(rng.integers(-beyond_x, width - w + beyond_x, endpoint=True))
        there = np.s_[max(y, 0) : y + h, max(x, 0) : x + w]
        part = np.s_[max(-y, 0) : height - y, max(-x, 0) : width - x]
        placed = object_map.copy()
        placed[there][mask[part]] = len(whole)
        visible = np.bincount(placed.ravel(), minlength=len(whole) + 1)[1:]
        if (2 * visible >= whole).all():
            return placed, there, part
    return None


def compose_scene(
    sprites: Sprites,
    rng: np.random.Generator,
    size: tuple[int, int],
    objects: tuple[int, int] = OBJECTS,
    clutter: int = CLUTTER,
    scale: tuple[float, float] = SCALE,
) -> Scene:
    """Compose a scene of (H, W) pixels; ``scale`` is limited to what fits."""
    canvas = make_background(rng, size, clutter).astype(np.float64)
    object_map = np.zeros(size, np.uint8)
    labels, areas = [], []
    largest = (min(size) - 2) / (SIDE * 1.3)  # a square rotated by 20 degrees is 1.28 times as wide
    for _ in range(rng.integers(objects[0], objects[1], endpoint=True)):
        index = rng.integers(len(sprites.images))
        factor, angle = min(rng.uniform(*scale), largest), rng.uniform(-ANGLE, ANGLE)
        flip = sprites.solid and rng.random() < 0.5
        texture, alpha = transform(sprites.images[index], sprites.solid, factor, angle, flip)
        mask = alpha > alpha.max() / 2
        found = place(mask, object_map, areas, rng)
        if found is None:
            continue
        object_map, there, part = found
        areas.append(int(mask.sum()))
        labels.append(int(sprites.labels[index]))
        tint = pick_tint(rng, canvas[there][mask[part]].mean(0))
        color = tint * (0.25 + 0.75 * texture[part][..., None])
        canvas[there] += alpha[part][..., None] * (color - canvas[there])
    class_map = np.array([0, *(label + 1 for label in labels)], np.uint8)[object_map]
    return Scene(np.rint(canvas).astype(np.uint8), class_map, object_map, labels, areas)


def voc_palette() -> np.ndarray:
    """Return the 256 colors of VOC, (256, 3) uint8: red, green and blue take the bits of a value in turn."""
    values = np.arange(256)
    colors = np.zeros((256, 3), int)
    for bit in range(8):
        colors[:, bit % 3] |= (values >> bit & 1) << (7 - bit // 3)
    return colors.astype(np.uint8)


def save_map(values: np.ndarray, path: Path) -> None:
    """Write (H, W) uint8 as a PNG with VOC's palette."""
    image = Image.fromarray(values)
    image.putpalette(voc_palette().tobytes())
    image.save(path)


def instances(scene: Scene, image_id: int, first_id: int) -> list[dict]:
    """Return the COCO annotations of a scene."""
    annotations = []
    for i, label in enumerate(scene.labels):
        rle = coco_mask.encode(np.asfortranarray(scene.object_map == i + 1, np.uint8))
        annotation = dict(id=first_id + i, image_id=image_id, category_id=label + 1, iscrowd=0)
        annotation.update(bbox=coco_mask.toBbox(rle).tolist(), area=int(coco_mask.area(rle)))
        annotation['segmentation'] = dict(rle, counts=rle['counts'].decode())
        annotations.append(annotation)
    return annotations


def write_split(folder: Path, source: Source, args: Namespace, split: str, first: int) -> tuple[list[str], int]:
    """Write the scenes of a split, numbered from ``first``; return their stems and the number of objects."""
    stems, images, annotations = [], [], []
    for i in track_iter_progress(range(getattr(args, split))):
        rng = np.random.default_rng([args.seed, SPLITS.index(split), i])
        scene = compose_scene(source.splits[split], rng, args.size, args.objects, scale=args.scale)
        stem = f'{first + i:06d}'
        Image.fromarray(scene.image).save(folder / 'JPEGImages' / f'{stem}.jpg', quality=95)
        save_map(scene.class_map, folder / 'SegmentationClass' / f'{stem}.png')
        save_map(scene.object_map, folder / 'SegmentationObject' / f'{stem}.png')
        images.append(dict(id=first + i, file_name=f'{stem}.jpg', height=args.size[0], width=args.size[1]))
        annotations += instances(scene, first + i, len(annotations) + 1)
        stems.append(stem)
    info = dict(description=f'Scenes composed of {source.name}', split=split, seed=args.seed)
    categories = [dict(id=k + 1, name=name) for k, name in enumerate(source.classes)]
    content = dict(info=info, images=images, categories=categories, annotations=annotations)
    (folder / 'annotations' / f'instances_{split}.json').write_text(json.dumps(content))
    return stems, len(annotations)


def write_set(folder: Path, source: Source, args: Namespace) -> dict[str, int]:
    """Write everything but the picture; return the number of objects of each split."""
    for name in ('JPEGImages', 'SegmentationClass', 'SegmentationObject', 'ImageSets/Segmentation', 'annotations'):
        (folder / name).mkdir(parents=True)
    train, train_count = write_split(folder, source, args, 'train', 1)
    val, val_count = write_split(folder, source, args, 'val', 1 + args.train)
    lists = dict(train=train, val=val, trainval=train + val, classes=['background', *source.classes])
    for name, lines in lists.items():
        (folder / 'ImageSets/Segmentation' / f'{name}.txt').write_text('\n'.join(lines) + '\n')
    (folder / 'annotations/classes.txt').write_text('\n'.join(source.classes) + '\n')
    return dict(train=train_count, val=val_count)


def draw_samples(folder: Path, count: int = 6) -> None:
    """Draw the first validation scenes as they are on disk: the image, its class map and its boxes."""
    content = json.loads((folder / 'annotations' / 'instances_val.json').read_text())
    color_of = ScalarMappable(Normalize(1, 10), 'tab10').to_rgba
    figure = Figure(figsize=(2 * count, 7), layout='compressed')
    axes = figure.subplots(3, count)
    for axis in axes.flat:
        axis.axis('off')
    for image, column in zip(content['images'], axes.T):
        scene = Image.open(folder / 'JPEGImages' / image['file_name'])
        class_map = np.asarray(Image.open(folder / 'SegmentationClass' / f'{image["id"]:06d}.png'))
        for axis in column:
            axis.imshow(scene)
        column[1].imshow(np.ma.masked_equal(class_map, 0), 'tab10', vmin=1, vmax=10, interpolation='nearest')
        for instance in content['annotations']:
            if instance['image_id'] == image['id']:
                x, y, w, h = instance['bbox']
                color = color_of(instance['category_id'])
                column[2].add_patch(Rectangle((x - 0.5, y - 0.5), w, h, fill=False, edgecolor=color, linewidth=1.5))
    handles = [Patch(color=color_of(category['id']), label=category['name']) for category in content['categories']]
    figure.legend(handles=handles, loc='outside lower center', ncols=5, frameon=False)
    figure.savefig(folder / 'samples.png', dpi=120)


def parse_args(argv: list[str] | None = None) -> tuple[ArgumentParser, Namespace]:
    parser = ArgumentParser(description=__doc__.split('\n\n')[0])
    add, low_high = parser.add_argument, dict(nargs=2, metavar=('MIN', 'MAX'))
    add('out', nargs='?', metavar='OUT', default='data/fashion_scenes', type=Path, help='new folder (%(default)s)')
    source = "auto (default), fashion (never digits), digits, or a folder with Fashion-MNIST's IDX files"
    add('--source', default='auto', help=source)
    add('--size', nargs=2, metavar=('H', 'W'), type=int, default=(128, 128), help='pixels of a scene %(default)s')
    add('--train', type=int, default=2000, metavar='N', help='training scenes (%(default)s)')
    add('--val', type=int, default=200, metavar='N', help='validation scenes (%(default)s)')
    add('--objects', **low_high, type=int, default=OBJECTS, help='objects in a scene %(default)s')
    add('--scale', **low_high, type=float, default=SCALE, help=f'side of an object / {SIDE} pixels %(default)s')
    add('--seed', type=int, default=0, metavar='N', help='random seed (%(default)s)')
    args = parser.parse_args(argv)
    args.size, args.objects, args.scale = tuple(args.size), tuple(args.objects), tuple(args.scale)
    checks = {
        'size': (min(args.size) >= LEAST_SIZE, f'two sizes of at least {LEAST_SIZE}'),
        'train': (args.train >= 1, 'at least 1'),
        'val': (args.val >= 1, 'at least 1'),
        'objects': (1 <= args.objects[0] <= args.objects[1] <= MOST_OBJECTS, f'1 <= MIN <= MAX <= {MOST_OBJECTS}'),
        'scale': (0.25 <= args.scale[0] <= args.scale[1] < np.inf, '0.25 <= MIN <= MAX'),
        'seed': (args.seed >= 0, 'at least 0'),
    }
    for name, (good, allowed) in checks.items():
        if not good:
            parser.error(f'--{name} must be {allowed}, got {getattr(args, name)}')
    return parser, args


def main(argv: list[str] | None = None) -> None:
    parser, args = parse_args(argv)
    out = args.out.resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        parser.error(f'OUT must be a new or empty folder, got {args.out}: nothing is overwritten')
    try:
        source = read_source(args.source)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f'.{out.name}-', dir=out.parent) as temporary:
            folder = Path(temporary) / out.name
            counts = write_set(folder, source, args)
            draw_samples(folder)
            if out.exists():
                out.rmdir()
            folder.rename(out)
    except (ValueError, OSError) as e:
        parser.error(str(e))
    if source.classes != FASHION:
        print(
            'The shipped configs for scenes contain the names of the garments. For these scenes, add the following to '
            'the\ncommand, for each dataloader (ImageSets/Segmentation/classes.txt for segmentation):\n'
            f'  --cfg-options train_dataloader.dataset.metainfo.classes={args.out}/annotations/classes.txt'
        )
    print(f'{source.name}: {len(source.classes)} classes, {", ".join(source.classes)}')
    for split in SPLITS:
        print(f'{split:<8} {getattr(args, split)} scenes with {counts[split]} objects')
    print(f'{"folder":<8} {args.out}\n{"picture":<8} {args.out / "samples.png"}')


if __name__ == '__main__':
    main()
