_base_ = './mask-rcnn_fpn.py'

model = dict(
    backbone=dict(type='mmkron.LambdaResNet', depth=50, skeleton='rs', out_indices=(0, 1, 2, 3)),
    neck=dict(in_channels=[256, 512, 1024, 2048]),
)
