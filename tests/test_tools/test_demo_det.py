"""The demo of Mask R-CNN on a lambda network: a few scenes, boxes alone, and overfitting."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mmkron
from support.detection import detection_sample
from support.tools import ROOT, load_tool

pytest.importorskip('mmcv._ext', reason="mmdet's models need mmcv's compiled operators")

CONFIG = next((ROOT / 'configs/lambda_resnet').glob('mask-rcnn_lambda-r*_scenes-128x128.py'))

# The shipped config on scenes of digits, which need no data set.
DIGIT_CONFIG = """
_base_ = {base!r}
root = {root!r}
metainfo = dict(classes=root + '/annotations/classes.txt')  # as make demo-det sets it
data = dict(data_root=root, metainfo=dict(_delete_=True, **metainfo))
train_dataloader = dict(batch_size={batch_size}, num_workers=0, dataset=data)
val_dataloader = dict(num_workers=0, dataset=data)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=root + '/annotations/instances_val.json')
test_evaluator = val_evaluator
"""


def make_config(folder: Path, batch_size: int, *scenes: str) -> Path:
    """Compose scenes of digits and write a config that trains on them."""
    root = folder / 'scenes'
    load_tool('dataset_converters/fashion_scenes').main([str(root), '--source', 'digits', *scenes])
    path = folder / 'digits.py'
    path.write_text(DIGIT_CONFIG.format(base=str(CONFIG), root=str(root), batch_size=batch_size))
    return path


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    import demo

    return demo


def test_demo(tmp_path, demo, capsys):
    """The demo reports the best result of the log, and draws the scenes with the truth next to the predictions."""
    config = make_config(tmp_path, 2, '--train', '4', '--val', '3')
    options = ['train_cfg.max_epochs=1', 'param_scheduler=None', 'model.test_cfg.rcnn.score_thr=0.0']
    demo.main([str(config), '--work-dir', str(tmp_path / 'work'), '--cfg-options', *options])
    lines = capsys.readouterr().out.splitlines()[-5:]
    report = dict(re.split(r' {2,}| (?=mAP|/)', line, maxsplit=1) for line in lines)
    assert list(report) == ['best bbox', 'best segm', 'checkpoint', 'log', 'picture']
    log = Path(report['log']).read_text()
    for kind in ('bbox', 'segm'):
        values = [re.search(rf'coco/{kind}_{key}: ([\d.-]+)', log)[1] for key in ('mAP', 'mAP_50')]
        mean, at_50 = (float(value) for value in values)
        assert report[f'best {kind}'].startswith(f'mAP {mean:.3f}, mAP50 {at_50:.3f} on 3 ')
        assert 0 <= mean <= at_50 <= 1
    mmkron.allow_checkpoint_globals()
    state = torch.load(report['checkpoint'], weights_only=True)
    assert state['meta']['iter'] == 2
    assert list(state['meta']['dataset_meta']['classes']) == list('0123456789')
    assert Image.open(report['picture']).size == (2472, 1980)


def test_enlarge(demo):
    """Boxes and both kinds of masks grow with the image."""
    sample = detection_sample((64, 128), [(10, 20, 60, 50)])
    sample.pred_instances = sample.gt_instances.clone()
    sample.pred_instances.masks = sample.gt_instances.masks.to_tensor(torch.bool, 'cpu')
    image, sample = demo.enlarge(np.zeros((64, 128, 3), np.uint8), sample)
    assert image.shape == (320, 640, 3)
    for instances in (sample.gt_instances, sample.pred_instances):
        assert instances.bboxes.tolist() == [[50, 100, 300, 250]]
    for mask in (sample.gt_instances.masks.masks[0].astype(bool), sample.pred_instances.masks[0].numpy()):
        assert mask.shape == (320, 640)
        assert mask[100:250, 50:300].mean() > 0.99
        assert mask.sum() == pytest.approx(250 * 150, rel=0.02)


def test_boxes_alone(tmp_path, demo, capsys):
    """The demo runs without masks in the network, the data and the metrics."""
    config = make_config(tmp_path, 2, '--train', '2', '--val', '1')
    options = [
        'model.roi_head.mask_head=None',
        'model.roi_head.mask_roi_extractor=None',
        'train_dataloader.dataset.pipeline.1.with_mask=False',
        'val_dataloader.dataset.pipeline.2.with_mask=False',
        'val_evaluator.metric=bbox',
        'default_hooks.checkpoint.save_best=coco/bbox_mAP',
        'train_cfg.max_epochs=1',
        'param_scheduler=None',
    ]
    demo.main([str(config), '--work-dir', str(tmp_path / 'work'), '--cfg-options', *options])
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split('  ')[0] for line in lines] == ['best bbox', 'checkpoint', 'log', 'picture']


@pytest.mark.slow
def test_overfit(tmp_path, demo, capsys):
    """The network overfits to eight scenes."""
    config = make_config(tmp_path, 4, '--train', '8', '--val', '1', '--objects', '1', '2', '--scale', '2.5', '3.5')
    root = str(tmp_path / 'scenes')
    options = [
        f'val_dataloader.dataset.ann_file={root}/annotations/instances_train.json',
        f'val_evaluator.ann_file={root}/annotations/instances_train.json',
        'train_dataloader.dataset.pipeline.3.prob=0.0',
        'max_epochs=80',
        'train_cfg.max_epochs=80',
        'train_cfg.val_interval=20',
        'param_scheduler.0.end=20',
        'param_scheduler.1.end=80',
    ]
    demo.main([str(config), '--work-dir', str(tmp_path / 'work'), '--cfg-options', *options])
    out = capsys.readouterr().out
    for kind in ('bbox', 'segm'):
        assert float(re.search(rf'best {kind}\s+mAP [\d.]+, mAP50 ([\d.]+)', out)[1]) > 0.9
