model = dict(
    type='ImageClassifier',
    backbone=dict(type='mmkron.KANet', arch='kanet-kv'),
    # The paper gives a keep probability of 0.8.
    neck=dict(type='mmkron.GlobalAveragePoolingDropout', drop_rate=0.2),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=1280,
        init_cfg=dict(type='Xavier', layer='Linear', distribution='uniform'),
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
        topk=(1, 5),
    ),
)
