"""QKFormer in the hosts' segmentors and detectors: results do not depend on earlier calls."""

import copy

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope

from support.tools import ROOT

SCENES = ROOT / 'configs/qkformer/fpn_qkformer-small_1xb8-2k_scenes-128x128.py'


@pytest.fixture(scope='module')
def segmentor():
    cfg = Config.fromfile(SCENES)
    with DefaultScope.overwrite_default_scope('mmseg'):
        torch.manual_seed(0)
        model = MODELS.build(cfg.model)
    return settle(model, torch.randn(4, 3, 96, 96))


def settle(model, x):
    """Make neurons fire at every depth; return the model in float64 and evaluation mode."""
    model.double().train()
    with torch.no_grad():
        for part in model.backbone.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.weight.uniform_(1, 3)
                part.bias.uniform_(0, 1)
        for _ in range(3):
            model.extract_feat(x.double())
    model.eval()
    with torch.no_grad():
        assert all(level.any() for level in model.backbone(x.double()))
    return model


def images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def test_slide_inference(segmentor):
    """The result is the mean over windows that an unused copy of the model sees one by one."""
    model = copy.deepcopy(segmentor)
    model.test_cfg = Config(dict(mode='slide', crop_size=(64, 64), stride=(32, 32)))
    x = images(2, 3, 64, 96)
    meta = [dict(img_shape=(64, 96))] * 2
    ours = model.slide_inference(x, meta)
    first, second = (copy.deepcopy(segmentor).encode_decode(x[..., a : a + 64], meta) for a in (0, 32))
    expected = torch.cat((first[..., :32], (first[..., 32:] + second[..., :32]) / 2, second[..., 32:]), 3)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(model.slide_inference(x, meta), ours, rtol=0, atol=0)


def test_inference_api():
    """With mmseg's API, an image gives the same result whatever comes in between."""
    from mmseg.apis import inference_model, init_model

    with DefaultScope.overwrite_default_scope('mmseg'):
        model = init_model(str(SCENES), device='cpu')
        settle(model, torch.randn(4, 3, 96, 96)).float()
        first, other = np.random.default_rng(0).integers(0, 256, (2, 128, 128, 3), dtype=np.uint8)
        expected = inference_model(model, first).seg_logits.data
        inference_model(model, [other, first])
        inference_model(model, other[:64, :96])
        torch.testing.assert_close(inference_model(model, first).seg_logits.data, expected, rtol=0, atol=0)


@torch.no_grad()
def test_detector():
    """Levels have the strides of the anchors, for sizes that no stride divides and after another batch."""
    cfg = Config.fromfile(ROOT / 'configs/qkformer/mask-rcnn_qkformer-hst-10-384_fpn_1x_coco.py')
    cfg.model.backbone.pop('init_cfg')
    with DefaultScope.overwrite_default_scope('mmdet'):
        torch.manual_seed(0)
        model = revert_sync_batchnorm(MODELS.build(cfg.model))
    settle(model, torch.randn(2, 3, 64, 64))
    x = images(1, 3, 72, 100)
    levels = model.extract_feat(x)
    strides = [stride for stride, _ in model.rpn_head.prior_generator.strides]
    assert strides == [4, 8, 16, 32, 64]
    assert [tuple(level.shape[2:]) for level in levels] == [(-(-72 // s), -(-100 // s)) for s in strides]
    model.extract_feat(images(3, 3, 48, 64))
    for again, level in zip(model.extract_feat(x), levels):
        assert torch.equal(again, level)
