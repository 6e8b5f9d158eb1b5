"""The pipelines of configs/qkformer on an image, and the end of their mixup."""

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import HOOKS, TRANSFORMS, DefaultScope

from support.tools import ROOT

FOLDER = ROOT / 'configs/qkformer'


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
