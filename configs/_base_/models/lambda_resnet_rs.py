# The skeleton of ResNet-RS; depth determines the blocks with lambda layers.
model = dict(
    type='ImageClassifier',
    backbone=dict(type='mmkron.LambdaResNet', depth=50, skeleton='rs', drop_path_rate=0.0),
    neck=dict(type='mmkron.GlobalAveragePoolingDropout', drop_rate=0.2),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=2048,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        topk=(1, 5),
    ),
)
