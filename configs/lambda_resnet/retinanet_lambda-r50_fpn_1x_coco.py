_base_ = [
    '../_base_/models/retinanet_lambda-r50_fpn.py',
    '../_base_/datasets/coco_detection_1333x800.py',
    '../_base_/schedules/coco_1x.py',
    '../_base_/default_runtime_det.py',
]

checkpoint = 'work_dirs/lambda-resnet50_32xb128-350e_in1k-160px/epoch_350.pth'
model = dict(backbone=dict(init_cfg=dict(checkpoint=checkpoint)))

optim_wrapper = dict(optimizer=dict(lr=0.01))
