"""Label maps of segmentation data: their values, sizes and channels."""

import re

import numpy as np
import pytest
from mmengine.config import ConfigDict
from PIL import Image

from mmkron.data_checks import masks
from mmkron.data_checks.masks import check_masks
from mmkron.engine import runner as launch
from mmkron.utils.errors import LaunchError
from support.errors import raises

pytest.importorskip('mmseg', reason="reads MMSegmentation's datasets")
CLASSES = ('soil', 'crop', 'weed')


def make_data(root, maps, image_suffix='.jpg', size=(6, 4)):
    """Images and label maps, which are lists of values or arrays."""
    for folder in ('images', 'labels'):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for i, values in enumerate(maps):
        Image.new('RGB', size).save(root / 'images' / f'{i:03}{image_suffix}')
        pixels = np.resize(np.array(values), size[::-1]) if isinstance(values, list) else values
        Image.fromarray(pixels.astype(np.uint8) if pixels.dtype == np.int64 else pixels).save(
            root / 'labels' / f'{i:03}.png'
        )
    return root


def config(root, head=None, split='train', **dataset):
    prefix = dict(img_path='images', seg_map_path='labels')
    pipeline = [dict(type='LoadImageFromFile'), dict(type='mmseg.LoadAnnotations')]
    default = dict(type='BaseSegDataset', data_root=str(root), data_prefix=prefix, pipeline=pipeline)
    dataset = {**default, 'metainfo': dict(classes=CLASSES), **dataset}
    model = dict(type='EncoderDecoder', decode_head=head or dict(num_classes=3))
    return ConfigDict({'default_scope': 'mmseg', 'model': model, f'{split}_dataloader': dict(dataset=dataset)})


def found(cfg, split='train'):
    problems = list(check_masks(cfg, (split,)))
    return [item.text for item in problems if not item.warning], [item.text for item in problems if item.warning]


def loaded(cfg, index=0):
    """Return the labels that the host loads."""
    from mmseg.datasets import BaseSegDataset

    dataset = {key: value for key, value in cfg.train_dataloader.dataset.items() if key != 'type'}
    return set(np.unique(BaseSegDataset(**dataset)[index]['gt_seg_map']).tolist())


def test_maps_that_fit(tmp_path, monkeypatch):
    cfg = config(make_data(tmp_path, [[0, 1], [2, 255]]))
    assert found(cfg) == ([], [])
    monkeypatch.chdir(tmp_path.parent)
    assert found(config(tmp_path.name)) == ([], [])
    cfg.model.auxiliary_head = [dict(num_classes=3)]
    cfg.train_dataloader.dataset.pipeline = [dict(type='Wrapped', transforms=[[dict(type='LoadAnnotations')]])]
    assert found(cfg) == ([], [])
    (tmp_path / 'labels/001.png').write_text('not read')
    for other in (dict(type='mmseg.LoadOther'), dict(type='LoadImageFromFile')):
        cfg.train_dataloader.dataset.pipeline = [other]
        assert found(cfg) == ([], [])
    assert found(config('s3://bucket')) == ([], [])
    assert found(config(tmp_path, type='Unknown')) == ([], [])


def test_masks_of_0_and_255(tmp_path):
    """The host ignores 255, so one class is left and each pixel is right."""
    cfg = config(make_data(tmp_path, [[0, 255], [255], [0]]))
    assert loaded(cfg) == {0, 255}
    (error,), warnings = found(cfg)
    assert '0 and 255' in error
    assert warnings == []
    make_data(tmp_path, [[0, 255], [255], [0, 1]])
    (errors, (warning,)) = found(cfg)
    assert errors == []
    assert re.match(r'1 of the 3 classes .*: 2 \(weed\);\n3 of the 3 ', warning)


def test_a_mask_beyond_the_sample_settles_it(tmp_path, monkeypatch):
    """Only 0 and 255 in the sample is an error if it holds for all label maps."""
    monkeypatch.setattr(masks, '_SAMPLE', 3)
    cfg = config(make_data(tmp_path, [[0, 255]] * 3 + [[0, 1, 255]] + [[0, 255]] * 5))
    errors, (warning,) = found(cfg)
    assert errors == []
    assert re.match(r'2 of the 3 classes .*: 1 \(crop\), 2 \(weed\);\n3 of the 9', warning)
    make_data(tmp_path, [[0, 255]] * 4)
    assert '0 and 255' in found(cfg)[0][0]


def test_sample_is_spread_and_bounded(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(masks, '_SAMPLE', 4)
    monkeypatch.setattr(masks, '_read', lambda path, _: read.append(path[-7:-4]) or ('', [0, 1, 2], (6, 4)))
    cfg = config(make_data(tmp_path, [[0]] * 10))
    assert found(cfg) == ([], [])
    assert read == ['000', '003', '006', '009']
    read.clear()
    monkeypatch.setattr(masks, '_PIXELS', 30)
    assert found(cfg) == ([], [])
    assert read == ['000', '003']


@pytest.mark.parametrize(
    ('values', 'head', 'wrong'),
    [
        ([0, 1, 2, 255], {}, ''),
        ([0, 1, 3], {}, '3 in 1 ('),
        ([0, 1, 2, 254], {}, '254 in 1 ('),
        ([0, 1, 2, 3], dict(ignore_index=3), ''),
        ([0, 1, 2, 255], dict(ignore_index=0), '255 in 1 ('),
        ([0, 1, 2, 255], dict(ignore_index=None), '255 in 1 ('),
    ],
)
def test_values_that_are_not_classes(tmp_path, values, head, wrong):
    errors, _ = found(config(make_data(tmp_path, [values]), dict(head, num_classes=3)))
    assert len(errors) == bool(wrong)
    assert all(f': {wrong}{tmp_path}/labels/000.png);' in error for error in errors)


def test_values_of_16_bits(tmp_path):
    """The host keeps the last 8 bits: 257 becomes 1."""
    cfg = config(make_data(tmp_path, [np.full((4, 6), 257, np.uint16)]))
    assert loaded(cfg) == {1}
    assert ': 257 in 1 (' in found(cfg)[0][0]


def test_reduce_zero_label_and_label_map(tmp_path):
    cfg = config(make_data(tmp_path, [[0, 1, 2, 3, 255]]), reduce_zero_label=True)
    assert loaded(cfg) == {0, 1, 2, 255}
    assert found(cfg) == ([], [])
    make_data(tmp_path, [[0, 1, 2, 4]])
    assert ': 4 in 1 (' in found(cfg)[0][0]
    cfg.train_dataloader.dataset.pipeline[1].reduce_zero_label = False
    (error,), _ = found(cfg)
    assert re.match('reduce_zero_label is True .* False in its LoadAnnotations', error)
    with pytest.raises(AssertionError):
        loaded(cfg)
    # Classes of METAINFO that the config leaves out become 255; ADE20K ignores 0 unless it is told otherwise.
    chosen = config(tmp_path, type='ADE20KDataset', metainfo=dict(classes=('sky', 'wall')))
    make_data(tmp_path, [[0, 1, 3, 7]])
    assert found(chosen) == ([], [])
    make_data(tmp_path, [[0, 1, 7, 150]])
    assert re.match(r'1 of the 2 classes .*: 0 \(sky\);', found(chosen)[1][0])


def test_suffixes_of_a_dataset_type(tmp_path):
    cfg = config(tmp_path, type='CityscapesDataset', metainfo={}, data_prefix=dict(img_path='a', seg_map_path='b'))
    for folder in 'ab':
        (tmp_path / folder / 'city').mkdir(parents=True)
    Image.new('RGB', (6, 4)).save(tmp_path / 'a/city/x_leftImg8bit.png')
    Image.new('L', (6, 4), 19).save(tmp_path / 'b/city/x_gtFine_labelTrainIds.png')
    assert ': 19 in 1 (' in found(cfg)[0][0]


def test_one_output_has_two_classes(tmp_path):
    head = dict(num_classes=1, loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=True))
    cfg = config(make_data(tmp_path, [[0, 1]]), head, metainfo=dict(classes=('crop',)))
    assert found(cfg) == ([], [])
    cfg.model.decode_head = dict(num_classes=2, out_channels=1)
    assert found(cfg) == ([], [])
    make_data(tmp_path, [[0, 2]])
    assert ': 2 in 1 (' in found(cfg)[0][0]


def test_classes_of_the_head_where_the_data_names_none(tmp_path):
    cfg = config(make_data(tmp_path, [[0, 1, 2, 3]]), metainfo={})
    assert ': 3 in 1 (' in found(cfg)[0][0]
    del cfg['model']
    assert found(cfg) == ([], [])


def test_colors_for_labels(tmp_path):
    colors = np.zeros((4, 6, 3), np.uint8)
    (error,), _ = found(config(make_data(tmp_path, [[0, 1, 2], colors])))
    assert re.match(f'1 label maps with 3 channels .*: {tmp_path}/labels/001.png;\n2 of the 2 ', error)
    palette = Image.fromarray(np.array([[0, 1, 2, 2, 1, 0]] * 4, np.uint8)).convert('P')
    palette.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0])
    palette.save(tmp_path / 'labels/001.png')
    assert found(config(tmp_path)) == ([], [])  # its values are classes, only shown in color
    Image.new('1', (6, 4), 1).save(tmp_path / 'labels/001.png')
    assert loaded(config(tmp_path), 1) == {1}
    assert found(config(tmp_path)) == ([], [])


def test_a_class_is_missed_only_where_it_is_trained(tmp_path):
    make_data(tmp_path, [[0, 1]])
    assert found(config(tmp_path))[1]
    assert found(config(tmp_path, split='val'), 'val') == ([], [])


def test_sizes_and_damaged_files(tmp_path):
    cfg = config(make_data(tmp_path, [[0, 1, 2], np.zeros((5, 6), np.uint8)]))
    (error,), _ = found(cfg)
    assert error.startswith(f'1 label maps of another size than their image: {tmp_path}/labels/001.png;')
    exif = Image.Exif()
    exif[0x0112] = 6  # a turned camera: MMCV loads the image as 4 x 6
    Image.new('RGB', (6, 4)).save(tmp_path / 'images/001.jpg', exif=exif)
    Image.new('L', (4, 6)).save(tmp_path / 'labels/001.png')
    import mmcv

    assert mmcv.imread(str(tmp_path / 'images/001.jpg')).shape[:2] == (6, 4)
    assert found(cfg) == ([], [])
    (tmp_path / 'labels/001.png').write_bytes(b'no image')
    (error,), _ = found(cfg)
    assert error.startswith('1 label maps that cannot be read (')


def test_files_without_their_partner(tmp_path):
    cfg = config(make_data(tmp_path, [[0, 1, 2]] * 3))
    (tmp_path / 'labels/001.png').unlink()
    (tmp_path / 'images/002.jpg').rename(tmp_path / 'images/002.jpeg')
    errors, warnings = found(cfg)
    assert [re.sub(' .*: ', ' ', error) for error in errors] == [f'1 {tmp_path}/labels/001.png']
    assert [re.sub(' .*(img_suffix)', r' \1', warning) for warning in warnings] == ["1 img_suffix='.jpg': 002.png"]
    for name in ('000_color.tif', '001_instances.json'):  # as Cityscapes has next to its label maps
        (tmp_path / 'labels' / name).touch()
    assert found(cfg)[1] == warnings
    cfg.train_dataloader.dataset.img_suffix = '.png'
    (error,), _ = found(cfg)
    assert re.match(f"no image in {tmp_path}/images .*img_suffix='.png'; .*: .jpeg, .jpg$", error)
    (tmp_path / 'list.txt').write_text('000\n')
    assert found(config(tmp_path, ann_file='list.txt')) == ([], [])


def test_the_launcher_names_the_folder(tmp_path):
    with raises(LaunchError, f'{tmp_path}/labels', 255):
        launch.check_data(config(make_data(tmp_path, [[0, 255]])), 'c.py', ['train'])
