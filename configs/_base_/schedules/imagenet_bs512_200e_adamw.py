# The learning rate is 6e-4 per 256 images: 8 devices with 32 images each, accumulated over two steps to a batch of 512.
# MMEngine's learning rate scaling does not count accumulated steps, so its base is 256.
max_epochs = 200
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1.2e-3, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
    accumulative_counts=2,
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-4, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-6, by_epoch=True, begin=5, end=max_epochs, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=256)
