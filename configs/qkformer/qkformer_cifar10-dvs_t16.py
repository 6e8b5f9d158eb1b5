_base_ = [
    '../_base_/models/qkformer_events.py',
    '../_base_/datasets/cifar10_dvs_t16.py',
    '../_base_/default_runtime_cls.py',
]

# The recipe of the released log: 16 frames with equal numbers of events, batch 16, mixed precision in training (--amp),
# the best epoch on the test set. 96 epochs, including 10 of warm-up from 1e-5, then 10 at the final learning rate.
max_epochs = 106
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=5e-3, weight_decay=0.06))
param_scheduler = [
    dict(type='LinearLR', start_factor=2e-3, by_epoch=True, begin=0, end=10),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=10, end=96),
]
train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=16)
custom_hooks = [
    dict(type='SwitchRecipeHook', schedule=[dict(action_epoch=76, batch_augments=None)]),  # Mixup for 75 epochs
]
randomness = dict(seed=2021)
