_base_ = [
    '../_base_/models/qkformer.py',
    '../_base_/datasets/imagenet_bs32_randaug9_224.py',
    '../_base_/schedules/imagenet_bs512_200e_adamw.py',
    '../_base_/default_runtime_cls.py',
]

randomness = dict(seed=0)
