"""Compose real garments into scenes: one folder that is both a PASCAL VOC and a COCO dataset.

The garments come from Fashion-MNIST: its four IDX files in data/fashionmnist, else those of the Debian package
dataset-fashion-mnist, else scikit-learn's digits take their place. Training scenes hold training images only.

    python tools/dataset_converters/fashion_scenes.py                   # 2,000 + 200 scenes in data/fashion_scenes
    python tools/dataset_converters/fashion_scenes.py data/wide --size 120 200 --objects 5 9 --scale 1.5 3
    python tools/dataset_converters/fashion_scenes.py data/digit_scenes --source digits --train 100 --val 20

    JPEGImages/000001.jpg                    the scenes; those for validation follow those for training
    SegmentationClass/000001.png             0 background, k + 1 for class k
    SegmentationObject/000001.png            0 background, i + 1 for the i-th instance
    ImageSets/Segmentation/train.txt         val.txt, trainval.txt; classes.txt, the names with the background
    annotations/instances_train.json         instances_val.json, masks as RLE; classes.txt, the names without it
    samples.png                              some validation scenes with their annotations
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
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
OBJECTS, CLUTTER, SCALE = (3, 5), 6, (1.5, 2.5)  # of a scene, by default


class Sprites(NamedTuple):
    images: np.ndarray  # (N, 28, 28) uint8, 0 around the object
    labels: np.ndarray  # (N,) uint8
    solid: bool  # holes belong to the object and its mirror image is of the same class


class Source(NamedTuple):
    name: str
    classes: tuple[str, ...]
    splits: dict[str, Sprites]


class Scene(NamedTuple):
    image: np.ndarray  # (H, W, 3) uint8
    class_map: np.ndarray  # (H, W) uint8, 0 background, k + 1 for class k
    object_map: np.ndarray  # (H, W) uint8, 0 background, i + 1 for the i-th object
    labels: list[int]
    areas: list[int]  # pixels of each object's whole mask, hidden ones and those beyond the border included


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Read the uint8 array of ``dims`` dimensions in an IDX file, plain or .gz."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f'{path} is not a complete .gz file: {e}') from None
    header = np.frombuffer(content[: 4 + 4 * dims], '>u1')
    if len(header) < 4 + 4 * dims or tuple(header[:4]) != (0, 0, 8, dims):
        raise ValueError(f'{path} is not an IDX file of unsigned bytes in {dims} dimensions')
    shape = tuple(int(n) for n in header[4:].view('>u4'))
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dims)
    if len(values) != np.prod(shape):
        raise ValueError(f'{path} must hold {shape} bytes after its header, got {len(values)}')
    return values.reshape(shape)


def find_fashion(folder: Path) -> dict[str, Path]:
    """Find the files of Fashion-MNIST in ``folder``, by their names without .gz; plain files come first."""
    return {name: path for name in FILES for path in (folder / f'{name}.gz', folder / name) if path.is_file()}


def read_fashion(folder: Path) -> Source:
    """Fashion-MNIST's images that are not blank; ValueError names a file that is missing or wrong."""
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
    """scikit-learn's digits, enlarged to a sprite's size and split as the dataset ``mmkron.Digits`` splits them."""
    from mmkron.datasets import Digits

    splits = {}
    for split in SPLITS:
        samples = Digits(split, lazy_init=True).load_data_list()
        images = [Image.fromarray(sample['img']).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for sample in samples]
        # The smooth slopes of the enlarged strokes are cut at half height, so that the mask is as wide as the stroke.
        images = [np.where(image > np.uint8(100), image, np.uint8(0)) for image in map(np.asarray, images)]
        labels = np.array([sample['gt_label'] for sample in samples], np.uint8)
        splits[split] = Sprites(np.stack(images), labels, solid=False)
    return Source("scikit-learn's digits", tuple('0123456789'), splits)


def read_source(source: str) -> Source:
    """Read the images of ``--source``."""
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
    print("Fashion-MNIST is not on disk (Debian's package dataset-fashion-mnist holds it): composing digits instead.")
    return read_digits()


def make_background(rng: np.random.Generator, size: tuple[int, int], clutter: int) -> np.ndarray:
    """Colored noise of low frequency under ``clutter`` half-transparent shapes, (H, W, 3) uint8."""
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
    """Texture and opacity of a sprite in 0..1 after scaling, mirroring and rotation, cut to where it is opaque."""
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
    """Of some random bright colors the one that differs most from ``under``, whatever the class."""
    tints = rng.uniform(60, 255, (6, 3))
    tints *= 255 / tints.max(1, keepdims=True)
    return tints[np.abs(0.75 * tints - under).sum(1).argmax()]


def place(
    mask: np.ndarray, object_map: np.ndarray, areas: list[int], rng: np.random.Generator
) -> tuple[np.ndarray, tuple[slice, slice], tuple[slice, slice]] | None:
    """Place one more object where at least half of it and of every earlier one stays visible.

    Returns:
        The new object map, the object's box in it and the part of ``mask`` in that box; None if no place was found.
    """
    (h, w), (height, width) = mask.shape, object_map.shape
    whole = [*areas, mask.sum()]
    for attempt in range(TRIES):
        # The last try lies inside the canvas, where the first object always finds its place.
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
    """A scene of (H, W) pixels; a sprite is drawn at no more than the size at which it fits in."""
    canvas = make_background(rng, size, clutter).astype(np.float64)
    object_map = np.zeros(size, np.uint8)
    labels, areas = [], []
    largest = (min(size) - 2) / (SIDE * 1.3)  # a square rotated by 20 degrees is 1.28 times as wide
    for _ in range(rng.integers(objects[0], objects[1], endpoint=True)):
        index = rng.integers(len(sprites.images))
        texture, alpha = transform(
            sprites.images[index],
            sprites.solid,
            scale=min(rng.uniform(*scale), largest),
            angle=rng.uniform(-ANGLE, ANGLE),
            flip=sprites.solid and rng.random() < 0.5,
        )
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
    """VOC's 256 colors, (256, 3) uint8: the bits of a value, dealt to red, green and blue from the high bit down."""
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


def write_set(folder: Path, source: Source, args: argparse.Namespace) -> dict[str, int]:
    """Write everything but the picture and return the number of objects of each split."""
    for name in ('JPEGImages', 'SegmentationClass', 'SegmentationObject', 'ImageSets/Segmentation', 'annotations'):
        (folder / name).mkdir(parents=True)
    height, width = args.size
    categories = [dict(id=k + 1, name=name) for k, name in enumerate(source.classes)]
    counts, stems, first = {}, [], 1
    for split_index, split in enumerate(SPLITS):
        images, annotations = [], []
        for i in track_iter_progress(range(getattr(args, split))):
            rng = np.random.default_rng([args.seed, split_index, i])
            scene = compose_scene(source.splits[split], rng, args.size, args.objects, args.clutter, args.scale)
            stem = f'{first + i:06d}'
            Image.fromarray(scene.image).save(folder / 'JPEGImages' / f'{stem}.jpg', quality=95)
            save_map(scene.class_map, folder / 'SegmentationClass' / f'{stem}.png')
            save_map(scene.object_map, folder / 'SegmentationObject' / f'{stem}.png')
            images.append(dict(id=first + i, file_name=f'{stem}.jpg', height=height, width=width))
            annotations += instances(scene, first + i, len(annotations) + 1)
        info = dict(description=f'Scenes composed of {source.name}', split=split, seed=args.seed)
        content = dict(info=info, images=images, categories=categories, annotations=annotations)
        (folder / 'annotations' / f'instances_{split}.json').write_text(json.dumps(content))
        names = [Path(image['file_name']).stem for image in images]
        (folder / 'ImageSets' / 'Segmentation' / f'{split}.txt').write_text('\n'.join(names) + '\n')
        stems += names
        first += len(images)
        counts[split] = len(annotations)
    (folder / 'ImageSets' / 'Segmentation' / 'trainval.txt').write_text('\n'.join(stems) + '\n')
    for place, names in (('annotations', source.classes), ('ImageSets/Segmentation', ('background', *source.classes))):
        (folder / place / 'classes.txt').write_text('\n'.join(names) + '\n')
    return counts


def draw_samples(folder: Path, most: int = 6) -> None:
    """Draw some validation scenes as they lie on disk: plain, with colored classes, with boxes and names."""
    content = json.loads((folder / 'annotations' / 'instances_val.json').read_text())
    names = {category['id']: category['name'] for category in content['categories']}
    colors = np.vstack([np.zeros(3), colormaps['tab10'].colors])
    images = content['images'][:most]
    shape = np.array([images[0]['height'], images[0]['width']])
    height, width = 2.6 * shape / shape.max() * (3, len(images))
    figure = Figure(figsize=(max(width, 8), height + 0.8), layout='constrained')
    axes = figure.subplots(3, len(images), squeeze=False)
    for image, (plain, classes, boxes) in zip(images, axes.T):
        scene = Image.open(folder / 'JPEGImages' / image['file_name'])
        class_map = np.asarray(Image.open(folder / 'SegmentationClass' / f'{Path(image["file_name"]).stem}.png'))
        gray = np.asarray(scene.convert('L'))[..., None] / 255
        plain.imshow(scene)
        boxes.imshow(scene)
        classes.imshow(np.where(class_map[..., None] > 0, colors[class_map] * (0.4 + 0.6 * gray), 0.4 * gray))
        for instance in content['annotations']:
            if instance['image_id'] == image['id']:
                (x, y, w, h), label = instance['bbox'], instance['category_id']
                boxes.add_patch(Rectangle((x - 0.5, y - 0.5), w, h, fill=False, edgecolor=colors[label], linewidth=1.5))
                tag = dict(facecolor=colors[label], edgecolor='none', pad=1)
                above = 'bottom' if y > 0.08 * image['height'] else 'top'
                boxes.text(x, y, names[label], color='white', fontsize=7, va=above, bbox=tag, clip_on=True)
    for axis in axes.flat:
        axis.axis('off')
    handles = [Patch(color=colors[label], label=name) for label, name in names.items()]
    columns = len(names) if width > 11 else (len(names) + 1) // 2
    figure.legend(handles=handles, loc='outside lower center', ncols=columns, frameon=False)
    figure.savefig(folder / 'samples.png', dpi=120)


def parse_args(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    add, low_high = parser.add_argument, dict(nargs=2, metavar=('MIN', 'MAX'))
    add('out', nargs='?', metavar='OUT', default='data/fashion_scenes', type=Path, help='folder to make (%(default)s)')
    add(
        '--source',
        default='auto',
        help="auto (default), fashion (auto, but never digits), digits, or a folder of Fashion-MNIST's IDX files",
    )
    add('--size', nargs=2, metavar=('H', 'W'), type=int, default=(128, 128), help='pixels of a scene %(default)s')
    add('--train', type=int, default=2000, metavar='N', help='training scenes (%(default)s)')
    add('--val', type=int, default=200, metavar='N', help='validation scenes (%(default)s)')
    add('--objects', **low_high, type=int, default=OBJECTS, help='objects in a scene %(default)s')
    add('--clutter', type=int, default=CLUTTER, metavar='N', help='shapes in the background (%(default)s)')
    add('--scale', **low_high, type=float, default=SCALE, help=f'side of an object / {SIDE} pixels %(default)s')
    add('--seed', type=int, default=0, metavar='N', help='(%(default)s)')
    args = parser.parse_args(argv)
    args.size, args.objects, args.scale = tuple(args.size), tuple(args.objects), tuple(args.scale)
    checks = {
        'size': (min(args.size) >= LEAST_SIZE, f'two sizes of at least {LEAST_SIZE}'),
        'train': (args.train >= 1, 'at least 1'),
        'val': (args.val >= 1, 'at least 1'),
        'objects': (1 <= args.objects[0] <= args.objects[1] <= MOST_OBJECTS, f'1 <= MIN <= MAX <= {MOST_OBJECTS}'),
        'clutter': (args.clutter >= 0, 'at least 0'),
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
        parser.error(
            f'OUT must be a new or empty folder, got {args.out}: nothing is overwritten. Remove it for new ones'
        )
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
            "The shipped configs for scenes have the garments' names. For these scenes add, for each dataloader of the "
            'config,\n  --cfg-options train_dataloader.dataset.metainfo.classes='
            f'{args.out}/annotations/classes.txt\n(ImageSets/Segmentation/classes.txt for segmentation).'
        )
    print(f'{source.name}: {len(source.classes)} classes, {", ".join(source.classes)}')
    for split in SPLITS:
        print(f'{split:<8} {getattr(args, split)} scenes with {counts[split]} objects')
    print(f'{"folder":<8} {args.out}\n{"picture":<8} {args.out / "samples.png"}')


if __name__ == '__main__':
    main()
