_base_ = [
    '../_base_/models/mask-rcnn_qkformer-hst-10-384_fpn.py',
    '../_base_/datasets/coco_instance_1333x800.py',
    '../_base_/schedules/coco_1x.py',
    '../_base_/default_runtime_det.py',
]

model = dict(
    backbone=dict(
        frozen_stages=1,
        norm_eval=True,
        init_cfg=dict(
            type='Pretrained',
            prefix='backbone.',
            checkpoint='work_dirs/qkformer-hst-10-384_8xb32_in1k/epoch_200.pth',
        ),
    )
)

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)
