_base_ = [
    '../_base_/datasets/fashionmnist_bs128.py',
    '../_base_/default_runtime_cls.py',
]

# Half of ResNet-RS's width, and only its stages c2 and c3: they see maps of 7 x 7 and 4 x 4 here.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmkron.LambdaResNet',
        stage_blocks=(2, 2, 1, 1),
        stage_layers='LLCC',
        skeleton='rs',
        in_channels=1,
        base_channels=32,
        lambda_cfg=dict(scope=7),
        out_indices=1,
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=256,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
        topk=(1,),
    ),
)

max_epochs = 5
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=0.005, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=True, begin=0, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=1, end=max_epochs, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=128)
randomness = dict(seed=0)
