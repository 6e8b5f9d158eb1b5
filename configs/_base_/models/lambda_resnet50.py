# The skeleton of the standard ResNet-50; stage_layers selects the stages with lambda layers.
model = dict(
    type='ImageClassifier',
    backbone=dict(type='mmkron.LambdaResNet', depth=50, skeleton='v1.5', stage_layers='LLLL'),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=2048,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        topk=(1, 5),
    ),
)
