_base_ = [
    '../_base_/models/lambda_resnet_rs.py',
    '../_base_/datasets/imagenet_bs128_randaug15_256.py',
    '../_base_/schedules/imagenet_bs4096_350e_coslr.py',
    '../_base_/default_runtime_cls.py',
]

model = dict(backbone=dict(depth=152, drop_path_rate=0.1), neck=dict(drop_rate=0.3))
