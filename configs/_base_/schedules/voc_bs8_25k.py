# The head learns ten times as fast as the backbone, as in DeepLabV2.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='SGD', lr=2.5e-4, momentum=0.9, weight_decay=5e-4),
    paramwise_cfg=dict(custom_keys=dict(decode_head=dict(lr_mult=10.0))),
)
param_scheduler = dict(type='PolyLR', power=0.9, eta_min=0.0, begin=0, end=25000, by_epoch=False)
train_cfg = dict(type='IterBasedTrainLoop', max_iters=25000, val_interval=2500)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(base_batch_size=8)
