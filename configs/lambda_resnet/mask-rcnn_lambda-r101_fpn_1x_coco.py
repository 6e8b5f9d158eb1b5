_base_ = './mask-rcnn_lambda-r50_fpn_1x_coco.py'

model = dict(
    backbone=dict(
        depth=101, init_cfg=dict(checkpoint='work_dirs/lambda-resnet101_32xb128-350e_in1k-192px/epoch_350.pth')
    )
)
