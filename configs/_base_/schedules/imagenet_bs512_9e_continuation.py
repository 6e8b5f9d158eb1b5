# The last nine of 210 epochs of a cosine from 1.2e-3 to 5e-7, which is a parabola there to within 0.1 %.
max_epochs = 9
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=6.2e-6, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)
param_scheduler = dict(
    type='PolyLR', power=2.0, eta_min=5e-7, by_epoch=True, begin=0, end=max_epochs, convert_to_iter_based=True
)
train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=1)
val_cfg = dict()
test_cfg = dict()
