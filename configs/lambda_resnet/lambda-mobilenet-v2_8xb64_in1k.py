_base_ = [
    '../_base_/models/lambda_mobilenet_v2.py',
    '../_base_/datasets/imagenet_bs64_256_crop224.py',
    '../_base_/schedules/imagenet_bs512_150e.py',
    '../_base_/default_runtime_cls.py',
]
