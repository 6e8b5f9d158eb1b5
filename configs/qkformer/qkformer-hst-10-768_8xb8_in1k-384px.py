_base_ = [
    '../_base_/models/qkformer.py',
    '../_base_/datasets/imagenet_bs32_randaug9_384.py',
    '../_base_/schedules/imagenet_bs512_9e_continuation.py',
    '../_base_/default_runtime_cls.py',
]

model = dict(backbone=dict(arch='hst-10-768'), head=dict(in_channels=768))

train_dataloader = dict(batch_size=8)
optim_wrapper = dict(accumulative_counts=8)
auto_scale_lr = dict(base_batch_size=64)
load_from = 'work_dirs/qkformer-hst-10-768_8xb24_in1k/epoch_200.pth'
randomness = dict(seed=0)
