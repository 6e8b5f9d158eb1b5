"""From COCO files on disk to mAP: Mask R-CNN with parts of mmkron, on scenes of digits."""

from pathlib import Path

import mmdet
import numpy as np
import pytest
import torch

from mmkron.layers import KroneckerAttention2d
from mmkron.models import KroneckerNeck
from support.tools import load_tool, run_training

pytest.importorskip('mmcv._ext', reason="mmdet's models need mmcv's compiled operators")

CONFIG = """
_base_ = '{base}'

metainfo = dict(classes=tuple('0123456789'))
data = dict(data_root={root!r}, metainfo=metainfo, data_prefix=dict(img='JPEGImages/'))
resize = dict(type='Resize', scale=(96, 96), keep_ratio=True)
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True, with_mask=True), resize,
    dict(type='RandomFlip', prob=0.5), dict(type='PackDetInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'), resize, dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))]
train_dataloader = dict(batch_size=2, num_workers=0, dataset=dict(
    data, ann_file='annotations/instances_train.json', pipeline=train_pipeline))
val_dataloader = dict(num_workers=0, dataset=dict(
    data, ann_file='annotations/instances_val.json', pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file={root!r} + '/annotations/instances_val.json')
test_evaluator = val_evaluator
attention = dict(type='mmkron.KroneckerAttention2d', mode='kv', residual=True)
model = dict(
    backbone=dict(base_channels=8, stem_channels=8, init_cfg=None, frozen_stages=-1, norm_eval=False,
                  plugins=[dict(cfg=attention, stages=(False, False, True, True), position='after_conv2')]),
    neck=[
        dict(type='FPN', in_channels=[32, 64, 128, 256], out_channels=16, num_outs=5),
        dict(type='mmkron.KroneckerNeck', in_channels=[16] * 5, mode='qkv')],
    rpn_head=dict(in_channels=16, feat_channels=16),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16), mask_roi_extractor=dict(out_channels=16),
        bbox_head=dict(in_channels=16, fc_out_channels=32, num_classes=10),
        mask_head=dict(in_channels=16, conv_out_channels=16, num_classes=10)),
    # A network that has seen two batches is sure of nothing; without a threshold it still predicts.
    test_cfg=dict(rcnn=dict(score_thr=0.0, max_per_img=20)))
train_cfg = dict(max_epochs=1)
randomness = dict(seed=0)
"""


def test_from_files_to_map(train_args, tmp_path):
    root = tmp_path / 'scenes'
    arguments = ['--source', 'digits', '--train', '4', '--val', '2', '--size', '65', '96', '--scale', '1', '1.5']
    load_tool('dataset_converters/fashion_scenes').main([str(root), *arguments])
    (base,) = (Path(mmdet.__file__).parent / '.mim/configs').rglob('mask-rcnn_r50_fpn_1x_coco.py')
    (tmp_path / 'mixed.py').write_text(CONFIG.format(base=base, root=str(root)))
    runner = run_training(train_args(tmp_path / 'mixed.py', '--work-dir', tmp_path / 'work'))
    assert len(runner.train_dataloader.dataset) == 4
    for kind in ('bbox', 'segm'):
        assert 0 <= runner.message_hub.get_scalar(f'val/coco/{kind}_mAP').current() <= 1
    losses = runner.message_hub.get_scalar('train/loss_mask').data[0]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    # One epoch changed the parameters that are initialized to zero.
    parts = [m for m in runner.model.modules() if isinstance(m, (KroneckerNeck, KroneckerAttention2d))]
    scales = torch.stack([scale for m in parts if isinstance(m, KroneckerNeck) for scale in m.scales.values()])
    assert (scales != 0).sum() >= 3  # boxes of 28 to 42 pixels use the first levels only
    assert any(m.residual and m.value_map.weight.any() for m in parts if isinstance(m, KroneckerAttention2d))
