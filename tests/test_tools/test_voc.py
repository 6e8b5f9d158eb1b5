"""The paper's VOC configs, from files on disk to metrics and with faulty data, on scenes of digits in VOC's layout."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from mmkron.data_checks import DataError
from support.errors import raises
from support.tools import ROOT, load_tool, run_training

CONFIG = 'configs/kao/deeplabv2{}_r101-d8_1xb8-25k_voc12aug-321x321.py'
HEADS = ['', '-pooled', '-kao-qkv']


@pytest.fixture(scope='module')
def scenes(tmp_path_factory):
    """Compose ten scenes for training, the last four as the augmented set, and three for validation."""
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
    """Train the shipped config with a narrow backbone for two iterations."""
    sets = [f'train_dataloader.dataset.datasets.{i}' for i in (0, 1)] + ['val_dataloader.dataset']
    options = {
        **{f'{name}.data_root': voc for name in sets},
        **{f'model.backbone.{name}': 8 for name in ('base_channels', 'stem_channels')},
        **{f'{split}_dataloader.num_workers': 0 for split in ('train', 'val')},
        **{f'train_cfg.{name}': 2 for name in ('max_iters', 'val_interval')},
        **{'model.backbone.depth': 18, 'model.backbone.init_cfg': None, 'model.decode_head.in_channels': 64},
        **{'train_dataloader.batch_size': 2, 'default_hooks.logger.interval': 1, 'randomness.seed': 0},
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
    rates = {group['lr'] for group in runner.optim_wrapper.optimizer.param_groups}
    assert {round(rate / min(rates), 6) for rate in rates} == {1, 10}
    runner.model.backbone.train()
    for name, module in runner.model.backbone.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert not module.training, name
            assert not module.weight.requires_grad, name


def test_errors(train_args, voc):
    """Missing files and labels outside of the classes are named before anything is built."""
    with raises(ValueError, 'in_channels', 2048):
        train(train_args, voc, **{'model.decode_head.in_channels': 2048})
    missing = voc / 'SegmentationClassAug/000009.png', voc / 'JPEGImages/000011.jpg'
    contents = [path.read_bytes() for path in missing]
    for path in missing:
        path.unlink()
    with raises(DataError, *map(str, missing)):
        train(train_args, voc)
    for path, content in zip(missing, contents):
        path.write_bytes(content)
    for path in (voc / 'SegmentationClassAug').glob('*.png'):
        labels = np.array(Image.open(path))
        labels[labels == 0] = 30
        Image.fromarray(labels).save(path)
    with raises(DataError, f'{voc}/SegmentationClassAug', 30):
        train(train_args, voc)
