_base_ = [
    '../_base_/models/qkformer_small.py',
    '../_base_/datasets/fashionmnist_bs128.py',
    '../_base_/schedules/small_adamw.py',
    '../_base_/default_runtime_cls.py',
]

randomness = dict(seed=0)
