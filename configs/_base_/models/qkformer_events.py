# The classifier of events in QKFormer's released recipe; arch and number of classes depend on the dataset.
model = dict(
    type='ImageClassifier',
    backbone=dict(type='mmkron.QKFormer', arch='cifar10-dvs'),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=256,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, num_classes=10, mode='original'),
        topk=(1,),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
    ),
    train_cfg=dict(augments=dict(type='Mixup', alpha=0.5), probs=0.5),
)
