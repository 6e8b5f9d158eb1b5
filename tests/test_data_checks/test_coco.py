"""COCO annotation files that do not fit their dataset are refused, and the message names both sides."""

import json
import os
import re

import numpy as np
import pytest
from mmengine.config import ConfigDict

from mmkron import data_checks
from mmkron.data_checks import DataError, coco
from support.data_checks import texts
from support.errors import raises

datasets = pytest.importorskip('mmdet.datasets', reason="builds MMDetection's datasets")


def annotation(number, box=(1, 1, 4, 4), **more):
    return {**dict(id=number, image_id=number % 3, category_id=1, bbox=list(box), area=16, iscrowd=0), **more}


def coco_content(annotations=None, categories=('cat', 'dog')):
    """Three images of 20 x 10, two categories, and six annotations unless others are given."""
    return dict(
        images=[dict(id=i, file_name=f'{i}.png', width=20, height=10) for i in range(3)],
        categories=[dict(id=i, name=name) for i, name in enumerate(categories, 1)],
        annotations=[annotation(i) for i in range(6)] if annotations is None else annotations,
    )


@pytest.fixture
def write(tmp_path):
    """Return a function that writes an annotation file with its images and returns the config of a dataset."""

    def function(content=None, **more):
        (tmp_path / 'a.json').write_text(json.dumps(coco_content() if content is None else content))
        for i in range(3):
            (tmp_path / f'{i}.png').touch()
        dataset = dict(type='CocoDataset', data_root=str(tmp_path), ann_file='a.json', data_prefix=dict(img=''))
        return {**dataset, 'metainfo': dict(classes=('cat', 'dog')), **more}

    return function


def config(dataset, split='train'):
    return ConfigDict({'default_scope': 'mmdet', f'{split}_dataloader': dict(dataset=dataset)})


def found(dataset, split='train'):
    """Return the texts of the errors and of the warnings."""
    return texts(config(dataset, split), 'COCO annotations', [split])


def loaded(dataset):
    """Return the (label, box) pairs that MMDetection loads, by image."""
    given = {key: value for key, value in dataset.items() if key != 'type'}
    items = datasets.CocoDataset(**given, pipeline=[], serialize_data=False).data_list
    return {item['img_id']: [(each['bbox_label'], tuple(each['bbox'])) for each in item['instances']] for item in items}


def test_files_that_fit(write, tmp_path):
    dataset = write()
    assert found(dataset) == ([], [])
    (tmp_path / 'names.txt').write_text('cat\ndog\n')
    for names in (str(tmp_path / 'names.txt'), ['cat', 'dog'], ('dog',)):  # trains on some categories
        content = coco_content([annotation(i, category_id=2) for i in range(6)])
        assert found(write(content, metainfo=dict(classes=names))) == ([], [])
    assert found(dict(dataset, type='LVISV1Dataset', metainfo=dict(classes=('bird',)))) == ([], [])
    assert found(dict(dataset, data_root='s3://bucket')) == ([], [])


def test_the_host_keeps_what_the_check_counts(write):
    """MMDetection numbers labels in the file's order and drops mismatches: the reason for the check."""
    annotations = [
        annotation(0),
        annotation(1, category_id=7),
        annotation(2, image_id=99),
        annotation(3, category_id=2),
    ]
    dataset = write(coco_content(annotations), metainfo=dict(classes=('dog', 'cat', 'bird')))
    labels = {number: [label for label, _ in boxes] for number, boxes in loaded(dataset).items()}
    assert labels == {0: [0, 1], 1: [], 2: []}
    (names, category, image), _ = found(dataset)
    assert re.match("1 of the 3 .*metainfo.classes.*'bird';\n.*none$", names)
    assert category.endswith(': annotations[1].category_id = 7')
    assert image.endswith(': annotations[2].image_id = 99')


def test_names_in_another_order(write):
    (text,), _ = found(write(metainfo=dict(classes=('dog', 'cat'))))
    assert re.match('metainfo.classes .* dog, cat,\n.* cat, dog$', text)


def test_classes_of_the_type_are_the_default(write):
    (text,), _ = found(write(metainfo={}))
    assert text.startswith('78 of the 80 classes of METAINFO of CocoDataset ')
    content = coco_content(categories=datasets.CocoDataset.METAINFO['classes'])
    assert found(write(content, metainfo={})) == ([], [])


def test_types_derived_from_coco(write):
    """A subclass that reads the file as CocoDataset does is checked by its own classes; others are left alone."""

    class Pets(datasets.CocoDataset):
        METAINFO = dict(classes=('cat', 'cow'))

    class OwnReader(Pets):
        def load_data_list(self):
            return []

    class OwnPaths(Pets):
        def parse_data_info(self, raw_data_info):
            return super().parse_data_info(raw_data_info)

    dataset = write(metainfo={}, type=Pets)
    os.remove(f'{dataset["data_root"]}/1.png')
    image, names = found(dataset)[0]
    assert image.endswith(f': {dataset["data_root"]}/1.png')
    assert names.startswith('1 of the 2 classes of METAINFO of Pets ')
    assert found(dict(dataset, type=OwnPaths))[0] == [names.replace('Pets', 'OwnPaths')]
    assert found(dict(dataset, type=OwnReader)) == ([], [])


@pytest.mark.parametrize(
    'content',
    [
        *('[', '\xff', '[' * 100_000, '[1]', '3'),
        '{"images": [], "annotations": []}',
        '{"images": 3, "categories": []}',
        '{"images": [], "categories": [], "annotations": null}',
        '{"images": [], "categories": [null]}',
    ],
)
def test_files_of_another_format(write, tmp_path, content):
    dataset = write()
    (tmp_path / 'a.json').write_bytes(content.encode('latin-1'))
    (text,), _ = found(dataset)
    assert text.startswith('it cannot be read: ')


@pytest.mark.parametrize(
    ('kind', 'key'),
    [
        *(('categories', key) for key in ('id', 'name')),
        *(('images', key) for key in ('id', 'file_name', 'height', 'width')),
        *(('annotations', key) for key in ('image_id', 'category_id', 'bbox', 'area')),
    ],
)
def test_entries_that_cannot_be_read(write, kind, key):
    """They end in a message, also where the host would go on."""
    content = coco_content()
    content[kind][1][key] = [1, 2, 3] if key == 'bbox' else {}
    if key not in ('name', 'file_name'):
        assert found(write(content))[0][0].startswith('it cannot be read: ')
    del content[kind][1][key]
    (text,), _ = found(write(content))
    assert text == f"it cannot be read: KeyError: '{key}'"


def test_only_tests_go_without_annotations(write):
    content = coco_content()
    del content['annotations']
    (text,), _ = found(write(content))
    assert text.startswith('none of the 3 images ')
    assert found(write(content, test_mode=True), 'val') == ([], [])


def test_images_that_are_not_on_disk(write, tmp_path):
    """Folders in file names are followed; remote images are skipped."""
    content = coco_content()
    content['images'][1]['file_name'] = 'x/1.png'
    dataset = write(content)
    (text,), _ = found(dataset)
    assert re.match(f'1 of the 3 images .*: {tmp_path}/x/1.png$', text)
    assert found(dict(dataset, data_prefix=dict(img='s3://bucket'))) == ([], [])
    (tmp_path / 'x').mkdir()
    (tmp_path / '1.png').rename(tmp_path / 'x/1.png')
    assert found(dataset) == ([], [])


def test_a_file_is_parsed_once(write, tmp_path, monkeypatch):
    dataset = write()
    reads = []
    load = json.load
    monkeypatch.setattr(coco.json, 'load', lambda file: reads.append(file.name) or load(file))
    cfg = ConfigDict(
        default_scope='mmdet',
        train_dataloader=dict(dataset=dict(type='RepeatDataset', dataset=dataset)),
        val_dataloader=dict(dataset=dataset),
    )
    data_checks.run(cfg, 'c.py', ['train', 'val'])
    assert reads == [f'{tmp_path}/a.json']
    write(dict(images=[], categories=[], annotations=[]))
    os.utime(tmp_path / 'a.json', (1, 1))
    with raises(DataError, f'{tmp_path}/a.json'):
        data_checks.run(cfg, 'c.py', ['train', 'val'])


def test_all_datasets_of_a_file_are_in_one_message(write, tmp_path):
    dataset = write(metainfo=dict(classes=('cat', 'Dog')))
    cfg = ConfigDict(config(dataset), val_dataloader=dict(dataset=dict(dataset, test_mode=True)))
    with raises(DataError, f'{tmp_path}/a.json', 'Dog') as info:
        data_checks.run(cfg, 'c.py', ['train', 'val'])
    text = str(info.value)
    for split in ('train', 'val'):
        assert f"{split}_dataloader.dataset.ann_file = 'a.json'" in text
    assert text.count('1 of the 2 classes') == 1
    assert 'metainfo=dict(classes=(...))' in text


def test_dropped_boxes_are_those_that_the_host_drops(write):
    """Random boxes, within, across and beyond the border, with sides around 1 and areas around 0."""
    rng = np.random.default_rng(0)
    annotations = []
    for i in range(600):
        size = rng.choice([-1, 0, 0.5, 1, 1.5, 8, 30], 2, p=[0.05, 0.05, 0.1, 0.2, 0.2, 0.2, 0.2])
        box = [float(value) for value in (*rng.integers(-12, 24, 2), *size)]
        more = dict(ignore=1) if rng.random() < 0.05 else {}
        area = float(rng.choice([-1, 0, 1e-3, 16], p=[0.05, 0.05, 0.2, 0.7]))
        annotations.append(annotation(i, box, area=area, category_id=int(rng.integers(1, 3)), **more))
    dataset = write(coco_content(annotations))
    content = coco.read_coco(f'{dataset["data_root"]}/a.json', 0)
    expected = {number: [] for number in range(3)}
    for entry, label in zip(annotations, content.labels):
        if label >= 0:
            x, y, w, h = entry['bbox']
            expected[entry['image_id']].append((label, (x, y, x + w, y + h)))
    assert loaded(dataset) == expected
    dropped = sum(count for _, count, _ in content.dropped)
    ignored = sum('ignore' in entry for entry in annotations)
    assert 100 < dropped == 600 - ignored - sum(map(len, expected.values()))


@pytest.mark.parametrize(
    ('key', 'value', 'reason'),
    [
        ('bbox', [0.1, 0.2, 0.3, 0.9], 'narrower'),
        ('bbox', [4, 4, 6, 0.5], 'narrower'),
        ('bbox', [20, 3, 4, 4], 'outside'),
        ('bbox', [float('nan'), 3, 4, 4], 'outside'),
        ('area', 0, 'area of 0'),
    ],
)
@pytest.mark.parametrize('bad', [(1, 3), (0, 2, 4, 5)])
def test_dropped_boxes_are_counted_and_named(write, key, value, reason, bad):
    """Up to half of the boxes are a warning, more are an error."""
    content = coco_content()
    for i in bad:
        content['annotations'][i][key] = value
    errors, warnings = found(write(content))
    assert [len(errors), len(warnings)] == ([0, 1] if len(bad) == 2 else [1, 0])
    shown = ', '.join(f'annotations[{i}].{key} = {json.dumps(value)}' for i in bad[:3]) + ', ...' * (len(bad) > 3)
    (text,) = errors + warnings
    assert text.startswith(f'{len(bad)} of the 6 annotations ')
    assert reason in text
    assert text.endswith(f': {shown}')


def test_a_few_dropped_boxes_are_not_reported(write):
    """COCO's training set has some: they are a thousandth at most."""
    annotations = [annotation(i) for i in range(2000)]
    for i in (5, 7):
        annotations[i]['bbox'] = [3, 3, 2, 0.4]
    assert found(write(coco_content(annotations))) == ([], [])
    annotations[8]['bbox'] = [3, 3, 2, 0.4]
    assert len(found(write(coco_content(annotations)))[1]) == 1


def test_no_boxes(write):
    """An error in training data, a warning in validation data; crowds and boxes of unused classes do not count."""
    content = coco_content([])
    (text,), warnings = found(write(content))
    assert text.startswith('none of the 3 images ')
    assert warnings == []
    assert found(write(content, test_mode=True), 'val') == ([], [text])
    assert found(write(metainfo=dict(classes=('dog',)))) == ([text], [])
    content = coco_content([annotation(i, iscrowd=1) for i in range(6)])
    assert found(write(content)) == ([text], [])
    content['annotations'][5]['iscrowd'] = 0
    assert found(write(content)) == ([], [])


def test_small_images_are_dropped_by_min_size(write):
    dataset = write(filter_cfg=dict(filter_empty_gt=True, min_size=11))
    (text,), _ = found(dataset)
    assert text.startswith('3 of the 3 images are smaller than filter_cfg.min_size=11 ')
    assert found(dict(dataset, test_mode=True), 'val') == ([], [])
    assert found(dict(dataset, filter_cfg=dict(min_size=10))) == ([], [])
