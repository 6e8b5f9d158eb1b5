"""Compare the number of classes of each head with the data, for the shipped configs and one by one."""

import pytest
from mmengine.config import Config, ConfigDict

from mmkron.data_checks import DataError
from mmkron.data_checks.common import used_data
from mmkron.data_checks.num_classes import count_classes, find_heads
from mmkron.engine import runner as launch
from support.data_checks import problems
from support.errors import raises
from support.tools import ROOT, run_training

CONFIGS = sorted(path for path in (ROOT / 'configs').glob('*/*.py') if path.parent.name != '_base_')
SPLITS = ('train', 'val', 'test')


def found(cfg, splits=('train', 'val')):
    """Return the keys of the problems, each once."""
    found = [*problems(cfg, 'num_classes', splits), *problems(cfg, 'losses', splits)]
    assert not any(item.warning for item in found)
    return list(dict.fromkeys(item.where for item in found))


def make(model, classes=3, scope='mmdet', dataset='BaseSegDataset', **others):
    dataset = dict(type=dataset, metainfo=dict(classes=tuple(f'class {i}' for i in range(classes))))
    loader = dict(dataset=dict(type='RepeatDataset', dataset=dataset))
    return ConfigDict(default_scope=scope, model=model, train_dataloader=loader, val_dataloader=loader, **others)


def test_shipped_configs():
    """Each fits its data, and each head that is changed is named."""
    for host in ('mmpretrain', 'mmseg', 'mmdet'):
        pytest.importorskip(host, reason='reads the class names of all hosts')
    for path in CONFIGS:
        cfg = Config.fromfile(path)
        assert found(cfg, SPLITS) == [], path
        assert all(map(count_classes, used_data(cfg, ('train',)))), path
        heads = list(find_heads(cfg.model, 'model'))
        assert heads, path
        for _, head in heads:
            head.num_classes += 1
        assert found(cfg, SPLITS) == [f'{key}.num_classes' for key, _ in heads], path


def test_each_head_is_compared():
    """The roles of a detector: lists of a cascade, nested parts, and those that count something else."""
    model = dict(
        backbone=dict(num_classes=1000),
        rpn_head=dict(type='RPNHead', num_classes=1),
        roi_head=dict(
            bbox_head=[dict(num_classes=3), dict(num_classes=4), dict(num_classes=3)],
            mask_head=dict(num_classes=5),
            semantic_head=dict(type='FusedSemanticHead', num_classes=183),
        ),
        detector=dict(bbox_head=dict(num_classes=2, loss_cls=dict(type='SeesawLoss', num_classes=6))),
        reid=dict(head=dict(num_classes=380)),
    )
    errors = found(make(model))
    assert errors == [
        'model.roi_head.bbox_head.1.num_classes',
        'model.roi_head.mask_head.num_classes',
        'model.detector.bbox_head.num_classes',
        'model.detector.bbox_head.loss_cls.num_classes',
    ]
    model['roi_head']['mask_head']['class_agnostic'] = True
    assert 'model.roi_head.mask_head.num_classes' not in found(make(model))
    assert found(make(dict(bbox_head=dict(num_classes=256, contrastive_cfg=dict(max_text_len=256))))) == []
    edges = [dict(type='FCNHead', num_classes=19), dict(type='STDCHead', num_classes=2)]
    assert found(make(dict(auxiliary_head=edges), 19, 'mmseg')) == []
    assert found(make(dict(language_model=dict(type='BertModel'), bbox_head=dict(num_classes=80)))) == []


def test_message_has_both_numbers_and_where_they_are_set():
    cfg = make(dict(bbox_head=dict(num_classes=1)), classes=2)
    train, val = problems(cfg, 'num_classes')
    assert (train.where, train.source) == ('model.bbox_head.num_classes', 'train_dataloader.dataset.dataset')
    assert val.source == 'val_dataloader.dataset.dataset'
    for part in ('1', '2 classes', 'metainfo.classes'):
        assert part in train.text


def test_panoptic_data_is_not_counted():
    """Its heads count things and stuff."""
    pytest.importorskip('mmdet')
    heads = dict(panoptic_fusion_head=dict(num_things_classes=80), roi_head=dict(bbox_head=dict(num_classes=80)))
    dataset = dict(type='CocoPanopticDataset')
    assert found(ConfigDict(default_scope='mmdet', model=heads, train_dataloader=dict(dataset=dataset))) == []


@pytest.mark.parametrize(
    ('kind', 'scope', 'number'),
    [('LVISV1Dataset', 'mmdet', 1203), ('VOCDataset', 'mmdet', 20), ('mmseg.ADE20KDataset', None, 150)],
)
def test_classes_of_a_dataset_type(kind, scope, number):
    pytest.importorskip('mmdet' if scope else 'mmseg')
    head = dict(num_classes=number)
    cfg = ConfigDict(default_scope=scope, model=dict(bbox_head=head), train_dataloader=dict(dataset=dict(type=kind)))
    assert found(cfg) == []
    cfg.model.bbox_head.num_classes = number - 1
    assert found(cfg) == ['model.bbox_head.num_classes']


def test_unknown_classes_are_skipped():
    for dataset in (dict(type='Unknown'), dict(type='nowhere.Unknown'), dict(), dict(type='BaseSegDataset')):
        cfg = make(dict(decode_head=dict(num_classes=3)))
        cfg.train_dataloader = cfg.val_dataloader = dict(dataset=dataset)
        assert found(cfg) == []
    assert found(ConfigDict()) == []


def test_class_folders_and_lists(tmp_path):
    """A list of a type with published classes may be about some of them."""
    pytest.importorskip('mmpretrain')
    for name in ('cat', 'dog'):
        (tmp_path / name).mkdir()
    dataset = dict(type='CustomDataset', data_root=str(tmp_path))
    model = dict(head=dict(num_classes=2))
    cfg = ConfigDict(default_scope='mmpretrain', model=model, train_dataloader=dict(dataset=dataset))

    def wrong(*numbers):
        for number in numbers:
            cfg.model.head.num_classes = number
            yield bool(found(cfg))

    assert [*wrong(1, 2, 1000)] == [True, False, True]
    (tmp_path / 'list.txt').write_text('a.jpg 0\nb.jpg 3\n')
    for kind in ('CustomDataset', 'ImageNet'):
        cfg.train_dataloader.dataset.update(type=kind, ann_file='list.txt')
        assert [*wrong(3, 4, 1000)] == [True, False, False]  # the list may have no image of some class


def test_data_preprocessor_counts_where_labels_are_mixed():
    cfg = make(dict(head=dict(num_classes=3)), scope='mmpretrain', data_preprocessor=dict(num_classes=1000))
    assert found(cfg) == []
    cfg.model.train_cfg = dict(augments=[dict(type='Mixup', alpha=0.2), dict(type='CutMix', num_classes=5)])
    assert found(cfg) == ['model.train_cfg.augments.1.num_classes', 'data_preprocessor.num_classes']
    cfg.model.train_cfg.augments.pop()
    cfg.data_preprocessor.num_classes = 3
    assert found(cfg) == []


SIGMOID = dict(type='CrossEntropyLoss', use_sigmoid=True)


@pytest.mark.parametrize(
    ('head', 'classes', 'wrong'),
    [
        (dict(num_classes=2, out_channels=1, loss_decode=SIGMOID), 2, []),
        (dict(num_classes=1, loss_decode=SIGMOID), 2, []),
        (dict(num_classes=1, loss_decode=SIGMOID), 1, []),
        (dict(num_classes=1, loss_decode=SIGMOID), 3, ['num_classes']),
        (dict(num_classes=2), 2, []),
        (dict(num_classes=1), 2, ['loss_decode']),
        (dict(num_classes=2, out_channels=1), 2, ['loss_decode']),
        (dict(num_classes=2, out_channels=1, loss_decode=[SIGMOID, dict(type='DiceLoss')]), 2, []),
        (dict(num_classes=1, loss_decode=[dict(type='DiceLoss'), dict(type='CrossEntropyLoss')]), 2, ['loss_decode.1']),
        (dict(num_classes=150, loss_cls=dict(class_weight=[1.0] * 150 + [0.1])), 150, []),
    ],
)
def test_decode_heads_of_one_output(head, classes, wrong):
    for key in ('decode_head', 'auxiliary_head'):
        cfg = make({key: dict(head, type='mmkron.KAOHead')}, classes, 'mmseg')
        assert found(cfg) == [f'model.{key}.{field}' for field in wrong]
    cascade = found(make(dict(decode_head=[dict(head, type='FCNHead')] * 2), classes, 'mmseg'))
    assert sorted(cascade) == sorted(f'model.decode_head.{i}.{field}' for i in range(2) for field in wrong)


def test_classifier_of_one_output():
    head = dict(type='LinearClsHead', num_classes=1)
    assert found(make(dict(head=head), 1, 'mmpretrain')) == ['model.head.loss']
    head['loss'] = dict(type='CrossEntropyLoss')
    assert found(make(dict(head=head), 1, 'mmpretrain')) == ['model.head.loss']
    head['loss'] = SIGMOID
    assert found(make(dict(head=head), 1, 'mmpretrain')) == []
    softmax = dict(num_classes=1, loss_cls=dict(type='CrossEntropyLoss'))  # has the background as an extra class
    assert found(make(dict(bbox_head=softmax), 1, 'mmdet')) == []


def test_training_is_refused_before_anything_is_built(train_args, tmp_path, monkeypatch):
    for host in ('mmpretrain', 'mmseg', 'mmdet'):
        pytest.importorskip(host)
    monkeypatch.setattr(launch, 'build_runner', None)
    for path, key, number in (
        ('kanet/kanet-kv_digits.py', 'model.head.num_classes', 9),
        ('kao/deeplabv2-kao-kv_r18-w16-d8_1xb8-2k_scenes-128x128.py', 'model.decode_head.num_classes', 3),
    ):
        args = train_args(ROOT / 'configs' / path, '--work-dir', tmp_path, '--cfg-options', f'{key}={number}')
        with raises(DataError, key, number):
            run_training(args)


def test_folders_of_events(tmp_path):
    """EventFolder takes the classes of each split from the folders of train, or from the folders of its list."""
    for name in ('train/a', 'train/b', 'val/a', '.frames/c'):
        (tmp_path / name).mkdir(parents=True)
    head = dict(type='LinearClsHead', num_classes=2)
    cfg = make(dict(type='ImageClassifier', head=head), scope='mmpretrain')
    for split in ('train', 'val'):
        dataset = dict(type='mmkron.EventFolder', data_root=str(tmp_path), data_prefix=split)
        cfg[f'{split}_dataloader'] = ConfigDict(dataset=dataset)
    assert found(cfg) == []
    cfg.model.head.num_classes = 11
    (problem,) = problems(cfg, 'num_classes', ('val',))
    assert problem.text.startswith(f'it is 11, but the data has 2 classes: class folders in {tmp_path}/train')
    cfg.val_dataloader.dataset.update(ann_file='list.txt')
    (problem,) = problems(cfg, 'num_classes', ('val',))
    assert problem.text.startswith(f'it is 11, but the data has 1 classes: class folders in {tmp_path}/val')
    cfg.val_dataloader.dataset.metainfo = dict(classes=('a', 'b', 'c'))
    (problem,) = problems(cfg, 'num_classes', ('val',))
    assert problem.text == 'it is 11, but the data has 3 classes: metainfo.classes'
    cfg.val_dataloader.dataset = dict(type='mmkron.EventFolder', data_root=str(tmp_path / 'nowhere'))
    assert found(cfg, ('val',)) == []  # the dataset says what is missing
