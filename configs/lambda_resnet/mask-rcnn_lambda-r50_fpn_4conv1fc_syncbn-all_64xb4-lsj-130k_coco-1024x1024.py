_base_ = [
    '../_base_/models/mask-rcnn_lambda-r50_fpn.py',
    '../_base_/datasets/coco_instance_lsj_1024x1024.py',
    '../_base_/schedules/coco_bs256_130k.py',
    '../_base_/default_runtime_det.py',
]

# Trained from scratch: nothing is frozen, and all parts are normalized except the RPN, which does not support it.
norm_cfg = dict(type='SyncBN', eps=1e-3, momentum=0.01, requires_grad=True)
model = dict(
    data_preprocessor=dict(
        # Content lambdas depend on the padding, so test images are padded to the square as well.
        pad_size_divisor=1024,
        batch_augments=[dict(type='BatchFixedSizePad', size=(1024, 1024), pad_mask=True)],
    ),
    backbone=dict(norm_cfg=norm_cfg, norm_eval=False, frozen_stages=-1, init_cfg=None),
    neck=dict(norm_cfg=norm_cfg),
    roi_head=dict(
        bbox_head=dict(type='Shared4Conv1FCBBoxHead', conv_out_channels=256, norm_cfg=norm_cfg),
        mask_head=dict(norm_cfg=norm_cfg),
    ),
)

default_hooks = dict(
    logger=dict(log_metric_by_epoch=False),
    checkpoint=dict(by_epoch=False, interval=10000, save_best='coco/segm_mAP'),
)
log_processor = dict(by_epoch=False)
