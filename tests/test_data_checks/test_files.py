"""Missing data is found, and one message names it."""

import re

import pytest
from mmengine.config import ConfigDict

from mmkron.data_checks import files
from mmkron.engine import runner as launch
from mmkron.utils.errors import LaunchError
from support.errors import raises
from support.tools import make_image_tree


def data_config(scope='mmengine', **dataset) -> ConfigDict:
    return ConfigDict(default_scope=scope, train_dataloader=dict(dataset=dataset))


def test_data_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = dict(type='mmpretrain.ImageNet', data_root='data/imagenet', split='train')
    cfg = ConfigDict(train_dataloader=dict(dataset=dataset), val_dataloader=dict(dataset=dict(dataset, split='val')))
    with pytest.raises(LaunchError) as error:
        launch.check_data(cfg, 'configs/some.py', ('train', 'val'))
    text = str(error.value)
    for part in (
        f"  {tmp_path}/data/imagenet  <- train_dataloader.dataset.data_root = 'data/imagenet'",
        'https://mmpretrain.readthedocs.io/',
        'configs/some.py',
        f'from {tmp_path}.',
        '--cfg-options train_dataloader.dataset.data_root=PATH val_dataloader.dataset.data_root=PATH',
        'tools/train.py configs/kanet/kanet-kv_digits.py',
    ):
        assert part in text


def test_data_only_of_the_used_splits(tmp_path):
    cfg = ConfigDict(
        train_dataloader=dict(dataset=dict(type='A', data_root=str(tmp_path))),
        test_dataloader=dict(dataset=dict(type='A', data_root='/gone')),
        val_dataloader=None,
    )
    assert files.find_missing(cfg, ('train', 'val')) == []
    assert [item.key for item in files.find_missing(cfg, ('test',))] == ['test_dataloader.dataset.data_root']


def test_data_parts_below_the_root(tmp_path):
    (tmp_path / 'train2017').mkdir()
    dataset = dict(type='CocoDataset', ann_file='annotations/a.json', data_prefix=dict(img='train2017/', seg=''))
    (missing,) = files.find_missing(data_config(**dataset, data_root=f'{tmp_path}/'), ['train'])
    assert (missing.path, missing.key) == (f'{tmp_path}/annotations/a.json', 'train_dataloader.dataset.ann_file')
    (missing,) = files.find_missing(data_config(**dataset, data_root='/gone'), ['train'])
    assert missing.path == '/gone'


def test_data_nested(tmp_path):
    parts = [dict(type='VOCDataset', data_root=str(tmp_path)), dict(type='VOCDataset', data_root='/gone')]
    cfg = data_config(type='RepeatDataset', dataset=dict(type='ConcatDataset', datasets=parts))
    (missing,) = files.find_missing(cfg, ['train'])
    assert missing.key == 'train_dataloader.dataset.dataset.datasets.1.data_root'
    text = files.describe_missing([missing], 'c.py')
    assert '--cfg-options train_dataloader.dataset.dataset.datasets.1.data_root=PATH' in text
    assert 'layout' not in text  # nor is the type known without its scope


@pytest.mark.parametrize(('host', 'kind'), [('mmseg', 'BaseSegDataset'), ('mmdet', 'VOCDataset')])
def test_layout_of_the_host_that_reads_it(host, kind):
    pytest.importorskip(host)
    (missing,) = files.find_missing(data_config(host, type=kind, data_root='/gone'), ['train'])
    assert dict(mmseg='mmsegmentation', mmdet='mmdetection')[host] in missing.layout
    assert f'{kind} reads this layout: {missing.layout}' in files.describe_missing([missing], 'c.py')


def test_data_imagenet_split(tmp_path):
    make_image_tree(tmp_path, with_meta=False)
    assert files.find_missing(data_config(type='ImageNet', data_root=str(tmp_path), split='val'), ['train']) == []
    (missing,) = files.find_missing(data_config(type='ImageNet', data_root=str(tmp_path), split='test'), ['train'])
    assert (missing.path, missing.key) == (f'{tmp_path}/test', 'train_dataloader.dataset.split')


def test_data_of_an_unknown_type():
    cfg = data_config(type='Mine', ann_file='/gone/list.txt', data_prefix='/gone/images')
    missing = files.find_missing(cfg, ['train'])
    assert [item.value for item in missing] == ['/gone/list.txt', '/gone/images']
    text = files.describe_missing(missing, 'c.py')
    assert "/gone/images    <- train_dataloader.dataset.data_prefix = '/gone/images'" in text
    assert '--cfg-options train_dataloader.dataset.ann_file=PATH' in text


def test_remote_data_or_none_is_skipped():
    for dataset in (
        dict(type='A', data_root='s3://bucket/x', ann_file='a.json'),
        dict(type='mmkron.Digits'),
        dict(type='A', data_root=None, ann_file='', data_prefix=dict(img='http://host/x')),
    ):
        assert files.find_missing(data_config(**dataset), ['train']) == []


def test_data_fashion_mnist(tmp_path):
    cfg = data_config(type='FashionMNIST', data_root=str(tmp_path))
    names = ['train-images-idx3-ubyte', 'train-labels-idx1-ubyte', 't10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte']
    (tmp_path / f'{names[0]}.gz').touch()
    missing = files.find_missing(cfg, ['train'])
    assert [item.value for item in missing] == names
    text = files.describe_missing(missing, 'c.py')
    assert 'dataset-fashion-mnist' in text
    assert 'gunzip -c' in text
    assert '--cfg-options train_dataloader.dataset.download=True' in text
    for name in names:
        (tmp_path / name).touch()
    assert files.find_missing(cfg, ['train']) == []
    assert files.find_missing(data_config(type='FashionMNIST', data_root='/gone', download=True), ['train']) == []


def make_voc(root, names=('a', 'b', 'c')):
    for folder, suffix in (('JPEGImages', 'jpg'), ('SegmentationClass', 'png')):
        (root / folder).mkdir(parents=True)
        for name in names:
            (root / folder / f'{name}.{suffix}').touch()
    (root / 'ImageSets/Segmentation').mkdir(parents=True)
    (root / 'ImageSets/Segmentation/train.txt').write_text(''.join(f'{name}\n' for name in names))
    return dict(
        type='mmseg.PascalVOCDataset',
        data_root=str(root),
        ann_file='ImageSets/Segmentation/train.txt',
        data_prefix=dict(img_path='JPEGImages', seg_map_path='SegmentationClass'),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')],
    )


def test_voc_folder_that_is_incomplete(tmp_path):
    """Folders, the list, and every image and label that the list names."""
    dataset = make_voc(tmp_path)
    assert files.find_missing(data_config(**dataset), ['train']) == []
    (tmp_path / 'SegmentationClass/b.png').unlink()
    (tmp_path / 'SegmentationClass/c.png').unlink()
    (tmp_path / 'JPEGImages/c.jpg').unlink()
    missing = files.find_missing(data_config(**dataset), ['train'])
    assert [item.path for item in missing] == [f'{tmp_path}/JPEGImages/c.jpg', f'{tmp_path}/SegmentationClass/b.png']
    text = files.describe_missing(missing, 'c.py')
    key = "train_dataloader.dataset.ann_file = 'ImageSets/Segmentation/train.txt'"
    assert re.search(rf'JPEGImages/c.jpg +<- {key} \(1 of the 3 files .*: c.jpg\)\n', text)
    assert re.search(rf'SegmentationClass/b.png +<- {key} \(2 of the 3 files .*: b.png, c.png\)\n', text)
    (tmp_path / 'ImageSets/Segmentation/train.txt').unlink()
    (missing,) = files.find_missing(data_config(**dataset), ['train'])
    assert missing.path == f'{tmp_path}/ImageSets/Segmentation/train.txt'


def test_labels_are_needed_only_where_they_are_loaded(tmp_path):
    dataset = make_voc(tmp_path)
    (tmp_path / 'SegmentationClass/b.png').unlink()
    step = dataset['pipeline'].pop()
    assert files.find_missing(data_config(**dataset), ['train']) == []
    dataset['pipeline'].append(dict(type='TestTimeAug', transforms=[[dict(type='Resize')], [step]]))
    (missing,) = files.find_missing(data_config(**dataset), ['train'])
    assert missing.path == f'{tmp_path}/SegmentationClass/b.png'


def test_listed_files_elsewhere_or_of_another_kind(tmp_path):
    """Suffixes are arguments of the dataset, and remote files are skipped."""
    dataset = make_voc(tmp_path)
    (missing,) = files.find_missing(data_config(**dataset, img_suffix='.tif'), ['train'])
    assert missing.path == f'{tmp_path}/JPEGImages/a.tif'
    remote = dict(dataset, data_root='s3://bucket', ann_file=f'{tmp_path}/ImageSets/Segmentation/train.txt')
    assert files.find_missing(data_config(**remote), ['train']) == []
    dataset['data_prefix']['img_path'] = 's3://bucket/images'
    assert files.find_missing(data_config(**dataset), ['train']) == []


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('type', 3),
        ('data_root', ['a', 'b']),
        ('data_root', 3),
        ('ann_file', {}),
        ('data_prefix', dict(img_path=3)),
        ('img_suffix', ('.jpg', '.png')),
        ('extensions', '.jpg'),
        ('extensions', ['.jpg', None]),
        ('metainfo', 'names.txt'),
        ('metainfo', dict(classes=3)),
        ('metainfo', dict(classes='crop')),
    ],
)
def test_fields_of_another_type(field, value):
    """Refused before anything is searched, so that it does not end in a bare TypeError."""
    cfg = data_config(**{'type': 'BaseSegDataset', 'data_root': '/gone', field: value})
    value = value['classes'] if isinstance(value, dict) and 'classes' in value else cfg.train_dataloader.dataset[field]
    with raises(LaunchError, f'train_dataloader.dataset.{field}', value):
        launch.check_data(cfg, 'c.py', ('train',))
