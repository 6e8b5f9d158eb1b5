# Ten epochs for the small classifiers; a config with another number of epochs sets param_scheduler and train_cfg.
max_epochs = 10
warmup = dict(type='LinearLR', start_factor=0.1, by_epoch=True, begin=0, end=1, convert_to_iter_based=True)
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=0.005, weight_decay=0.05))
param_scheduler = [
    warmup,
    dict(type='CosineAnnealingLR', by_epoch=True, begin=1, end=max_epochs, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=128)
