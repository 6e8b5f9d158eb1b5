"""The composed scenes: the contents of the files, and the objects of a scene."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.tools import load_tool

pytest.importorskip('pycocotools', reason='the masks of the COCO set are encoded by pycocotools')

SIZE = (65, 90)
OPTIONS = ['--source', 'digits', '--size', '65', '90', '--objects', '4', '7']


@pytest.fixture(scope='module')
def tool():
    return load_tool('dataset_converters/fashion_scenes')


@pytest.fixture(scope='module')
def made(tool, tmp_path_factory):
    """Compose a small set of digits, which scikit-learn always has."""
    out = tmp_path_factory.mktemp('scenes') / 'set'
    tool.main([str(out), *OPTIONS, '--train', '5', '--val', '4'])
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def disk(radius: float = 10.0, value: int = 255) -> np.ndarray:
    """Return a (28, 28) uint8 image that looks the same mirrored and rotated."""
    y, x = np.mgrid[:28, :28] - 13.5
    return np.where(y**2 + x**2 <= radius**2, value, 0).astype(np.uint8)


def disks(tool):
    return tool.Sprites(np.stack([disk()]), np.array([3], np.uint8), solid=True)


# ------------------------------------------------------------------------------------------------ contents of the files


def test_layout(made):
    stems = [f'{n:06d}' for n in range(1, 10)]
    wanted = {f'JPEGImages/{stem}.jpg' for stem in stems}
    wanted |= {f'Segmentation{kind}/{stem}.png' for kind in ('Class', 'Object') for stem in stems}
    wanted |= {f'ImageSets/Segmentation/{name}.txt' for name in ('train', 'val', 'trainval', 'classes')}
    wanted |= {f'annotations/{name}' for name in ('instances_train.json', 'instances_val.json', 'classes.txt')}
    assert set(content(made)) == wanted | {'samples.png'}
    for split, names in (('train', stems[:5]), ('val', stems[5:]), ('trainval', stems)):
        assert (made / f'ImageSets/Segmentation/{split}.txt').read_text().split() == names
    assert (made / 'annotations/classes.txt').read_text().split() == list('0123456789')
    assert [path.name for path in made.parent.iterdir()] == ['set']  # no temporary folder is left


def test_palette_is_that_of_voc(tool):
    pytest.importorskip('mmcv._ext', reason='mmseg needs the compiled operators of mmcv')
    utils = pytest.importorskip('mmseg.utils')
    assert tool.voc_palette()[:21].tolist() == utils.voc_palette()
    assert len(np.unique(tool.voc_palette(), axis=0)) == 256


@pytest.mark.parametrize('split', ['train', 'val'])
def test_annotations_describe_the_maps(made, split):
    from pycocotools import mask as coco_mask

    coco = json.loads((made / f'annotations/instances_{split}.json').read_text())
    stems = (made / f'ImageSets/Segmentation/{split}.txt').read_text().split()
    assert coco['images'] == [
        dict(id=int(stem), file_name=f'{stem}.jpg', height=SIZE[0], width=SIZE[1]) for stem in stems
    ]
    assert coco['categories'] == [dict(id=k + 1, name=str(k)) for k in range(10)]
    assert [annotation['id'] for annotation in coco['annotations']] == list(range(1, len(coco['annotations']) + 1))
    for stem in stems:
        classes, objects = (pixels(made / f'Segmentation{kind}/{stem}.png') for kind in ('Class', 'Object'))
        annotations = [annotation for annotation in coco['annotations'] if annotation['image_id'] == int(stem)]
        assert set(np.unique(objects)) - {0} == set(range(1, len(annotations) + 1))
        assert 1 <= len(annotations) <= 7
        expected = np.zeros_like(classes)
        for i, annotation in enumerate(annotations):
            assert annotation['iscrowd'] == 0
            mask = objects == i + 1
            np.testing.assert_array_equal(coco_mask.decode(annotation['segmentation']), mask)
            assert annotation['area'] == mask.sum() > 0
            y, x = np.nonzero(mask)
            assert annotation['bbox'] == [x.min(), y.min(), x.max() - x.min() + 1, y.max() - y.min() + 1]
            expected[mask] = annotation['category_id']
        np.testing.assert_array_equal(classes, expected)


# --------------------------------------------------------------------------------------------------------------- scenes


@pytest.mark.parametrize(('size', 'solid'), [((32, 32), True), ((61, 200), False), ((600, 1000), True)])
def test_scenes_of_any_size(tool, size, solid):
    sprites = disks(tool)._replace(solid=solid)
    for seed in range(1 if max(size) > 500 else 6):
        scene = tool.compose_scene(sprites, np.random.default_rng(seed), size, objects=(1, 5), scale=(0.25, 8.0))
        assert scene.image.shape == (*size, 3)
        assert scene.class_map.shape == scene.object_map.shape == size
        assert {part.dtype for part in scene[:3]} == {np.dtype(np.uint8)}
        assert 1 <= len(scene.labels) <= 5
        assert scene.object_map.max() == len(scene.labels) == len(scene.areas)


def test_every_object_is_at_least_half_visible(tool):
    omitted, hidden, cut = 0, 0, 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        scene = tool.compose_scene(disks(tool), rng, (80, 72), objects=(15, 15), clutter=0, scale=(1.5, 1.5))
        visible = np.bincount(scene.object_map.ravel(), minlength=len(scene.labels) + 1)[1:]
        # Rotated disks have equal areas, with which the tool's own areas must agree.
        np.testing.assert_allclose(scene.areas, np.pi * (1.5 * 10) ** 2, rtol=0.05)
        assert (2 * visible >= scene.areas).all()
        assert visible[-1] >= 0.7 * scene.areas[-1]  # nothing covers the last one, so only the border cuts it
        omitted += 15 - len(scene.labels)
        hidden += (visible < scene.areas).sum()
        cut += (visible[-1] < scene.areas[-1]).sum()
        assert scene.labels == [3] * len(scene.labels)
        np.testing.assert_array_equal(scene.class_map, np.where(scene.object_map > 0, 4, 0))
    assert omitted > 10
    assert hidden > 10
    assert 0 < cut < 10


def test_number_of_objects(tool, monkeypatch):
    counts = set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        counts.add(len(tool.compose_scene(disks(tool), rng, (300, 300), objects=(2, 4), scale=(0.5, 0.5)).labels))
    assert counts == {2, 3, 4}
    # The first object is placed even where the tool rejects every position that it tries.
    monkeypatch.setattr(tool, 'OVERHANG', 0.9)
    monkeypatch.setattr(tool, 'TRIES', 2)
    for seed in range(30):
        assert tool.compose_scene(disks(tool), np.random.default_rng(seed), (40, 40), objects=(1, 1)).labels == [3]


def test_image_is_background_and_objects_that_stand_out(tool):
    from scipy.ndimage import binary_dilation, binary_erosion

    hues = set()
    for seed in range(10):
        args = np.random.default_rng(seed), (96, 128)
        background = tool.make_background(np.random.default_rng(seed), (96, 128), 5).astype(int)
        scene = tool.compose_scene(disks(tool), *args, objects=(1, 1), clutter=5, scale=(1.5, 1.5))
        inside = scene.object_map == 1
        beyond = ~binary_dilation(inside, iterations=3)
        np.testing.assert_array_equal(scene.image[beyond], background[beyond])
        core = binary_erosion(inside, iterations=3)
        assert np.ptp(scene.image[core], axis=0).max() <= 1  # one tint on a plain sprite
        assert np.abs(scene.image[core].mean(0) - background[inside].mean(0)).sum() > 60
        hues.add(tuple(scene.image[core][0].tolist()))
    assert len(hues) == 10


def test_masks_of_sprites(tool):
    """Only garments have filled holes; the faint noise around a garment is removed."""
    for solid in (True, False):
        _, alpha = tool.transform(disk(12) - disk(6), solid=solid, scale=1.0, angle=0.0, flip=False)
        assert (alpha[12, 12] == 1) == solid
        assert alpha[12, 2] == 1
    _, alpha = tool.transform(np.maximum(disk(), tool.INK), solid=True, scale=1.0, angle=0.0, flip=False)
    np.testing.assert_array_equal(alpha > 0.5, disk()[4:24, 4:24] > 0)


# ------------------------------------------------------------------------------------------------------ reproducibility


def test_a_scene_depends_on_the_seed_alone(tool, made, tmp_path):
    """Equal arguments give equal bytes; another number of scenes leaves a scene as it is, another seed does not."""
    tool.main([str(tmp_path / 'same'), *OPTIONS, '--train', '5', '--val', '4'])
    assert content(tmp_path / 'same') == content(made)
    tool.main([str(tmp_path / 'fewer'), *OPTIONS, '--val', '1', '--train', '2'])
    tool.main([str(tmp_path / 'other'), *OPTIONS, '--val', '1', '--train', '2', '--seed', '1'])
    for pattern in ('JPEGImages/{}.jpg', 'SegmentationClass/{}.png', 'SegmentationObject/{}.png'):
        # Validation begins after the training scenes: as number 3 here, as number 6 there.
        for here, there in (('000001', '000001'), ('000002', '000002'), ('000003', '000006')):
            wanted = (made / pattern.format(there)).read_bytes()
            assert (tmp_path / 'fewer' / pattern.format(here)).read_bytes() == wanted
            assert (tmp_path / 'other' / pattern.format(here)).read_bytes() != wanted
