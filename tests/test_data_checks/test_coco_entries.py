"""Entries of COCO annotation files that MMDetection drops or cannot read are named before the training."""

import json
import re

import numpy as np
import pytest
from mmengine.config import ConfigDict
from PIL import Image

from mmkron.data_checks import DataError, coco, run
from mmkron.data_checks.coco_file import read_coco
from support.errors import raises

SQUARE = [[1, 1, 5, 1, 5, 5, 1, 5]]
MASKS = [dict(type='LoadAnnotations', with_bbox=True, with_mask=True)]


def annotation(number, box=(1, 1, 4, 4), **more):
    entry = dict(id=number, image_id=number % 3, category_id=1, bbox=list(box), area=16, iscrowd=0, segmentation=SQUARE)
    return {**entry, **more}


def coco_content(annotations=None):
    """Three images of 20 x 10, two categories, and six annotations unless others are given."""
    images = [dict(id=i, file_name=f'{i}.png', width=20, height=10) for i in range(3)]
    categories = [dict(id=1, name='cat'), dict(id=2, name='dog')]
    annotations = [annotation(i) for i in range(6)] if annotations is None else annotations
    return dict(images=images, categories=categories, annotations=annotations)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes an annotation file with its images and returns the config of a dataset."""

    def function(content, **more):
        (tmp_path / 'a.json').write_text(json.dumps(content))
        for i in range(3):
            Image.new('RGB', (20, 10)).save(tmp_path / f'{i}.png')
        metainfo = dict(classes=('cat', 'dog'))
        dataset = dict(type='CocoDataset', data_root=str(tmp_path), ann_file='a.json', metainfo=metainfo)
        return dict(dataset, data_prefix=dict(img=''), **more)

    return function


def problems(dataset, split='train', **more):
    """Return the texts of the errors and of the warnings."""
    found = [*coco.check_coco(ConfigDict({f'{split}_dataloader': dict(dataset=dataset), **more}), [split])]
    return [item.text for item in found if not item.warning], [item.text for item in found if item.warning]


def host_boxes(dataset):
    """Return the boxes that MMDetection loads, by image."""
    from mmdet.datasets import CocoDataset

    dataset = {key: value for key, value in dataset.items() if key != 'type'}
    loaded = CocoDataset(**dataset, pipeline=[], serialize_data=False).data_list
    return {item['img_id']: [tuple(each['bbox']) for each in item['instances']] for item in loaded}


def test_dropped_boxes_are_those_that_the_host_drops(write):
    """Random boxes, within, across and beyond the border, with sides around 1 and areas around 0."""
    pytest.importorskip('mmcv._ext', reason='mmdet needs the compiled operators of mmcv')
    rng = np.random.default_rng(0)
    annotations = []
    for i in range(600):
        start, size = (
            rng.integers(-12, 24, 2),
            rng.choice([-1, 0, 0.5, 1, 1.5, 8, 30], 2, p=[0.05, 0.05, 0.1, 0.2, 0.2, 0.2, 0.2]),
        )
        box = [float(value) for value in (*start, *size)]
        more = dict(ignore=1) if rng.random() < 0.05 else {}
        area = float(rng.choice([-1, 0, 1e-3, 16], p=[0.05, 0.05, 0.2, 0.7]))
        annotations.append(annotation(i, box, area=area, category_id=int(rng.integers(1, 3)), **more))
    dataset = write(coco_content(annotations))
    content = read_coco(f'{dataset["data_root"]}/a.json')
    expected = {number: [] for number in range(3)}
    for entry, label in zip(annotations, content.labels):
        if label >= 0:
            assert label == entry['category_id'] - 1
            x, y, w, h = entry['bbox']
            expected[entry['image_id']].append((x, y, x + w, y + h))
    assert host_boxes(dataset) == expected
    dropped = sum(count for count, _ in content.dropped)
    ignored = sum('ignore' in entry for entry in annotations)
    assert 100 < dropped == 600 - ignored - sum(map(len, expected.values()))


@pytest.mark.parametrize(
    ('key', 'value', 'reason'),
    [
        ('bbox', [0.1, 0.2, 0.3, 0.9], 'relative'),
        ('bbox', [4, 4, 0.5, 6], 'narrower'),
        ('bbox', [20, 3, 4, 4], 'outside'),
        ('area', 0, 'area of 0'),
    ],
)
@pytest.mark.parametrize('bad', [(1, 3), (0, 2, 4, 5)])
def test_dropped_boxes_are_counted_and_named(write, key, value, reason, bad):
    """Up to half of the boxes are a warning, more are an error."""
    content = coco_content()
    for i in bad:
        content['annotations'][i][key] = value
    errors, warnings = problems(write(content))
    assert [len(errors), len(warnings)] == ([0, 1] if len(bad) == 2 else [1, 0])
    shown = ', '.join(f'annotations[{i}].{key} = {json.dumps(value)}' for i in bad[:3]) + ', ...' * (len(bad) > 3)
    (text,) = errors + warnings
    assert text.startswith(f'{len(bad)} of the 6 annotations ')
    assert reason in text
    assert text.endswith(f': {shown}')


def test_a_few_dropped_boxes_are_no_noise(write):
    """COCO's training set has some: they are a thousandth at most."""
    annotations = [annotation(i) for i in range(2000)]
    for i in (5, 7):
        annotations[i]['bbox'] = [3, 3, 2, 0.4]
    assert problems(write(coco_content(annotations))) == ([], [])
    annotations[8]['bbox'] = [3, 3, 2, 0.4]
    assert len(problems(write(coco_content(annotations)))[1]) == 1


def test_boxes_by_two_corners(write):
    content = coco_content([annotation(i, (8, 4, 18, 9)) for i in range(6)])
    errors, (text,) = problems(write(content))
    assert errors == []
    assert text.startswith('6 of the 6 boxes reach beyond their image')
    content['annotations'][0]['bbox'] = [8, 4, 6, 3]  # no corners
    assert problems(write(content)) == ([], [])


def test_no_boxes(write):
    """An error in training data, a warning in validation data; boxes of unused classes do not count."""
    content = coco_content([])
    (text,), warnings = problems(write(content))
    assert text.startswith('none of the 3 images ')
    assert warnings == []
    assert problems(write(content, test_mode=True), 'val') == ([], [text])
    dataset = write(coco_content())
    assert problems(dict(dataset, metainfo=dict(classes=('dog',)))) == ([text], [])


def test_small_images_are_dropped_by_min_size(write):
    dataset = write(coco_content(), filter_cfg=dict(filter_empty_gt=True, min_size=11))
    (text,), _ = problems(dataset)
    assert text.startswith('3 of the 3 images are smaller than filter_cfg.min_size=11 ')
    assert problems(dict(dataset, test_mode=True), 'val') == ([], [])
    assert problems(dict(dataset, filter_cfg=dict(min_size=10))) == ([], [])


FIELDS = {
    'categories': ('id', 'name'),
    'images': ('id', 'file_name', 'height', 'width'),
    'annotations': ('id', 'image_id', 'category_id', 'bbox', 'area'),
}


@pytest.mark.parametrize(('kind', 'key'), [(kind, key) for kind, keys in FIELDS.items() for key in keys])
def test_missing_fields(write, kind, key):
    """The host would stop at a bare KeyError."""
    content = coco_content()
    del content[kind][1][key]
    dataset = write(content)
    (text,), _ = problems(dataset)
    total = len(content[kind])
    assert text == f"MMDetection cannot read it: 1 of the {total} {kind} have no '{key}': {kind}[1]"
    pytest.importorskip('mmcv._ext', reason='mmdet needs the compiled operators of mmcv')
    with pytest.raises(KeyError):
        host_boxes(dataset)


BAD = [None, [], {}, True, 'x', [1, 2, 3], [1, 2, 3, None], [1, 2, 3, '4'], [[1, 2, 3, 4]], float('nan'), float('inf')]


@pytest.mark.parametrize('kind', FIELDS)
def test_bad_values_are_named(write, kind):
    """Values of a wrong type are named instead of ending in a bare Python error."""
    for key in (*FIELDS[kind], *(('iscrowd',) if kind == 'annotations' else ())):
        for value in BAD:
            if value == 'x' and (key in ('name', 'file_name') or key.endswith('id')):
                continue
            if key == 'iscrowd' and value is True or key.endswith('id') and isinstance(value, float):
                continue
            content = coco_content()
            content[kind][1][key] = value
            (text, *others), _ = problems(write(content))
            assert others == []
            assert f' 1 of the {len(content[kind])} {kind} have a {key} that is not ' in text
            assert text.endswith(f': {kind}[1].{key} = {json.dumps(value)}')


@pytest.mark.parametrize('kind', FIELDS)
def test_entries_that_are_not_objects_and_repeated_ids(write, kind):
    content = coco_content()
    number = content[kind][1]['id'] = content[kind][0]['id']
    (text,), _ = problems(write(content))
    assert text.endswith(f': {kind}[0].id = {number}, {kind}[1].id = {number}')
    for value in (None, 3, 'x', [1]):
        content[kind][1] = value
        (text,), _ = problems(write(content))
        assert text.endswith(f'{kind}[1] = {json.dumps(value)}')


def test_the_launcher_names_the_entry(write):
    content = coco_content()
    content['annotations'][3]['bbox'] = None
    cfg = ConfigDict(train_dataloader=dict(dataset=write(content)))
    with raises(DataError, 'annotations[3].bbox', 'null'):
        run(cfg, 'c.py', ['train'])


BAD_MASKS = [None, [], {}, [[1, 2, None, 3, 4, 5]], [1, 1, 5, 1, 5, 5], ['x'], dict(counts=None, size=[10, 20]), 'x', 3]


@pytest.mark.parametrize('mask', BAD_MASKS)
def test_masks_that_are_trained(write, mask):
    content = coco_content()
    content['annotations'][4]['segmentation'] = mask
    dataset = write(content)
    assert problems(dataset) == ([], [])
    (text,), warnings = problems(dict(dataset, pipeline=MASKS))
    assert warnings == []
    assert text.startswith('with_mask is True, ')
    assert text.endswith(': annotations[4]')
    assert problems(dict(dataset, pipeline=[dict(type='Wrap', transforms=MASKS)])) == ([text], [])


def test_missing_masks(write):
    """Dropped annotations, and those of unused classes, need no mask."""
    content = coco_content()
    for i in (2, 3):
        del content['annotations'][i]['segmentation']
    (text,), _ = problems(write(content, pipeline=MASKS))
    assert text.endswith(': annotations[2], annotations[3]')
    content['annotations'][2]['category_id'] = 2
    dataset = write(content, pipeline=MASKS)
    (text,), _ = problems(dict(dataset, metainfo=dict(classes=('cat',))))
    assert text.endswith(': annotations[3]')


def test_polygons_that_the_host_ignores(write):
    """MMDetection drops polygons of fewer than 3 points or with an odd number of coordinates without a message."""
    content = coco_content()
    content['annotations'][1]['segmentation'] = [[1, 1, 5, 5]]
    content['annotations'][2]['segmentation'] = [[1, 1, 5, 1, 5, 5, 1], SQUARE[0]]
    dataset = write(content)
    assert problems(dataset) == ([], [])
    errors, (text,) = problems(dict(dataset, pipeline=MASKS))
    assert errors == []
    assert text.startswith('1 annotations ')
    assert text.endswith(': annotations[1]')
    for entry in content['annotations']:
        entry['segmentation'] = [[1, 1, 5, 1, 5, 5, 1]]
    (text,), warnings = problems(write(content, pipeline=MASKS))
    assert warnings == []
    assert text.startswith('6 annotations ')


def test_crowds_alone_teach_nothing(write):
    content = coco_content()
    for entry in content['annotations']:
        entry['iscrowd'] = 1
    (text,), _ = problems(write(content))
    assert text.startswith('none of the 3 images ')
    content['annotations'][5]['iscrowd'] = 0
    assert problems(write(content)) == ([], [])


def test_types_derived_from_coco(write):
    """A subclass that reads the file as CocoDataset does is checked by its own classes; others are left alone."""
    datasets = pytest.importorskip('mmdet.datasets', reason='runs MMDetection configs')

    class Pets(datasets.CocoDataset):
        METAINFO = dict(classes=('cat', 'dog'))

    class OwnReader(Pets):
        def load_data_list(self):
            return []

    content = coco_content([annotation(i, (0.1, 0.1, 0.5, 0.5)) for i in range(6)])
    for kind, number in ((Pets, 1), (OwnReader, 0)):
        dataset = write(content, type=kind)
        del dataset['metainfo']
        errors, _ = problems(dataset)
        assert len(errors) == number
    dataset = write(coco_content(), type=Pets)
    del dataset['metainfo']
    assert problems(dataset) == ([], [])
    assert host_boxes(dataset)  # MMDetection reads it, too
    content = coco_content()
    content['categories'][1]['name'] = 'cow'
    write(content)
    (text,), _ = problems(dataset)
    assert text.startswith('1 of the 2 classes of METAINFO of Pets ')


def test_needs_of_the_metric(write, tmp_path):
    """It stops after the first epoch; the training itself does without iscrowd."""
    content = coco_content()
    del content['annotations'][2]['iscrowd']
    del content['annotations'][5]['segmentation']
    dataset = write(content)
    assert problems(dataset) == ([], [])
    metric = dict(type='CocoMetric', ann_file=str(tmp_path / 'a.json'), metric=['bbox', 'segm'])
    dataset = dict(dataset, test_mode=True)
    for evaluator in (metric, [dict(type='Other'), metric]):
        errors, warnings = problems(dataset, 'val', val_evaluator=evaluator)
        assert warnings == []
        assert [re.sub('.* (iscrowd|segmentation).*:', r'\1', text) for text in errors] == [
            'iscrowd annotations[2]',
            'segmentation annotations[5]',
        ]
    assert len(problems(dataset, 'val', val_evaluator=dict(metric, metric='bbox'))[0]) == 1
    for evaluator in (dict(metric, ann_file=None), dict(metric, format_only=True)):
        assert problems(dataset, 'val', val_evaluator=evaluator) == ([], [])


def test_image_sizes(write, tmp_path):
    """An error if most images differ; turned by EXIF as the host turns them."""
    content = coco_content()
    dataset = write(content)
    Image.new('RGB', (40, 20)).save(tmp_path / '1.png')
    errors, (text,) = problems(dataset)
    assert errors == []
    assert re.match('1 of the 3 images .* 1.png .*40 x 20.*20 x 10', text)
    Image.new('RGB', (40, 20)).save(tmp_path / '0.png')
    assert len(problems(dataset)[0]) == 1

    content['images'][0].update(file_name='turned.jpg')
    dataset = write(content)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new('RGB', (10, 20)).save(tmp_path / 'turned.jpg', exif=exif)
    assert problems(dataset) == ([], [])
    import mmcv

    assert mmcv.imread(tmp_path / 'turned.jpg').shape == (10, 20, 3)


def test_good_files_say_nothing(write):
    content = coco_content()
    content['annotations'][0]['segmentation'] = dict(size=[10, 20], counts='abc')
    content['annotations'][1]['segmentation'] = dict(size=[10, 20], counts=[100, 50, 50])
    assert problems(write(content, pipeline=MASKS, filter_cfg=dict(filter_empty_gt=True, min_size=8))) == ([], [])
