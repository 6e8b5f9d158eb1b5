"""Class folders and lists of labels: labels mean the same in each split, or the start is refused."""

import re
import shutil
from collections import Counter

import pytest
from mmengine.config import ConfigDict

from mmkron.data_checks.class_folders import check_class_folders
from mmkron.engine import runner as launch
from mmkron.utils.errors import LaunchError
from support.errors import raises
from support.tools import CLASSES, run_training

pytest.importorskip('mmpretrain', reason="reads MMPretrain's datasets")
NAMES = ('daisy', 'rose', 'tulip')


def make_folders(root, splits=('train', 'val'), names=NAMES):
    for split in splits:
        for name in names:
            (root / split / name).mkdir(parents=True)
            (root / split / name / '1.JPG').touch()
    return root


def config(root, **changes):
    """Two datasets of class folders; ``changes`` are those of val's."""
    dataset = dict(type='CustomDataset', data_root=str(root))
    return ConfigDict(
        default_scope='mmpretrain',
        train_dataloader=dict(dataset=dict(dataset, data_prefix='train')),
        val_dataloader=dict(dataset={**dataset, 'data_prefix': 'val', **changes}),
    )


def found(cfg, splits=('train', 'val')):
    problems = list(check_class_folders(cfg, splits))
    return [item.text for item in problems if not item.warning], [item.text for item in problems if item.warning]


def labels_of(cfg, split):
    """File -> label, as the host reads it."""
    from mmpretrain.datasets import CustomDataset

    dataset = {key: value for key, value in cfg[f'{split}_dataloader'].dataset.items() if key != 'type'}
    return {item['img_path']: item['gt_label'] for item in CustomDataset(**dataset)}


def test_folders_that_agree(tmp_path):
    cfg = config(make_folders(tmp_path))
    assert found(cfg) == ([], [])
    cfg.val_dataloader.dataset.metainfo = dict(classes=NAMES)
    cfg.train_dataloader.dataset.data_prefix = dict(img_path='train')
    assert found(cfg) == ([], [])
    (tmp_path / 'val/README.txt').touch()  # files are no classes
    assert found(cfg) == ([], [])
    assert found(config('s3://bucket')) == ([], [])


def test_a_class_that_val_lacks_shifts_the_labels(tmp_path):
    cfg = config(make_folders(tmp_path))
    shutil.rmtree(tmp_path / 'val/daisy')
    from mmpretrain.datasets.custom import find_folders

    assert find_folders(str(tmp_path / 'train'))[1]['rose'] == 1
    assert find_folders(str(tmp_path / 'val'))[1]['rose'] == 0  # the reason for the check
    (error,), warnings = found(cfg)
    assert re.match(f'compared with {tmp_path}/train, .* daisy$', error)
    assert warnings == []
    cfg.test_dataloader = cfg.val_dataloader  # val itself is not used then
    assert found(cfg, ('test',)) == ([error], [])
    (tmp_path / 'val/peony').mkdir()
    (error,), (warning,) = found(cfg)
    assert re.match(f'compared with {tmp_path}/train, .* daisy .* peony$', error)
    assert re.match('1 of the 3 class folders .*: peony$', warning)
    assert found(cfg, ('train',)) == ([], [])


@pytest.mark.parametrize('split', ['train', 'val'])
def test_a_hidden_folder_is_no_class(tmp_path, split):
    cfg = config(make_folders(tmp_path))
    (tmp_path / split / '.ipynb_checkpoints').mkdir()
    from mmpretrain.datasets.custom import find_folders

    assert find_folders(str(tmp_path / split))[1]['.ipynb_checkpoints'] == 0  # before all others
    (error,), _ = found(cfg)
    assert re.match('1 hidden folders .*: .ipynb_checkpoints$', error)


def test_an_empty_class_folder(tmp_path):
    cfg = config(make_folders(tmp_path))
    (tmp_path / 'train/rose/1.JPG').rename(tmp_path / 'train/rose/.1.JPG')
    (tmp_path / 'train/tulip/1.JPG').rename(tmp_path / 'train/tulip/1.gif')
    errors, (warning,) = found(cfg)
    assert errors == []
    assert re.match('2 of the 3 class folders .*: rose, tulip$', warning)
    cfg.train_dataloader.dataset.extensions = ['.gif']
    (tmp_path / 'train/rose/deep').mkdir()
    (tmp_path / 'train/rose/deep/1.gif').touch()
    assert re.match('1 of the 3 class folders .*: daisy$', found(cfg)[1][0])


@pytest.mark.parametrize(
    ('classes', 'parts'),
    [
        (('daisy', 'rose'), ('3 class folders', '2 classes in metainfo.classes')),
        (('rose', 'daisy', 'tulip'), ('order rose, daisy, tulip', 'folders: daisy, rose, tulip')),
    ],
)
def test_names_that_differ_from_the_folders(tmp_path, classes, parts):
    (error,), _ = found(config(make_folders(tmp_path), metainfo=dict(classes=classes)))
    assert all(part in error for part in parts)


def test_imagenet_has_a_thousand_folders(tmp_path):
    make_folders(tmp_path)
    cfg = config(tmp_path, type='ImageNet', split='val', data_prefix='')
    errors, (warning,) = found(cfg)  # a subset, which MMPretrain trains rightly under other names
    assert errors == []
    assert re.search('3 class folders, .* 1000 classes in METAINFO of ImageNet', warning)
    cfg = config(tmp_path, type='ImageNet', split='test', data_prefix='')  # has no labels
    assert found(cfg) == ([], [])


def write_list(root, name, lines):
    (root / name).write_text(''.join(f'{line}\n' for line in lines))


def test_lists_of_labels(tmp_path):
    make_folders(tmp_path)
    cfg = config(tmp_path, ann_file='val.txt')
    write_list(tmp_path, 'val.txt', ['daisy/1.JPG 0', 'rose/1.JPG 1', 'tulip/1.JPG 2'])
    assert found(cfg) == ([], [])
    assert Counter(labels_of(cfg, 'val').values()) == Counter(labels_of(cfg, 'train').values())
    write_list(tmp_path, 'val.txt', ['rose/1.JPG 0', 'tulip/1.JPG 1', 'tulip/a b.JPG 1'])
    (error,), _ = found(cfg)
    assert re.match(f'2 folders .* {tmp_path}/train: rose is 1 .* 0 here, tulip is 2 .* 1 here', error)
    cfg.val_dataloader.dataset.metainfo = dict(classes=NAMES)
    write_list(tmp_path, 'val.txt', ['x.JPG 3', 'y.JPG 0', 'z.JPG -1'])
    assert re.match('2 of the 3 labels .* 0 to 2: -1, 3$', found(cfg)[0][0])
    write_list(tmp_path, 'val.txt', ['x.JPG 0', 'y.JPG'])
    assert "'y.JPG'" in found(cfg)[0][0]
    (tmp_path / 'val.txt').write_bytes(b'\xff 0\n')
    assert 'UTF-8' in found(cfg)[0][0]


def test_labels_that_one_list_does_not_have(tmp_path):
    cfg = config(tmp_path, ann_file='val.txt')
    cfg.train_dataloader.dataset.update(ann_file='train.txt', metainfo=dict(classes=NAMES))
    write_list(tmp_path, 'train.txt', ['a.JPG 0', 'b.JPG 2'])
    write_list(tmp_path, 'val.txt', ['c.JPG 0', 'd.JPG 1', 'e.JPG 1'])
    errors, (unused, unseen) = found(cfg)
    assert errors == []
    assert re.match(r'1 of the 3 classes .*: 1 \(rose\)$', unused)
    assert re.match(f'2 images .* {tmp_path}/train.txt: 1$', unseen)


def test_folders_of_lists(tmp_path):
    """The folder next to the file is the class, if no other one has its label."""
    cfg = config(tmp_path, ann_file='val.txt')
    cfg.train_dataloader.dataset.update(ann_file='train.txt', metainfo=dict(classes=NAMES))
    write_list(tmp_path, 'train.txt', ['train/daisy/a.JPG 0', 'train/rose/b.JPG 1', 'train/tulip/c.JPG 2'])
    write_list(tmp_path, 'val.txt', ['val/daisy/a.JPG 0', 'val/tulip/c.JPG 1'])
    (error,), _ = found(cfg)
    assert error.endswith(': tulip is 2 there and 1 here')
    write_list(tmp_path, 'train.txt', ['patient1/a.JPG 0', 'patient2/b.JPG 0', 'patient3/c.JPG 1', 'patient4/c.JPG 2'])
    write_list(tmp_path, 'val.txt', ['patient1/d.JPG 1', 'patient2/e.JPG 0'])
    errors, (warning,) = found(cfg)
    assert errors == []
    assert warning.endswith(': patient1 is 0 there and 1 here')


def test_the_list_that_imagenet_finds_itself(tmp_path):
    make_folders(tmp_path)
    (tmp_path / 'meta').mkdir()
    write_list(tmp_path, 'meta/val.txt', ['rose/1.JPG 0'])
    (error,), _ = found(config(tmp_path, type='ImageNet', split='val', data_prefix=''))
    assert error.endswith('rose is 1 there and 0 here')


def test_training_is_refused_before_anything_is_built(tiny_config, tmp_path, train_args, monkeypatch, capsys):
    """All problems are in one message; warnings are printed."""
    monkeypatch.setattr(launch, 'build_runner', None)
    (tmp_path / 'imagenet/val/.ipynb_checkpoints').mkdir()
    for path in (tmp_path / 'imagenet/val' / CLASSES[1]).iterdir():
        path.unlink()
    args = train_args(tiny_config, '--work-dir', tmp_path / 'work', '--cfg-options', 'model.head.num_classes=3')
    with raises(LaunchError, 'model.head.num_classes', 3) as info:
        run_training(args)
    assert '.ipynb_checkpoints' in str(info.value)
    output = capsys.readouterr().out
    assert len(re.findall(f'1 of the 2 class folders .*: {CLASSES[1]}', output)) == 1
    monkeypatch.setenv('LOCAL_RANK', '1')
    with raises(LaunchError, 'model.head.num_classes', 3):
        run_training(args)
    assert 'no image' not in capsys.readouterr().out
