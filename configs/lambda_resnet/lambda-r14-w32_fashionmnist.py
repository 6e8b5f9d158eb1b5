_base_ = [
    '../_base_/datasets/fashionmnist_bs128.py',
    '../_base_/schedules/small_adamw.py',
    '../_base_/default_runtime_cls.py',
]

# Half the width of ResNet-RS, and only its stages c2 and c3, whose maps are 7 x 7 and 4 x 4 here.
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
param_scheduler = [
    _base_.warmup,
    dict(type='CosineAnnealingLR', by_epoch=True, begin=1, end=max_epochs, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=max_epochs)
randomness = dict(seed=0)
