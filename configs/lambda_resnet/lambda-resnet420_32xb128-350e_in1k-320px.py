_base_ = [
    '../_base_/models/lambda_resnet_rs.py',
    '../_base_/datasets/imagenet_bs128_randaug15_320.py',
    '../_base_/schedules/imagenet_bs4096_350e_coslr.py',
    '../_base_/default_runtime_cls.py',
]

model = dict(backbone=dict(depth=420, drop_path_rate=0.2), neck=dict(drop_rate=0.3))
