"""The shipped segmentors: any image size, whole and sliding inference, learning a few scenes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from support.tools import ROOT

SMALL = 'configs/kao/deeplabv2{}_r18-w16-d8_1xb8-2k_scenes-128x128.py'
HEADS = ['', '-dense', '-pooled', '-kao-kv', '-kao-qkv']
CONFIGS = [SMALL.format(head) for head in HEADS] + ['configs/kanet/fpn_kanet-kv_4xb2-80k_cityscapes-512x1024.py']
LARGE = 'configs/kao/deeplabv2-kao-kv_r101-d8_1xb8-25k_voc12aug-321x321.py'


def build(path, **test_cfg):
    cfg = Config.fromfile(ROOT / path)
    cfg.model.backbone.pop('init_cfg', None)
    cfg.model.test_cfg.update(test_cfg)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = revert_sync_batchnorm(MODELS.build(cfg.model))
    for name, parameter in model.decode_head.named_parameters():
        if 'value_map' in name or 'scale' in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.eval()
    return model


def image(size, seed=0):
    return torch.randint(0, 256, (3, *size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def predict(model, pixels):
    """Predict as tools/test.py does: preprocess, infer, resize to the original size."""
    size = tuple(pixels.shape[1:])
    meta = dict(img_shape=size, ori_shape=size, pad_shape=size, padding_size=[0] * 4)
    with torch.no_grad():
        (result,) = model.test_step(dict(inputs=[pixels], data_samples=[SegDataSample(metainfo=meta)]))
    return result


@pytest.mark.parametrize('path', [*CONFIGS, LARGE], ids=lambda path: path.rsplit('/', 1)[-1].split('_')[0])
def test_whole_inference_at_odd_sizes(path):
    """The result has the original size and the classes of the upsampled logits."""
    model, size = build(path), (65, 97)
    pixels = image(size)
    result = predict(model, pixels)
    x = model.data_preprocessor(dict(inputs=[pixels]))['inputs']
    with torch.no_grad():
        logits = F.interpolate(model(x), size=size, mode='bilinear', align_corners=False)[0]
    assert result.pred_sem_seg.shape == size
    torch.testing.assert_close(result.seg_logits.data, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(result.pred_sem_seg.data[0], result.seg_logits.data.argmax(0))


@pytest.mark.parametrize('path', [CONFIGS[0], CONFIGS[-2], CONFIGS[-1]])
def test_slide_inference_at_odd_sizes(path):
    """Each pixel gets the mean of the windows that contain it; windows at the border are moved inward."""
    size, window, stride = (65, 157), (64, 96), (40, 56)
    model = build(path, mode='slide', crop_size=window, stride=stride)
    pixels = image(size)
    result = predict(model, pixels)
    assert result.pred_sem_seg.shape == size
    x = model.data_preprocessor(dict(inputs=[pixels]))['inputs']
    total, count = torch.zeros(model.num_classes, *size), torch.zeros(size)

    def starts(length, side, step):
        return sorted({min(i, max(length - side, 0)) for i in range(0, max(length - side, 0) + step, step)})

    with torch.no_grad():
        for top in starts(size[0], window[0], stride[0]):
            for left in starts(size[1], window[1], stride[1]):
                part = (..., slice(top, top + window[0]), slice(left, left + window[1]))
                crop = x[part]
                logits = F.interpolate(model(crop), size=crop.shape[2:], mode='bilinear', align_corners=False)
                total[part] += logits[0]
                count[part[1:]] += 1
    torch.testing.assert_close(result.seg_logits.data, total / count, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('head', ['', '-kao-qkv'])
def test_learns_scenes_by_heart(head):
    """The model learns four scenes of colored squares whose class is their pattern."""
    model = build(SMALL.format(head))
    rng = np.random.default_rng(0)
    images = rng.integers(60, 90, (4, 3, 64, 64)).astype(np.uint8)
    labels = np.zeros((4, 1, 64, 64), np.int64)
    for index, (y, x) in enumerate(((4, 8), (30, 30), (8, 34), (28, 2))):
        part = (slice(y, y + 28), slice(x, x + 28))
        images[(index, slice(None), *part)] = rng.integers(120, 250, (3, 1, 1))
        images[(index, slice(None), *part)][:, :: 2 + index % 2, :] //= 2
        labels[(index, 0, *part)] = index + 1
    samples = [
        SegDataSample(gt_sem_seg=PixelData(data=torch.from_numpy(each)), metainfo=dict(img_shape=(64, 64)))
        for each in labels
    ]
    model.data_preprocessor.size = (64, 64)
    data = model.data_preprocessor(dict(inputs=list(torch.from_numpy(images)), data_samples=samples), training=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(60):
        loss = model(**data, mode='loss')['decode.loss_ce']
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    logits = F.interpolate(model(data['inputs']), size=(64, 64), mode='bilinear').argmax(1).numpy()
    ious = [((logits == c) & (labels[:, 0] == c)).sum() / ((logits == c) | (labels[:, 0] == c)).sum() for c in range(5)]
    assert min(ious) > 0.75, ious
