"""COCO annotation files that do not fit their dataset are refused, and the message names both sides."""

import json
import os
import re

import pytest
from mmengine.config import ConfigDict

from mmkron.data_checks import coco, coco_file, files
from mmkron.engine import runner as launch
from mmkron.utils.errors import LaunchError
from support.errors import raises

CATEGORIES = ((1, 'cat'), (2, 'dog'), (5, 'cow'))


def make_coco(root, images=('a.jpg', 'b.jpg', 'c.jpg'), categories=CATEGORIES, annotations=None, metainfo=None):
    """A COCO layout on disk and the config of a dataset that it fits; annotations are (category id, image id)."""
    (root / 'images').mkdir(parents=True)
    for name in images:
        (root / 'images' / name).touch()
    if annotations is None:
        annotations = [(number, 10) for number, _ in categories]
    content = dict(
        images=[dict(id=10 + i, file_name=name, height=8, width=8) for i, name in enumerate(images)],
        categories=[dict(id=number, name=name) for number, name in categories],
        annotations=[
            dict(id=i, category_id=category, image_id=image, bbox=[0, 0, 4, 4], area=16, iscrowd=0)
            for i, (category, image) in enumerate(annotations)
        ],
    )
    write(root, content)
    metainfo = dict(classes=('cat', 'dog', 'cow')) if metainfo is None else metainfo
    return dict(
        type='CocoDataset',
        data_root=str(root),
        metainfo=metainfo,
        ann_file='a.json',
        data_prefix=dict(img='images/'),
    )


def write(root, content):
    (root / 'a.json').write_text(json.dumps(content))


def texts(dataset):
    cfg = ConfigDict(default_scope='mmdet', train_dataloader=dict(dataset=dataset))
    assert files.find_missing(cfg, ['train']) == []
    return [item.text for item in coco.check_coco(cfg, ['train'])]


def test_files_that_fit(tmp_path):
    dataset = make_coco(tmp_path)
    assert texts(dataset) == []
    (tmp_path / 'names.txt').write_text('cat\ndog\ncow\n')
    assert texts(dict(dataset, metainfo=dict(classes=str(tmp_path / 'names.txt')))) == []
    assert texts(dict(dataset, type='mmdet.CocoDataset', metainfo=dict(classes=['cat', 'dog', 'cow']))) == []
    assert texts(dict(dataset, type='LVISV1Dataset', metainfo=dict(classes=('bird',)))) == []
    assert texts(dict(dataset, metainfo=dict(classes=('cat', 'cow')))) == []  # trains on some categories


def test_the_host_keeps_what_the_check_counts(tmp_path):
    """MMDetection numbers labels in the file's order and drops mismatches: the reason for the check."""
    coco = pytest.importorskip('mmdet.datasets', reason='compares with MMDetection').CocoDataset
    dataset = make_coco(tmp_path, annotations=[(1, 10), (2, 10), (7, 10), (5, 11), (2, 99)])
    dataset = dict(dataset, metainfo=dict(classes=('cow', 'cat', 'bird')), pipeline=[])
    dataset.pop('type')
    loaded = coco(**dataset)
    labels = [(item['img_id'], [each['bbox_label'] for each in item['instances']]) for item in loaded]
    assert labels == [(10, [0]), (11, [1]), (12, [])]
    first, second, third = texts(dict(dataset, type='CocoDataset'))
    assert re.match("1 of the 3 .*metainfo.classes.*'bird';\n.*'dog'$", first)
    assert 'annotations[2].category_id = 7' in second
    assert 'annotations[4].image_id = 99' in third


def test_names_in_another_order(tmp_path):
    (text,) = texts(make_coco(tmp_path, metainfo=dict(classes=('cow', 'cat'))))
    assert re.match('metainfo.classes .* cow, cat,\n.* cat, cow$', text)


def test_classes_of_coco_are_the_default(tmp_path):
    pytest.importorskip('mmdet', reason='runs MMDetection configs')
    dataset = make_coco(tmp_path, metainfo={})
    (text,) = texts(dataset)
    assert text.startswith('77 of the 80 classes of METAINFO of CocoDataset ')
    from mmdet.datasets import CocoDataset

    content = json.loads((tmp_path / 'a.json').read_text())
    content['categories'] = [dict(id=i, name=name) for i, name in enumerate(CocoDataset.METAINFO['classes'], 1)]
    write(tmp_path, content)
    assert texts(dataset) == []


def test_no_names_without_mmdet(tmp_path, monkeypatch):
    """The classes are unknown, which another error reports; the rest is still compared."""
    monkeypatch.setattr('mmkron.data_checks.common.dataset_type', lambda *_: None)
    (text,) = texts(make_coco(tmp_path, metainfo={}, annotations=[(8, 10), (9, 11), (8, 11)]))
    assert re.match(r'3 of the 3 annotations .*annotations\[1\].category_id = 9', text)


def test_one_name_without_its_comma(tmp_path):
    """A string is refused unless it is a file of names; a remote file is skipped."""
    cfg = ConfigDict(train_dataloader=dict(dataset=make_coco(tmp_path, metainfo=dict(classes='cat'))))
    with raises(LaunchError, 'train_dataloader.dataset.metainfo.classes', 'cat'):
        launch.check_data(cfg, 'c.py', ['train'])
    assert texts(dict(make_coco(tmp_path / 'other'), metainfo=dict(classes='s3://bucket/names.txt'))) == []


@pytest.mark.parametrize(
    ('content', 'problem'),
    [
        *((text, 'JSON') for text in ('[', '\xff', '[' * 100_000)),
        ('[1]', "'images' and 'categories'"),
        ('{"images": [], "annotations": []}', "'categories'"),
        ('{"images": 3, "categories": []}', 'images must be a list, got 3'),
        ('{"images": [], "categories": [], "annotations": null}', 'annotations must be a list, got null'),
        ('{"images": [], "categories": [null]}', 'categories[0] = null'),
    ],
)
def test_files_of_another_format(tmp_path, content, problem):
    dataset = make_coco(tmp_path)
    (tmp_path / 'a.json').write_bytes(content.encode('latin-1'))
    (text,) = texts(dataset)
    assert text.startswith('MMDetection cannot read it: ')
    assert problem in text


def test_only_tests_go_without_annotations(tmp_path):
    dataset = make_coco(tmp_path)
    content = json.loads((tmp_path / 'a.json').read_text())
    del content['annotations']
    write(tmp_path, content)
    (text,) = texts(dataset)
    assert "no 'annotations'" in text
    assert texts(dict(dataset, test_mode=True)) == []


def test_images_that_are_not_on_disk(tmp_path):
    """The first of them is named as missing, the note has their number; folders in file names are followed."""
    names = ['a.jpg', 'b.jpg', 'c.jpg', 'd.jpg', 'e.jpg']
    dataset = make_coco(tmp_path, names)
    cfg = ConfigDict(train_dataloader=dict(dataset=dataset))
    for name in names[1:]:
        (tmp_path / 'images' / name).unlink()
    (missing,) = files.find_missing(cfg, ['train'])
    assert (missing.path, missing.key) == (f'{tmp_path}/images/b.jpg', 'train_dataloader.dataset.ann_file')
    with pytest.raises(LaunchError) as error:
        launch.check_data(cfg, 'c.py', ['train'])
    text = f"{tmp_path}/images/b.jpg  <- train_dataloader.dataset.ann_file = 'a.json' (4 of the 5 files "
    assert text in str(error.value)
    assert ': b.jpg, c.jpg, d.jpg, ...)\n' in str(error.value)
    content = json.loads((tmp_path / 'a.json').read_text())
    content['images'] = [dict(each, file_name=name) for each, name in zip(content['images'], ('x/a.jpg', 'a.jpg'))]
    write(tmp_path, content)
    assert [item.path for item in files.find_missing(cfg, ['train'])] == [f'{tmp_path}/images/x/a.jpg']
    (tmp_path / 'images/x').mkdir()
    (tmp_path / 'images/x/a.jpg').touch()
    assert files.find_missing(cfg, ['train']) == []


def test_remote_data_is_skipped(tmp_path):
    dataset = make_coco(tmp_path, metainfo=dict(classes=('bird',)))
    (tmp_path / 'images/a.jpg').unlink()
    assert texts(dict(dataset, data_root='s3://bucket')) == []
    remote = dict(dataset, data_prefix=dict(img='s3://bucket/images'))
    assert len(texts(remote)) == 1  # the annotations are here


def test_annotations_of_the_metric(tmp_path):
    """The file of a metric does not depend on the dataset's root."""
    dataset = make_coco(tmp_path)
    metric = dict(type='CocoMetric', ann_file='data/gone.json')
    for evaluator, key in ((metric, 'val_evaluator'), ([dict(type='A', ann_file='x'), metric], 'val_evaluator.1')):
        cfg = ConfigDict(val_dataloader=dict(dataset=dataset), val_evaluator=evaluator)
        (missing,) = files.find_missing(cfg, ['val'])
        assert (missing.key, missing.path) == (f'{key}.ann_file', os.path.abspath('data/gone.json'))
        assert f'--cfg-options {key}.ann_file=PATH\n' in files.describe_missing([missing], 'c.py')
    for ann_file in (None, 's3://bucket/a.json', f'{tmp_path}/a.json'):
        cfg.val_evaluator = dict(metric, ann_file=ann_file)
        assert files.find_missing(cfg, ['val']) == []


def test_a_file_is_read_once(tmp_path, monkeypatch):
    dataset = make_coco(tmp_path)
    reads = []
    load = json.load
    monkeypatch.setattr(coco_file.json, 'load', lambda file: reads.append(file.name) or load(file))
    monkeypatch.chdir(tmp_path)
    cfg = ConfigDict(
        train_dataloader=dict(dataset=dict(type='RepeatDataset', dataset=dataset)),
        val_dataloader=dict(dataset=dataset),
        val_evaluator=dict(type='CocoMetric', ann_file='a.json'),
    )
    launch.check_data(cfg, 'c.py', ['train', 'val'])
    assert reads == [f'{tmp_path}/a.json']
    write(tmp_path, dict(images=[], categories=[], annotations=[]))
    os.utime(tmp_path / 'a.json', (1, 1))
    with pytest.raises(LaunchError):
        launch.check_data(cfg, 'c.py', ['train', 'val'])


def test_all_datasets_of_a_file_are_in_one_message(tmp_path):
    dataset = make_coco(tmp_path, metainfo=dict(classes=('cat', 'Dog', 'cow')))
    cfg = ConfigDict(
        default_scope='mmdet',
        train_dataloader=dict(dataset=dataset),
        val_dataloader=dict(dataset=dict(dataset, test_mode=True)),
    )
    with raises(LaunchError, f'{tmp_path}/a.json', 'Dog') as info:
        launch.check_data(cfg, 'c.py', ['train', 'val'])
    text = str(info.value)
    for split in ('train', 'val'):
        assert f"{split}_dataloader.dataset.ann_file = 'a.json'" in text
    assert text.count('1 of the 3 classes') == 1
    assert 'metainfo=dict(classes=(...))' in text
