"""Class folders, class names and lists of labels: labels mean the same in each split, or the start is refused."""

import re
import shutil

import pytest
from mmengine.config import ConfigDict

from mmkron import data_checks
from mmkron.data_checks import DataError
from mmkron.engine import runner as launch
from support.data_checks import texts
from support.errors import raises
from support.tools import run_training

pytest.importorskip('mmpretrain', reason="reads MMPretrain's datasets")
NAMES = ('daisy', 'rose', 'tulip')


@pytest.fixture
def root(tmp_path):
    for split in ('train', 'val'):
        for name in NAMES:
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / '1.JPG').touch()
    return tmp_path


def config(root, **changes):
    """Two datasets of class folders; ``changes`` are those of val's."""
    dataset = dict(type='CustomDataset', data_root=str(root))
    return ConfigDict(
        default_scope='mmpretrain',
        train_dataloader=dict(dataset=dict(dataset, data_prefix='train')),
        val_dataloader=dict(dataset={**dataset, 'data_prefix': 'val', **changes}),
    )


def folder_faults(cfg, splits=('train', 'val')):
    errors, warnings = texts(cfg, 'class folders', splits)
    assert warnings == []
    return errors


def list_faults(cfg):
    errors, warnings = texts(cfg, 'label list')
    assert warnings == []
    return errors


def test_folders_that_agree(root):
    cfg = config(root)
    assert folder_faults(cfg) == []
    cfg.val_dataloader.dataset.metainfo = dict(classes=NAMES)
    cfg.train_dataloader.dataset.data_prefix = dict(img_path='train')
    assert folder_faults(cfg) == []
    (root / 'val/README.txt').touch()  # files are not classes
    assert folder_faults(cfg) == []
    assert folder_faults(config('s3://bucket')) == []
    assert folder_faults(config(root, type='ImageNet', split='test', data_prefix='')) == []  # has no labels


def test_a_class_that_val_does_not_have_shifts_the_labels(root):
    cfg = config(root)
    shutil.rmtree(root / 'val/daisy')
    from mmpretrain.datasets.custom import find_folders

    assert find_folders(str(root / 'train'))[1]['rose'] == 1
    assert find_folders(str(root / 'val'))[1]['rose'] == 0  # the reason for the check
    (error,) = folder_faults(cfg)
    assert f'{root}/train: daisy;' in error
    cfg.test_dataloader = cfg.val_dataloader  # val itself is not used then
    assert folder_faults(cfg, ('test',)) == [error]
    (root / 'val/peony').mkdir()
    assert re.search('daisy; .*: peony$', folder_faults(cfg)[0])
    assert folder_faults(cfg, ('train',)) == []


@pytest.mark.parametrize('split', ['train', 'val'])
def test_a_hidden_folder_is_not_a_class(root, split):
    (root / split / '.ipynb_checkpoints').mkdir()
    from mmpretrain.datasets.custom import find_folders

    assert find_folders(str(root / split))[1]['.ipynb_checkpoints'] == 0  # before all others
    (error,) = folder_faults(config(root))
    assert error.endswith(': .ipynb_checkpoints')


def test_names_in_another_order_than_the_folders(root):
    (error,) = folder_faults(config(root, metainfo=dict(classes=('rose', 'daisy', 'tulip'))))
    assert 'order rose, daisy, tulip' in error
    assert 'folders: daisy, rose, tulip' in error


def test_lists_of_labels(root):
    cfg = config(root, ann_file='val.txt')
    for lines, classes, part in (
        ('daisy/1.JPG 0\ntulip/a b.JPG 2\n', None, ''),
        ('daisy/1.JPG 0\ntulip/a b.JPG -1\n', None, '1 of the 2 labels are not in 0 to 0: -1'),
        ('x.JPG 2\n', NAMES, ''),
        ('x.JPG 3\ny.JPG 0\nz.JPG -1\n', NAMES, '2 of the 3 labels are not in 0 to 2: -1, 3'),
        ('x.JPG 0\ny.JPG\n', NAMES, "'y.JPG'"),
        ('', NAMES, 'empty'),
    ):
        (root / 'val.txt').write_text(lines)
        cfg.val_dataloader.dataset.metainfo = dict(classes=classes)
        errors = list_faults(cfg)
        assert len(errors) == bool(part)
        assert all(part in error for error in errors)
    (root / 'val.txt').write_bytes(b'\xff 0\n')
    assert len(list_faults(cfg)) == 1


def test_the_list_that_imagenet_finds_itself(root):
    """Its published classes may be read in part."""
    (root / 'meta').mkdir()
    (root / 'meta/val.txt').write_text('rose/1.JPG -1\n')
    assert len(list_faults(config(root, type='ImageNet', split='val', data_prefix=''))) == 1
    (root / 'meta/val.txt').write_text('rose/1.JPG 1\n')
    assert list_faults(config(root, type='ImageNet', split='val', data_prefix='')) == []


def test_one_name_without_its_comma(root):
    """A string is refused unless it is a file of names; MMEngine would take its characters for the classes."""
    cfg = config(root, metainfo=dict(classes='rose'))
    with raises(DataError, 'val_dataloader.dataset.metainfo.classes', 'rose'):
        data_checks.run(cfg, 'c.py', ('train', 'val'))
    (root / 'names.txt').write_text('\n'.join(NAMES))
    for names in (str(root / 'names.txt'), 's3://bucket/names.txt'):
        cfg.val_dataloader.dataset.metainfo = dict(classes=names)
        assert texts(cfg, 'class names') == ([], [])


def test_training_is_refused_before_anything_is_built(tiny_config, tmp_path, train_args, monkeypatch):
    """All problems are in one message."""
    monkeypatch.setattr(launch, 'build_runner', None)
    (tmp_path / 'imagenet/val/.ipynb_checkpoints').mkdir()
    args = train_args(tiny_config, '--work-dir', tmp_path / 'work', '--cfg-options', 'model.head.num_classes=3')
    with raises(DataError, 'model.head.num_classes', 3) as info:
        run_training(args)
    assert '.ipynb_checkpoints' in str(info.value)
