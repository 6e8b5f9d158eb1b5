# 20 epochs of warm-up, a cosine schedule until epoch 400, then ten epochs at its final learning rate.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.06),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, begin=0, end=20),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=20, end=400),
]
train_cfg = dict(by_epoch=True, max_epochs=410, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=64)

# Mixup for the first 200 epochs.
custom_hooks = [dict(type='SwitchRecipeHook', schedule=[dict(action_epoch=201, batch_augments=None)])]
