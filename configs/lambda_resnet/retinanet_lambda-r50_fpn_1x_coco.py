_base_ = [
    '../_base_/models/retinanet_lambda-r50_fpn.py',
    '../_base_/datasets/coco_detection_1333x800.py',
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
            checkpoint='work_dirs/lambda-resnet50_32xb128-350e_in1k-160px/epoch_350.pth',
        ),
    )
)

optim_wrapper = dict(optimizer=dict(lr=0.01))
