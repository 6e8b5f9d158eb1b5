"""The paper's VOC configs from files on disk to metrics, on scenes of digits in VOC's layout; faulty data."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from mmkron.utils.errors import LaunchError
from support.errors import raises
from support.tools import ROOT, load_tool, run_training

CONFIG = 'configs/kao/deeplabv2{}_r101-d8_1xb8-25k_voc12aug-321x321.py'
HEADS = ['', '-pooled', '-kao-qkv']


@pytest.fixture(scope='module')
def scenes(tmp_path_factory):
    """Ten scenes to train on, the last four of them as the augmentation, and three for validation."""
    root = tmp_path_factory.mktemp('voc') / 'VOC2012'
    sizes = ['--size', '64', '96', '--objects', '1', '3', '--scale', '1', '1.5']
    arguments = ['--source', 'digits', '--train', '10', '--val', '3', *sizes]
    load_tool('dataset_converters/fashion_scenes').main([str(root), *arguments])
    shutil.copytree(root / 'SegmentationClass', root / 'SegmentationClassAug')
    lists = root / 'ImageSets/Segmentation'
    names = (lists / 'train.txt').read_text().split()
    (lists / 'train.txt').write_text('\n'.join(names[:6]) + '\n')
    (lists / 'aug.txt').write_text('\n'.join(names[6:]) + '\n')
    return root


@pytest.fixture
def voc(scenes, tmp_path):
    return shutil.copytree(scenes, tmp_path / 'VOC2012')


def train(train_args, voc, head='-kao-kv', **more):
    """The shipped config with a narrow backbone, for two iterations."""
    options = {
        'model.backbone.depth': 18,
        'model.backbone.base_channels': 8,
        'model.backbone.stem_channels': 8,
        'model.backbone.init_cfg': None,
        'model.decode_head.in_channels': 64,
        'train_dataloader.dataset.datasets.0.data_root': voc,
        'train_dataloader.dataset.datasets.1.data_root': voc,
        'val_dataloader.dataset.data_root': voc,
        'train_cfg.max_iters': 2,
        'train_cfg.val_interval': 2,
        'train_dataloader.batch_size': 2,
        'train_dataloader.num_workers': 0,
        'val_dataloader.num_workers': 0,
        'default_hooks.logger.interval': 1,
        'randomness.seed': 0,
        **more,
    }
    if head:
        options['model.decode_head.channels'] = 16
    pairs = [f'{key}={value}' for key, value in options.items()]
    config = ROOT / CONFIG.format(head)
    return run_training(train_args(config, '--work-dir', voc.parent / 'work', '--cfg-options', *pairs))


@pytest.mark.parametrize('head', HEADS)
def test_from_files_to_metrics(head, train_args, voc):
    runner = train(train_args, voc, head)
    assert len(runner.train_dataloader.dataset) == 10
    assert len(runner.val_dataloader.dataset) == 3
    scalars = runner.message_hub.log_scalars
    for name in ('val/mIoU', 'val/mAcc', 'val/aAcc'):
        assert 0 <= scalars[name].current() <= 100
    assert all(np.isfinite(value) for value in scalars['train/loss'].data[0])
    groups = runner.optim_wrapper.optimizer.param_groups
    rates = {group['lr'] for group in groups}
    assert {round(rate / min(rates), 6) for rate in rates} == {1, 10}
    assert {group['weight_decay'] for group in groups} == {5e-4}
    runner.model.backbone.train()
    for name, module in runner.model.backbone.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert not module.training, name
            assert not module.weight.requires_grad, name


def test_label_outside_the_classes(voc, capsys):
    """The tool names the file; the loss would look up what does not exist."""
    for folder in ('SegmentationClass', 'SegmentationClassAug'):
        for path in (voc / folder).glob('*.png'):
            labels = np.array(Image.open(path))
            labels[labels == 0] = 30
            Image.fromarray(labels).save(path)
    roots = [f'train_dataloader.dataset.datasets.{i}' for i in range(2)] + ['val_dataloader.dataset']
    options = [f'{key}.data_root={voc}' for key in roots]
    with pytest.raises(SystemExit):
        load_tool('misc/check_data').main([str(ROOT / CONFIG.format('-kao-kv')), '--cfg-options', *options])
    assert f': 30 in 4 ({voc}/SegmentationClassAug/' in capsys.readouterr().out


def test_incomplete_folder(train_args, voc):
    """One message with all that is missing, before anything is built."""
    (voc / 'SegmentationClassAug/000009.png').unlink()
    (voc / 'JPEGImages/000011.jpg').unlink()
    with raises(LaunchError, f'{voc}/SegmentationClassAug/000009.png', f'{voc}/JPEGImages/000011.jpg'):
        train(train_args, voc)


def test_channels_that_do_not_fit(train_args, voc):
    with raises(ValueError, 'in_channels', 2048):
        train(train_args, voc, **{'model.decode_head.in_channels': 2048})
