_base_ = [
    '../_base_/models/fpn_qkformer-hst-10-384.py',
    '../_base_/datasets/voc12aug_321x321.py',
    '../_base_/default_runtime_seg.py',
]
model = dict(
    data_preprocessor={{_base_.data_preprocessor}},
    backbone=dict(
        init_cfg=dict(
            type='Pretrained',
            prefix='backbone.',
            checkpoint='work_dirs/qkformer-hst-10-384_8xb32_in1k/epoch_200.pth',
        )
    ),
    decode_head=dict(num_classes=21),
)

max_iters = 25000
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=5e-4, weight_decay=0.005))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=500, end=max_iters, by_epoch=False),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=2500)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(base_batch_size=8)
