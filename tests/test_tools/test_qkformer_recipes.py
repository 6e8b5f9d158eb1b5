"""The recipes of configs/qkformer in numbers: learning rates over the epochs, batches, mixup, image sizes."""

import math
import re

import numpy as np
import pytest
import torch
from mmengine import optim
from mmengine.config import Config
from mmengine.registry import HOOKS, TRANSFORMS, DefaultScope

from support.tools import ROOT

FOLDER = ROOT / 'configs/qkformer'
IN1K = sorted(FOLDER.glob('*_in1k*.py'))


def rates(cfg, length):
    """The learning rate of every step, for epochs of ``length`` steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=cfg.optim_wrapper.optimizer.lr)
    configs = cfg.param_scheduler if isinstance(cfg.param_scheduler, list) else [cfg.param_scheduler]
    schedulers = []
    for config in configs:
        kind = getattr(optim, config.type)
        kwargs = {k: v for k, v in config.items() if k not in ('type', 'convert_to_iter_based')}
        if config.get('convert_to_iter_based'):
            schedulers.append(kind.build_iter_from_epoch(optimizer=optimizer, epoch_length=length, **kwargs))
        else:
            schedulers.append(kind(optimizer=optimizer, **kwargs))
    values = []
    for step in range(length * cfg.train_cfg.max_epochs):
        values.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            if not scheduler.by_epoch or (step + 1) % length == 0:
                scheduler.step()
    return values


@pytest.mark.parametrize('path', IN1K, ids=lambda path: path.stem)
def test_imagenet(path):
    cfg = Config.fromfile(path)
    batch = 8 * cfg.train_dataloader.batch_size * cfg.optim_wrapper.accumulative_counts
    assert batch == (576 if '8xb24' in path.name else 512)
    assert re.search(rf'_8xb{cfg.train_dataloader.batch_size}(-fsdp)?_', path.name)
    # What MMEngine takes for the batch: without the accumulated steps.
    assert cfg.auto_scale_lr.base_batch_size == 8 * cfg.train_dataloader.batch_size
    assert cfg.optim_wrapper.optimizer.weight_decay == 0.05
    assert cfg.optim_wrapper.paramwise_cfg == dict(norm_decay_mult=0.0, bias_decay_mult=0.0)
    assert cfg.randomness.seed == 0
    size = int(match[1]) if (match := re.search(r'-(\d+)px', path.stem)) else 224
    train, test = cfg.train_dataloader.dataset.pipeline, cfg.test_dataloader.dataset.pipeline
    assert (train[1].scale, test[1].scale, test[2].crop_size) == (size, 256 if size == 224 else size, size)
    assert (train[3].magnitude_level, train[3].magnitude_std, train[3].num_policies) == (9, 0.5, 2)
    lr = rates(cfg, length=10)
    if size == 224:
        peak = 6e-4 * batch / 256
        assert lr[0] == pytest.approx(1e-4 * peak)
        assert max(lr) == pytest.approx(peak)
        assert 48 <= lr.index(max(lr)) <= 51
        assert lr[-1] == pytest.approx(1e-6, rel=0.05)
        assert lr[1025] == pytest.approx(peak / 2, rel=0.01)
        return
    assert cfg.load_from == 'work_dirs/qkformer-hst-10-768_8xb24_in1k/epoch_200.pth'
    assert (FOLDER / 'qkformer-hst-10-768_8xb24_in1k.py').is_file()
    # What the released log of 384 fits: a cosine over 210 epochs, five of them warm-up.
    for epoch in range(9):
        logged = 5e-7 + (1.2e-3 - 5e-7) * (1 + math.cos(math.pi * (196 + epoch) / 205)) / 2
        assert lr[10 * epoch] == pytest.approx(logged, rel=0.03)


@pytest.mark.parametrize('classes', [10, 100])
def test_cifar(classes):
    cfg = Config.fromfile(FOLDER / f'qkformer_1xb64_cifar{classes}.py')
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        assert (loader.dataset.type, loader.dataset.data_root) == (f'CIFAR{classes}', f'data/cifar{classes}')
        assert loader.batch_size == 64
    assert cfg.data_preprocessor.num_classes == cfg.model.head.num_classes == classes
    assert cfg.optim_wrapper.optimizer.weight_decay == 0.06
    lr = rates(cfg, length=1)
    assert len(lr) == 410
    assert lr[0] == pytest.approx(1e-5)
    assert lr[20] == max(lr) == pytest.approx(1e-3)
    assert lr[210] == pytest.approx((1e-3 + 1e-5) / 2, rel=0.01)
    assert all(value == pytest.approx(1e-5, rel=0.02) for value in lr[399:])


def test_mixup_ends():
    """After 200 epochs, by the host's hook."""
    cfg = Config.fromfile(FOLDER / 'qkformer_1xb64_cifar10.py')
    assert cfg.model.train_cfg.augments == dict(type='Mixup', alpha=0.5)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        hook = HOOKS.build(cfg.custom_hooks[0])
    assert hook.schedule == {201: dict(batch_augments=None)}


@pytest.mark.parametrize('name', ['qkformer-hst-10-384_8xb32_in1k', 'qkformer_1xb64_cifar10'])
def test_pipelines_run(name):
    """On an image that has no need to be resized or cut, the test pipeline changes nothing."""
    cfg = Config.fromfile(FOLDER / f'{name}.py')
    size = 256 if 'in1k' in name else 32
    image = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    crop = 224 if 'in1k' in name else 32
    border = (size - crop) // 2
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        for pipeline in (cfg.train_pipeline, cfg.test_pipeline):
            steps = [TRANSFORMS.build(step) for step in pipeline if 'LoadImage' not in step.type]
            for seed in range(5):
                np.random.seed(seed)
                results = dict(img=image.copy(), img_shape=(size, size), gt_label=1)
                for step in steps:
                    results = step(results)
                assert results['inputs'].shape == (3, crop, crop)
    inside = image[border : border + crop, border : border + crop].transpose(2, 0, 1)
    assert np.array_equal(results['inputs'].numpy(), inside)
