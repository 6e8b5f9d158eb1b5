"""Missing data is found, and one message names it."""

import pytest
from mmengine.config import ConfigDict

from mmkron import data_checks
from mmkron.utils.errors import LaunchError
from support.data_checks import problems
from support.tools import make_image_tree


def data_config(scope='mmengine', **dataset) -> ConfigDict:
    return ConfigDict(default_scope=scope, train_dataloader=dict(dataset=dataset))


def missing(cfg, splits=('train',)):
    """Return (path, key) of each missing file."""
    return [(item.where, item.source.partition(' = ')[0]) for item in problems(cfg, 'files', splits)]


def test_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = dict(type='mmpretrain.ImageNet', data_root='data/imagenet', split='train')
    cfg = ConfigDict(train_dataloader=dict(dataset=dataset), val_dataloader=dict(dataset=dict(dataset, split='val')))
    with pytest.raises(LaunchError) as error:
        data_checks.run(cfg, 'configs/some.py', ('train', 'val'))
    for part in (
        f"  {tmp_path}/data/imagenet  <- train_dataloader.dataset.data_root = 'data/imagenet'",
        'configs/some.py',
        '--cfg-options train_dataloader.dataset.data_root=PATH val_dataloader.dataset.data_root=PATH',
        'tools/train.py configs/kanet/kanet-kv_digits.py',
    ):
        assert part in str(error.value)


def test_only_of_the_used_splits(tmp_path):
    cfg = ConfigDict(
        train_dataloader=dict(dataset=dict(type='A', data_root=str(tmp_path))),
        test_dataloader=dict(dataset=dict(type='A', data_root='/gone')),
        val_dataloader=None,
    )
    assert missing(cfg, ('train', 'val')) == []
    assert missing(cfg, ('test',)) == [('/gone', 'test_dataloader.dataset.data_root')]


def test_parts_below_the_root(tmp_path):
    (tmp_path / 'train2017').mkdir()
    dataset = dict(type='CocoDataset', ann_file='annotations/a.json', data_prefix=dict(img='train2017/', seg=''))
    cfg = data_config(**dataset, data_root=f'{tmp_path}/')
    assert missing(cfg) == [(f'{tmp_path}/annotations/a.json', 'train_dataloader.dataset.ann_file')]
    assert missing(data_config(**dataset, data_root='/gone')) == [('/gone', 'train_dataloader.dataset.data_root')]


def test_nested_datasets(tmp_path):
    parts = [dict(type='VOCDataset', data_root=str(tmp_path)), dict(type='VOCDataset', data_root='/gone')]
    cfg = data_config(type='RepeatDataset', dataset=dict(type='ConcatDataset', datasets=parts))
    assert missing(cfg) == [('/gone', 'train_dataloader.dataset.dataset.datasets.1.data_root')]


def test_split_of_imagenet(tmp_path):
    make_image_tree(tmp_path, with_meta=False)
    assert missing(data_config(type='ImageNet', data_root=str(tmp_path), split='val')) == []
    cfg = data_config(type='ImageNet', data_root=str(tmp_path), split='test')
    assert missing(cfg) == [(f'{tmp_path}/test', 'train_dataloader.dataset.split')]


def test_an_unknown_type():
    cfg = data_config(type='Mine', ann_file='/gone/list.txt', data_prefix='/gone/images')
    assert [path for path, _ in missing(cfg)] == ['/gone/list.txt', '/gone/images']
    assert {item.option for item in problems(cfg, 'files')} == {'train_dataloader.dataset.ann_file=PATH'}


@pytest.mark.parametrize(
    'dataset',
    [
        dict(type='A', data_root='s3://bucket/x', ann_file='a.json'),
        dict(type='mmkron.Digits'),
        dict(type='A', data_root=None, ann_file='', data_prefix=dict(img='http://host/x')),
        dict(type='A', data_root=3, ann_file={}, data_prefix=['a']),
        dict(type=3, ann_file=['a'], data_prefix=dict(img_path=3), metainfo=3),
    ],
)
def test_remote_data_is_skipped_and_other_types_are_left_to_the_host(dataset):
    data_checks.run(data_config(**dataset), 'c.py', ('train',))


def test_fashion_mnist(tmp_path):
    cfg = data_config(type='FashionMNIST', data_root=str(tmp_path))
    names = ['train-images-idx3-ubyte', 'train-labels-idx1-ubyte', 't10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte']
    (tmp_path / f'{names[0]}.gz').touch()
    assert [path for path, _ in missing(cfg)] == [f'{tmp_path}/{name}' for name in names]
    hints = '\n'.join(problems(cfg, 'files')[0].hints)
    assert 'dataset-fashion-mnist' in hints
    assert '--cfg-options train_dataloader.dataset.download=True' in hints
    for name in names:
        (tmp_path / name).touch()
    assert missing(cfg) == []
    assert missing(data_config(type='FashionMNIST', data_root='/gone', download=True)) == []


def test_annotations_of_a_metric(tmp_path):
    """The file of a metric does not depend on the dataset's root."""
    dataset = dict(type='CocoDataset', data_root=str(tmp_path))
    metric = dict(type='CocoMetric', ann_file='/gone.json')
    for evaluator, key in ((metric, 'val_evaluator'), ([dict(type='A', ann_file='x'), metric], 'val_evaluator.1')):
        cfg = ConfigDict(val_dataloader=dict(dataset=dataset), val_evaluator=evaluator)
        assert missing(cfg, ('val',)) == [('/gone.json', f'{key}.ann_file')]
        assert problems(cfg, 'files')[0].option == f'{key}.ann_file=PATH'
    for ann_file in (None, 's3://bucket/a.json', str(tmp_path)):
        cfg.val_evaluator = dict(metric, ann_file=ann_file)
        assert missing(cfg, ('val',)) == []
