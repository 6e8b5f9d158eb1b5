# 281 epochs of the 118,287 images of train2017. The learning rate drops after 90, 95 and 97.5 % of the iterations.
max_iters = 130000
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='SGD', lr=0.32, momentum=0.9, weight_decay=4e-5),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, begin=0, end=1000, by_epoch=False),
    dict(
        type='MultiStepLR',
        begin=0,
        end=max_iters,
        by_epoch=False,
        milestones=[117000, 123500, 126750],
        gamma=0.1,
    ),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=10000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(enable=False, base_batch_size=256)
