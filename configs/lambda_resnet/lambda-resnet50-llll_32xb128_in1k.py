_base_ = [
    '../_base_/models/lambda_resnet50.py',
    '../_base_/datasets/imagenet_bs128_224.py',
    '../_base_/schedules/imagenet_bs4096_90e_coslr.py',
    '../_base_/default_runtime_cls.py',
]
