max_iters = 2000
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-2, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, begin=0, end=100, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=0.0, begin=100, end=max_iters, by_epoch=False),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=500)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(base_batch_size=8)
