# The learning rate is 0.1 per 256 images of the batch of 4096.
max_epochs = 350
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=1.6, momentum=0.9, weight_decay=4e-5),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=5, end=max_epochs, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=4096)

# Evaluation and checkpoints use the moving average of weights and batch statistics, with decay 0.9999.
custom_hooks = [
    dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=1e-4, update_buffers=True),
]
