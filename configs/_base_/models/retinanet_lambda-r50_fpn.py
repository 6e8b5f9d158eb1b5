_base_ = './retinanet_fpn.py'

model = dict(
    backbone=dict(type='mmkron.LambdaResNet', depth=50, skeleton='rs', out_indices=(1, 2, 3)),
    neck=dict(in_channels=[512, 1024, 2048]),
)
