_base_ = [
    '../_base_/models/kanet_small.py',
    '../_base_/datasets/digits_bs64.py',
    '../_base_/schedules/small_adamw.py',
    '../_base_/default_runtime_cls.py',
]

max_epochs = 20
param_scheduler = [
    _base_.warmup,
    dict(type='CosineAnnealingLR', by_epoch=True, begin=1, end=max_epochs, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=max_epochs)
auto_scale_lr = dict(base_batch_size=64)

default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(max_keep_ckpts=1, save_best='accuracy/top1', rule='greater'),
)
randomness = dict(seed=0)
