"""The composed scenes: what the files hold, how the hosts read them, and what is refused."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .conftest import load_tool

pytest.importorskip('pycocotools', reason='the masks of the COCO set are encoded by pycocotools')

SIZE = (65, 90)
COUNTS = {'train': 5, 'val': 4}
SMALL = ['--train', '2', '--val', '1', '--size', '40', '48']


@pytest.fixture(scope='module')
def tool():
    return load_tool('dataset_converters/fashion_scenes')


@pytest.fixture(scope='module')
def made(tool, tmp_path_factory):
    """A small set of digits, which scikit-learn has everywhere."""
    out = tmp_path_factory.mktemp('scenes') / 'set'
    size = [str(n) for n in SIZE]
    tool.main([str(out), '--source', 'digits', '--size', *size, '--train', '5', '--val', '4', '--objects', '4', '7'])
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def disk(radius: float = 10.0, value: int = 255) -> np.ndarray:
    """(28, 28) uint8: looks the same mirrored and turned."""
    y, x = np.mgrid[:28, :28] - 13.5
    return np.where(y**2 + x**2 <= radius**2, value, 0).astype(np.uint8)


def disks(tool, **kwargs):
    return tool.Sprites(np.stack([disk(**kwargs)]), np.array([3], np.uint8), solid=True)


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, '>u4').tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_fashion(folder: Path, zipped: bool = False, **changes: np.ndarray) -> Path:
    """Fashion-MNIST's four files with disks: training images are of class 3, test images of class 7."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        'train_images': np.stack([disk(10)] * 6),
        'train_labels': np.full(6, 3),
        't10k_images': np.stack([disk(8)] * 4),
        't10k_labels': np.full(4, 7),
        **changes,
    }
    for name, array in arrays.items():
        part, kind = name.split('_')
        path = folder / f'{part}-{kind}-idx{array.ndim}-ubyte'
        if zipped:
            path.with_name(f'{path.name}.gz').write_bytes(gzip.compress(idx_bytes(array)))
        else:
            path.write_bytes(idx_bytes(array))
    return folder


# -------------------------------------------------------------------------------------------------- what the files hold


def test_layout(made):
    stems = [f'{n:06d}' for n in range(1, 10)]
    wanted = {f'JPEGImages/{stem}.jpg' for stem in stems}
    wanted |= {f'Segmentation{kind}/{stem}.png' for kind in ('Class', 'Object') for stem in stems}
    wanted |= {f'ImageSets/Segmentation/{split}.txt' for split in ('train', 'val', 'trainval')}
    wanted |= {'annotations/instances_train.json', 'annotations/instances_val.json', 'samples.png'}
    assert set(content(made)) == wanted
    lists = {
        split: (made / f'ImageSets/Segmentation/{split}.txt').read_text() for split in ('train', 'val', 'trainval')
    }
    assert lists['train'].split() == stems[:5]
    assert lists['val'].split() == stems[5:]
    assert lists['trainval'] == lists['train'] + lists['val']
    assert [path.name for path in made.parent.iterdir()] == ['set']  # no temporary folder is left

    image = Image.open(made / 'JPEGImages/000001.jpg')
    assert (image.format, image.mode, image.size) == ('JPEG', 'RGB', SIZE[::-1])
    assert image.quantization[0][0] == 2  # quality 95
    for kind in ('Class', 'Object'):
        image = Image.open(made / f'Segmentation{kind}/000001.png')
        assert (image.mode, image.size) == ('P', SIZE[::-1])
        palette = np.reshape(image.getpalette()[: 3 * 6], (-1, 3)).tolist()
        assert palette == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128], [128, 0, 128]]


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
            assert set(annotation) == {'id', 'image_id', 'category_id', 'bbox', 'area', 'segmentation', 'iscrowd'}
            assert annotation['iscrowd'] == 0
            mask = objects == i + 1
            np.testing.assert_array_equal(coco_mask.decode(annotation['segmentation']), mask)
            assert annotation['area'] == mask.sum() > 0
            y, x = np.nonzero(mask)
            tight = [x.min(), y.min(), x.max() - x.min() + 1, y.max() - y.min() + 1]
            assert annotation['bbox'] == tight
            expected[mask] = annotation['category_id']
        np.testing.assert_array_equal(classes, expected)


def test_samples_show_the_classes(made):
    picture = pixels(made / 'samples.png')
    assert picture.shape[0] > 300
    assert picture.shape[1] > 600
    coco = json.loads((made / 'annotations/instances_val.json').read_text())
    import matplotlib

    for k in {annotation['category_id'] for annotation in coco['annotations']}:
        color = np.rint(255 * np.array(matplotlib.colormaps['tab10'].colors[k - 1]))
        assert (np.abs(picture[..., :3] - color).max(-1) <= 1).sum() > 50


# --------------------------------------------------------------------------------------------------------------- scenes


@pytest.mark.parametrize('size', [(33, 47), (32, 32), (61, 200), (200, 61), (600, 1000)])
@pytest.mark.parametrize('solid', [True, False])
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
    given_up, hidden, cut = 0, 0, 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        scene = tool.compose_scene(disks(tool), rng, (80, 72), objects=(15, 15), clutter=0, scale=(1.5, 1.5))
        visible = np.bincount(scene.object_map.ravel(), minlength=len(scene.labels) + 1)[1:]
        # Turned disks are all of the same area, which the tool's own areas must agree with.
        np.testing.assert_allclose(scene.areas, np.pi * (1.5 * 10) ** 2, rtol=0.05)
        assert (2 * visible >= scene.areas).all()
        assert visible[-1] >= 0.7 * scene.areas[-1]  # nothing covers the last one, so only the border cuts it
        given_up += 15 - len(scene.labels)
        hidden += (visible < scene.areas).sum()
        cut += (visible[-1] < scene.areas[-1]).sum()
        assert scene.labels == [3] * len(scene.labels)
        np.testing.assert_array_equal(scene.class_map, np.where(scene.object_map > 0, 4, 0))
    assert given_up > 20
    assert hidden > 20
    assert 0 < cut < 20


def test_the_first_object_always_finds_a_place(tool, monkeypatch):
    monkeypatch.setattr(tool, 'OVERHANG', 0.9)
    monkeypatch.setattr(tool, 'TRIES', 2)
    for seed in range(30):
        scene = tool.compose_scene(disks(tool), np.random.default_rng(seed), (40, 40), objects=(1, 1))
        assert scene.labels == [3]


def test_number_of_objects(tool):
    counts = set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        counts.add(len(tool.compose_scene(disks(tool), rng, (300, 300), objects=(2, 4), scale=(0.5, 0.5)).labels))
    assert counts == {2, 3, 4}


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


@pytest.mark.parametrize('under', [(0, 0, 0), (128, 128, 128), (255, 255, 255), (200, 40, 40), (60, 180, 120)])
def test_tints_differ_from_what_they_cover(tool, under):
    rng = np.random.default_rng(0)
    tints = np.array([tool.pick_tint(rng, np.array(under)) for _ in range(200)])
    np.testing.assert_allclose(tints.max(1), 255)
    assert np.abs(0.75 * tints - under).sum(1).min() > 100
    assert len(np.unique(tints.argmax(1))) == 3  # reddish, greenish and bluish ones


def test_texture_stays(tool):
    """A sprite with a dark half: both halves are of the object, and the dark one is the darker."""
    image = disk()
    image[:14] //= 4
    texture, alpha = tool.transform(image, solid=True, scale=2.0, angle=0.0, flip=False)
    assert alpha.shape == texture.shape == (42, 42)
    np.testing.assert_allclose(texture[21, 5:37], texture[21, 21], atol=1e-6)
    assert texture[8, 21] == pytest.approx(63 / 255)
    assert texture[34, 21] == pytest.approx(1)
    mirrored, _ = tool.transform(image.T, solid=True, scale=2.0, angle=0.0, flip=True)
    assert mirrored[21, 34] == pytest.approx(63 / 255)


@pytest.mark.parametrize(('solid', 'filled'), [(True, True), (False, False)])
def test_holes_belong_to_garments_only(tool, solid, filled):
    ring = disk(12) - disk(6)
    _, alpha = tool.transform(ring, solid=solid, scale=1.0, angle=0.0, flip=False)
    assert (alpha[12, 12] == 1) == filled
    assert alpha[12, 2] == 1


def test_faint_noise_around_a_garment_is_cut_off(tool):
    noisy = np.maximum(disk(), tool.INK)
    _, alpha = tool.transform(noisy, solid=True, scale=1.0, angle=0.0, flip=False)
    np.testing.assert_array_equal(alpha > 0.5, disk()[4:24, 4:24] > 0)


def test_no_clutter_is_a_smooth_background(tool):
    def roughness(clutter):
        image = tool.make_background(np.random.default_rng(3), (128, 128), clutter).astype(float)
        return np.abs(np.diff(image, axis=1)).max()

    assert roughness(0) < 60 < roughness(8)


# ------------------------------------------------------------------------------------------------------ reproducibility


def test_same_arguments_make_the_same_bytes(tool, made, tmp_path):
    common = [str(tmp_path / 'a'), '--source', 'digits', '--size', '65', '90', '--objects', '4', '7']
    tool.main([*common, '--train', '5', '--val', '4'])
    assert content(tmp_path / 'a') == content(made)


def test_a_scene_does_not_depend_on_their_number_but_on_the_seed(tool, made, tmp_path):
    common = ['--source', 'digits', '--size', '65', '90', '--objects', '4', '7', '--val', '1']
    tool.main([str(tmp_path / 'fewer'), *common, '--train', '2'])
    tool.main([str(tmp_path / 'other'), *common, '--train', '2', '--seed', '1'])
    for pattern in ('JPEGImages/{}.jpg', 'SegmentationClass/{}.png', 'SegmentationObject/{}.png'):
        # Validation begins after the training scenes: as number 3 here, as number 6 there.
        for here, there in (('000001', '000001'), ('000002', '000002'), ('000003', '000006')):
            wanted = (made / pattern.format(there)).read_bytes()
            assert (tmp_path / 'fewer' / pattern.format(here)).read_bytes() == wanted
            assert (tmp_path / 'other' / pattern.format(here)).read_bytes() != wanted


# -------------------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize('zipped', [False, True])
def test_idx_files_and_their_split(tool, tmp_path, capsys, zipped):
    folder = write_fashion(tmp_path / 'files', zipped)
    source = tool.read_source(str(folder))
    np.testing.assert_array_equal(source.splits['train'].images, np.stack([disk(10)] * 6))
    np.testing.assert_array_equal(source.splits['val'].images, np.stack([disk(8)] * 4))
    names = 't-shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle-boot'
    assert ', '.join(source.classes) == names

    tool.main([str(tmp_path / 'out'), '--source', str(folder), *SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5] == f'Fashion-MNIST in {folder}: 10 classes, {names}'
    for split, category, scenes, line in (('train', 4, 2, lines[-4]), ('val', 8, 1, lines[-3])):
        coco = json.loads((tmp_path / f'out/annotations/instances_{split}.json').read_text())
        assert {annotation['category_id'] for annotation in coco['annotations']} == {category}
        assert line.split(maxsplit=1) == [split, f'{scenes} scenes with {len(coco["annotations"])} objects']
    assert lines[-1] == f'picture  {tmp_path / "out" / "samples.png"}'


def test_plain_files_go_before_zipped_ones(tool, tmp_path):
    write_fashion(tmp_path, zipped=True, train_labels=np.full(6, 5))
    assert set(tool.read_fashion(tmp_path).splits['train'].labels) == {5}
    write_fashion(tmp_path)
    assert set(tool.read_fashion(tmp_path).splits['train'].labels) == {3}


def test_auto_takes_the_first_whole_source(tool, tmp_path, monkeypatch, capsys):
    first, second = tmp_path / 'first', tmp_path / 'second'
    monkeypatch.setattr(tool, 'FASHION_DIRS', (first, second))
    assert tool.read_source('auto').classes == tuple('0123456789')
    (said,) = capsys.readouterr().out.splitlines()
    assert 'dataset-fashion-mnist' in said
    assert 'digits' in said

    write_fashion(second, zipped=True)
    write_fashion(first)
    (first / 't10k-labels-idx1-ubyte').unlink()
    assert tool.read_source('auto').name == f'Fashion-MNIST in {second}'
    write_fashion(first)
    assert tool.read_source('auto').name == f'Fashion-MNIST in {first}'
    assert capsys.readouterr().out == ''


def test_digits_are_split_as_in_the_dataset(tool):
    from mmkron.datasets import Digits

    source = tool.read_digits()
    for split, sprites in source.splits.items():
        samples = Digits(split, lazy_init=True).load_data_list()
        assert sprites.labels.tolist() == [sample['gt_label'] for sample in samples]
        assert sprites.images.shape == (len(samples), 28, 28)
        ink = np.array([sample['img'].mean() for sample in samples])
        assert np.corrcoef(ink, sprites.images.mean((1, 2)))[0, 1] > 0.9
        assert not sprites.solid


def test_blank_images_are_left_out(tool, tmp_path):
    images = np.stack([np.zeros((28, 28)), disk(), np.full((28, 28), 16)])
    write_fashion(tmp_path, train_images=images, train_labels=np.array([1, 2, 3]))
    assert tool.read_fashion(tmp_path).splits['train'].labels.tolist() == [2]


BROKEN = {
    'no idx': (b'\x89PNG' + bytes(100), 'train-images-idx3-ubyte is no IDX file of unsigned bytes in 3 dimensions'),
    'labels for images': (idx_bytes(np.zeros(6)), 'is no IDX file of unsigned bytes in 3 dimensions'),
    'empty': (b'', 'is no IDX file of unsigned bytes in 3 dimensions'),
    'truncated': (
        idx_bytes(np.zeros((6, 28, 28)))[:-1],
        'train-images-idx3-ubyte must hold (6, 28, 28) bytes after its header, got 4703',
    ),
    'other size': (idx_bytes(np.zeros((6, 8, 8))), 'must hold images of 28 x 28 pixels, got (8, 8)'),
    'other count': (
        idx_bytes(np.zeros((5, 28, 28))),
        'train-labels-idx1-ubyte must hold 5 labels, one per image, got 6',
    ),
    'blank': (idx_bytes(np.zeros((6, 28, 28))), 'must hold at least one image that is not blank'),
}


@pytest.mark.parametrize('what', BROKEN)
def test_broken_idx_files(tool, tmp_path, what):
    data, message = BROKEN[what]
    write_fashion(tmp_path)
    (tmp_path / 'train-images-idx3-ubyte').write_bytes(data)
    with pytest.raises(ValueError) as e:  # noqa: PT011
        tool.read_fashion(tmp_path)
    assert message in str(e.value)
    assert str(tmp_path) in str(e.value)


def test_broken_zipped_files_and_labels(tool, tmp_path):
    write_fashion(tmp_path, zipped=True)
    path = tmp_path / 't10k-images-idx3-ubyte.gz'
    whole = path.read_bytes()
    for data in (whole[:-12], b'no gzip', whole[:20] + b'\xff' * 8 + whole[28:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf'{path.name} is no whole \.gz file: '):
            tool.read_fashion(tmp_path)
    path.write_bytes(whole)
    write_fashion(tmp_path, zipped=True, train_labels=np.full(6, 10))
    with pytest.raises(ValueError, match=r'train-labels-idx1-ubyte\.gz must hold labels from 0 to 9, got 10'):
        tool.read_fashion(tmp_path)


# ------------------------------------------------------------------------------------------------------------- refusals


def refusal(tool, capsys, *argv) -> str:
    """The one message with which the tool ends, as argparse does."""
    with pytest.raises(SystemExit) as e:
        tool.main([str(arg) for arg in argv])
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert err.count('error: ') == 1
    return err.split('error: ')[1].strip()


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        ('--size 31 64', '--size must be two sizes of at least 32, got (31, 64)'),
        ('--size 64 -1', '--size must be two sizes of at least 32, got (64, -1)'),
        ('--train 0', '--train must be at least 1, got 0'),
        ('--val -1', '--val must be at least 1, got -1'),
        ('--objects 5 4', '--objects must be 1 <= MIN <= MAX <= 254, got (5, 4)'),
        ('--objects 0 4', '--objects must be 1 <= MIN <= MAX <= 254, got (0, 4)'),
        ('--objects 1 255', '--objects must be 1 <= MIN <= MAX <= 254, got (1, 255)'),
        ('--clutter -1', '--clutter must be at least 0, got -1'),
        ('--scale 2 1', '--scale must be 0.25 <= MIN <= MAX, got (2.0, 1.0)'),
        ('--scale 0 1', '--scale must be 0.25 <= MIN <= MAX, got (0.0, 1.0)'),
        ('--scale 1 nan', '--scale must be 0.25 <= MIN <= MAX, got (1.0, nan)'),
        ('--scale 1 inf', '--scale must be 0.25 <= MIN <= MAX, got (1.0, inf)'),
        ('--seed -1', '--seed must be at least 0, got -1'),
        ('--train many', "argument --train: invalid int value: 'many'"),
        ('--source absent', "--source must be 'auto', 'digits' or a folder of Fashion-MNIST's files, got 'absent'"),
    ],
)
def test_bad_arguments(tool, tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert refusal(tool, capsys, 'out', *argv.split()) == message
    assert list(tmp_path.iterdir()) == []


def test_source_without_its_files(tool, tmp_path, capsys):
    folder = write_fashion(tmp_path / 'files')
    for name in ('train-labels-idx1-ubyte', 't10k-images-idx3-ubyte'):
        (folder / name).unlink()
    message = refusal(tool, capsys, tmp_path / 'out', '--source', folder)
    assert message == f'--source {folder} lacks train-labels-idx1-ubyte, t10k-images-idx3-ubyte (plain or .gz)'
    assert [path.name for path in tmp_path.iterdir()] == ['files']


def test_an_existing_folder_is_refused_unless_empty(tool, tmp_path, capsys):
    out, source = tmp_path / 'out', write_fashion(tmp_path / 'files')
    out.mkdir()
    tool.main([str(out), '--source', str(source), *SMALL])
    before = content(out)
    assert len(before) == 3 * 3 + 6
    capsys.readouterr()
    message = refusal(tool, capsys, out, '--source', source, *SMALL, '--seed', '1')
    assert message == f'OUT must be a new or empty folder, got {out}: nothing is overwritten'
    assert content(out) == before

    (tmp_path / 'file').write_text('kept')
    assert refusal(tool, capsys, tmp_path / 'file').startswith('OUT must be a new or empty folder, got ')
    assert 'file' in refusal(tool, capsys, tmp_path / 'file' / 'out', '--source', source)
    assert (tmp_path / 'file').read_text() == 'kept'


@pytest.mark.parametrize('error', [KeyboardInterrupt, OSError('disk full')])
def test_an_interrupted_run_leaves_nothing(tool, tmp_path, monkeypatch, capsys, error):
    source = write_fashion(tmp_path / 'files')

    def stop(folder):
        assert (folder / 'annotations/instances_val.json').is_file()
        raise error

    monkeypatch.setattr(tool, 'draw_samples', stop)
    argv = [str(tmp_path / 'out'), '--source', str(source), *SMALL]
    if isinstance(error, OSError):
        assert refusal(tool, capsys, *argv) == 'disk full'
    else:
        with pytest.raises(KeyboardInterrupt):
            tool.main(argv)
    assert [path.name for path in tmp_path.iterdir()] == ['files']


# --------------------------------------------------------------------------------------------------- the hosts' readers


def test_coco_and_its_evaluation(made, capsys):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    path = made / 'annotations/instances_val.json'
    coco = COCO(str(path))
    for annotation in coco.loadAnns(coco.getAnnIds()):
        objects = pixels(made / f'SegmentationObject/{annotation["image_id"]:06d}.png')
        index = annotation['id'] - min(coco.getAnnIds(annotation['image_id'])) + 1
        np.testing.assert_array_equal(coco.annToMask(annotation), objects == index)

    keys = ('image_id', 'category_id', 'bbox', 'segmentation')
    annotations = json.loads(path.read_text())['annotations']
    for kind in ('bbox', 'segm'):
        kept = [key for key in keys if kind == 'segm' or key != 'segmentation']
        found = coco.loadRes([{**{key: one[key] for key in kept}, 'score': 0.9} for one in annotations])
        evaluation = COCOeval(coco, found, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert evaluation.stats[0] == pytest.approx(1.0)


@pytest.fixture
def mmseg_datasets():
    pytest.importorskip('mmcv._ext', reason='mmseg needs the compiled operators of mmcv')
    return pytest.importorskip('mmseg.datasets')


@pytest.mark.parametrize('name', ['PascalVOCDataset', 'BaseSegDataset'])
def test_mmseg_reads_the_voc_layout(made, mmseg_datasets, name):
    from mmengine.registry import DefaultScope

    classes = ('background', *'0123456789')
    own = {} if name == 'PascalVOCDataset' else dict(img_suffix='.jpg', seg_map_suffix='.png')
    if name == 'BaseSegDataset':
        own['metainfo'] = dict(classes=classes, palette=[[k, k, k] for k in range(len(classes))])
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = getattr(mmseg_datasets, name)(
            ann_file='ImageSets/Segmentation/val.txt',
            data_root=str(made),
            data_prefix=dict(img_path='JPEGImages', seg_map_path='SegmentationClass'),
            pipeline=[dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')],
            **own,
        )
        assert len(dataset) == COUNTS['val']
        for sample, stem in zip(dataset, ('000006', '000007', '000008', '000009')):
            truth = sample['data_samples'].gt_sem_seg.data.numpy()
            np.testing.assert_array_equal(truth[0], pixels(made / f'SegmentationClass/{stem}.png'))
            assert Path(sample['data_samples'].img_path).stem == stem
            assert tuple(sample['inputs'].shape) == (3, *SIZE)


def test_mmdet_reads_the_coco_file(made):
    pytest.importorskip('mmcv._ext', reason='mmdet needs the compiled operators of mmcv')
    datasets = pytest.importorskip('mmdet.datasets')
    from mmengine.registry import DefaultScope

    coco = json.loads((made / 'annotations/instances_train.json').read_text())
    with DefaultScope.overwrite_default_scope('mmdet'):
        dataset = datasets.CocoDataset(
            ann_file='annotations/instances_train.json',
            data_root=str(made),
            data_prefix=dict(img='JPEGImages/'),
            metainfo=dict(classes=tuple('0123456789')),
            filter_cfg=dict(filter_empty_gt=True, min_size=32),
            pipeline=[
                dict(type='LoadImageFromFile'),
                dict(type='LoadAnnotations', with_bbox=True, with_mask=True, poly2mask=True),
                dict(type='PackDetInputs'),
            ],
        )
        assert len(dataset) == COUNTS['train']
        for sample in dataset:
            truth = sample['data_samples'].gt_instances
            image_id = sample['data_samples'].img_id
            annotations = [annotation for annotation in coco['annotations'] if annotation['image_id'] == image_id]
            assert truth.labels.tolist() == [annotation['category_id'] - 1 for annotation in annotations]
            boxes = np.array([annotation['bbox'] for annotation in annotations])
            boxes[:, 2:] += boxes[:, :2]
            np.testing.assert_array_equal(getattr(truth.bboxes, 'tensor', truth.bboxes).numpy(), boxes)
            objects = pixels(made / f'SegmentationObject/{image_id:06d}.png')
            np.testing.assert_array_equal(truth.masks.masks, [objects == i + 1 for i in range(len(annotations))])
