"""Label maps of segmentation data: their values, sizes and channels."""

import re

import numpy as np
import pytest
from mmengine.config import ConfigDict
from PIL import Image

from mmkron import data_checks
from mmkron.data_checks import DataError, run
from support.data_checks import texts
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


def value_faults(cfg, split='train'):
    errors, warnings = texts(cfg, 'label map values', (split,))
    assert warnings == []
    return errors


def file_faults(cfg):
    return texts(cfg, 'label map files', ('train',))


def loaded(cfg, index=0):
    """Return the labels that the host loads."""
    from mmseg.datasets import BaseSegDataset

    dataset = {key: value for key, value in cfg.train_dataloader.dataset.items() if key != 'type'}
    return set(np.unique(BaseSegDataset(**dataset)[index]['gt_seg_map']).tolist())


def test_maps_that_fit(tmp_path, monkeypatch):
    cfg = config(make_data(tmp_path, [[0, 1], [2, 255]]))
    assert value_faults(cfg) == []
    assert file_faults(cfg) == ([], [])
    monkeypatch.chdir(tmp_path.parent)
    assert value_faults(config(tmp_path.name)) == []
    cfg.model.auxiliary_head = [dict(num_classes=3)]
    cfg.train_dataloader.dataset.pipeline = [dict(type='Wrapped', transforms=[[dict(type='LoadAnnotations')]])]
    assert value_faults(cfg) == []
    (tmp_path / 'labels/001.png').write_text('not read')
    assert len(value_faults(cfg)) == 1
    for other in (dict(type='mmseg.LoadOther'), dict(type='LoadImageFromFile')):
        cfg.train_dataloader.dataset.pipeline = [other]
        assert value_faults(cfg) == []
    assert value_faults(config('s3://bucket')) == []
    assert value_faults(config(tmp_path, type='Unknown')) == []


def test_masks_of_0_and_255(tmp_path):
    """The host ignores 255, so one class is left and each pixel is right."""
    cfg = config(make_data(tmp_path, [[0, 255], [255], [0]]))
    assert loaded(cfg) == {0, 255}
    (error,) = value_faults(cfg)
    assert '0 and 255' in error
    make_data(tmp_path, [[0, 255], [255], [0, 1]])
    assert value_faults(cfg) == []


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
    errors = value_faults(config(make_data(tmp_path, [values]), dict(head, num_classes=3)))
    assert len(errors) == bool(wrong)
    assert all(error.endswith(f': {wrong}{tmp_path}/labels/000.png)') for error in errors)


def test_values_of_16_bits(tmp_path):
    """The host keeps the last 8 bits: 257 becomes 1."""
    cfg = config(make_data(tmp_path, [np.full((4, 6), 257, np.uint16)]))
    assert loaded(cfg) == {1}
    assert ': 257 in 1 (' in value_faults(cfg)[0]


def test_reduce_zero_label_and_label_map(tmp_path):
    cfg = config(make_data(tmp_path, [[0, 1, 2, 3, 255]]), reduce_zero_label=True)
    assert loaded(cfg) == {0, 1, 2, 255}
    assert value_faults(cfg) == []
    make_data(tmp_path, [[0, 1, 2, 4]])
    assert ': 4 in 1 (' in value_faults(cfg)[0]
    # Classes of METAINFO that the config leaves out become 255; ADE20K ignores 0 unless it is told otherwise.
    chosen = config(tmp_path, type='ADE20KDataset', metainfo=dict(classes=('sky', 'wall')))
    make_data(tmp_path, [[0, 1, 3, 7, 150]])
    assert value_faults(chosen) == []
    make_data(tmp_path, [[0, 1, 3, 151]])
    assert ': 151 in 1 (' in value_faults(chosen)[0]


def test_suffixes_of_a_dataset_type(tmp_path):
    cfg = config(tmp_path, type='CityscapesDataset', metainfo={}, data_prefix=dict(img_path='a', seg_map_path='b'))
    for folder in 'ab':
        (tmp_path / folder / 'city').mkdir(parents=True)
    Image.new('RGB', (6, 4)).save(tmp_path / 'a/city/x_leftImg8bit.png')
    Image.new('L', (6, 4), 19).save(tmp_path / 'b/city/x_gtFine_labelTrainIds.png')
    (tmp_path / 'b/city/x_gtFine_color.png').touch()
    assert ': 19 in 1 (' in value_faults(cfg)[0]
    assert file_faults(cfg) == ([], [])


def test_one_output_has_two_classes(tmp_path):
    head = dict(num_classes=1, loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=True))
    cfg = config(make_data(tmp_path, [[0, 1]]), head, metainfo=dict(classes=('crop',)))
    assert value_faults(cfg) == []
    cfg.model.decode_head = dict(num_classes=2, out_channels=1)
    assert value_faults(cfg) == []
    make_data(tmp_path, [[0, 2]])
    assert ': 2 in 1 (' in value_faults(cfg)[0]


def test_classes_of_the_head_where_the_data_names_none(tmp_path):
    cfg = config(make_data(tmp_path, [[0, 1, 2, 3]]), metainfo={})
    assert ': 3 in 1 (' in value_faults(cfg)[0]
    del cfg['model']
    assert value_faults(cfg) == []


def test_colors_for_labels(tmp_path):
    colors = np.zeros((4, 6, 3), np.uint8)
    (error,) = value_faults(config(make_data(tmp_path, [[0, 1, 2], colors])))
    assert re.match(f'1 of the 2 label maps have 3 channels .*: {tmp_path}/labels/001.png$', error)
    palette = Image.fromarray(np.array([[0, 1, 2, 2, 1, 0]] * 4, np.uint8)).convert('P')
    palette.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0])
    palette.save(tmp_path / 'labels/001.png')
    assert value_faults(config(tmp_path)) == []  # its values are classes, only shown in color
    Image.new('1', (6, 4), 1).save(tmp_path / 'labels/001.png')
    assert loaded(config(tmp_path), 1) == {1}
    assert value_faults(config(tmp_path)) == []


def test_sizes_and_damaged_files(tmp_path):
    cfg = config(make_data(tmp_path, [[0, 1, 2], np.zeros((5, 6), np.uint8)]))
    (error,) = value_faults(cfg)
    assert re.match(f'1 of the 2 label maps have another size .*: {tmp_path}/labels/001.png$', error)
    exif = Image.Exif()
    exif[0x0112] = 6  # a turned camera: MMCV loads the image as 4 x 6
    Image.new('RGB', (6, 4)).save(tmp_path / 'images/001.jpg', exif=exif)
    Image.new('L', (4, 6)).save(tmp_path / 'labels/001.png')
    import mmcv

    assert mmcv.imread(str(tmp_path / 'images/001.jpg')).shape[:2] == (6, 4)
    assert value_faults(cfg) == []
    (tmp_path / 'labels/001.png').write_bytes(b'no image')
    (error,) = value_faults(cfg)
    assert error.startswith('1 of the 2 label maps cannot be read (')


def test_files_without_their_partner(tmp_path):
    cfg = config(make_data(tmp_path, [[0, 1, 2]] * 3))
    (tmp_path / 'labels/001.png').unlink()
    (tmp_path / 'images/002.jpg').rename(tmp_path / 'images/002.jpeg')
    (error,), (warning,) = file_faults(cfg)
    assert re.match(f'1 of the 2 label maps .*: {tmp_path}/labels/001.png$', error)
    assert re.match("1 label maps .* img_suffix='.jpg': 002.png$", warning)
    assert value_faults(cfg) == []
    cfg.train_dataloader.dataset.img_suffix = '.png'
    (error,), _ = file_faults(cfg)
    assert re.match(f"no images .* {tmp_path}/images .*img_suffix='.png'$", error)


def test_files_of_a_list(tmp_path):
    """Label maps count only where the pipeline loads them."""
    (make_data(tmp_path, [[0, 1, 2]] * 3) / 'list.txt').write_text('000\n001\n002\n')
    cfg = config(tmp_path, ann_file='list.txt')
    assert file_faults(cfg) == ([], [])
    (tmp_path / 'images/000.jpg').unlink()
    (tmp_path / 'labels/001.png').unlink()
    images, labels = file_faults(cfg)[0]
    assert images.endswith(f': {tmp_path}/images/000.jpg')
    assert labels.endswith(f': {tmp_path}/labels/001.png')
    cfg.train_dataloader.dataset.pipeline.pop()
    assert file_faults(cfg)[0] == [images]
    cfg.train_dataloader.dataset.img_suffix = '.tif'
    assert file_faults(cfg)[0][0].startswith('3 of the 3 images ')
    assert file_faults(config(tmp_path, ann_file='gone.txt')) == ([], [])
    (tmp_path / 'list.txt').write_text('')
    (error,), _ = file_faults(cfg)
    assert error.endswith(f' {tmp_path}/list.txt')


def test_a_training_opens_a_sample(tmp_path):
    cfg = config(make_data(tmp_path, [[0, 1, 2], [0, 7]] * 50))  # every second one is in the sample
    run(cfg, 'c.py', ['train'])
    with raises(DataError, f'{tmp_path}/labels', 7):
        run(cfg, 'c.py', ['train'], cost='slow')
    with raises(ValueError, 'cost', 'all'):
        run(cfg, 'c.py', ['train'], cost='all')
    with raises(DataError, f'{tmp_path}/other/labels', 255):
        run(config(make_data(tmp_path / 'other', [[0, 255]])), 'c.py', ['train'])


def test_warnings_are_logged(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(data_checks, 'print_log', lambda text, *_: logged.append(text))
    cfg = config(make_data(tmp_path, [[0, 1, 2]] * 2))
    (tmp_path / 'images/001.jpg').unlink()
    data_checks.run(cfg, 'c.py', ['train'])
    assert ''.join(logged).count('001.png') == 1
