# For gray images of about 32 x 32 in 10 classes: three stages on maps of 16 x 16, 8 x 8 and 4 x 4.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmkron.QKFormer',
        arch=dict(
            dims=(16, 32, 64),
            depths=(1, 1, 1),
            heads=4,
            mlp_ratio=4,
            steps=4,
            attentions=('qkta', 'qkta', 'ssa'),
            stem=dict(widths=(8, 16), pools=(True, False), shortcut_from=1),
            pools=(False, True),
        ),
        in_channels=1,
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
        topk=(1,),
    ),
)
