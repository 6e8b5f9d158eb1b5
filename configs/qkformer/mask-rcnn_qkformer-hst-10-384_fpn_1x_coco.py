_base_ = [
    '../_base_/models/mask-rcnn_qkformer-hst-10-384_fpn.py',
    '../_base_/datasets/coco_instance_1333x800.py',
    '../_base_/schedules/coco_1x_adamw.py',
    '../_base_/default_runtime_det.py',
]

checkpoint = 'work_dirs/qkformer-hst-10-384_8xb32_in1k/epoch_200.pth'
model = dict(backbone=dict(init_cfg=dict(checkpoint=checkpoint)))
