# Semantic FPN, a light head on all four strides.
norm_cfg = dict(type='SyncBN', requires_grad=True)
model = dict(
    type='EncoderDecoder',
    backbone=dict(type='mmkron.KANet', arch='kanet-kv', out_indices=(1, 2, 3, 4), norm_cfg=norm_cfg),
    neck=dict(type='FPN', in_channels=[24, 32, 96, 320], out_channels=128, num_outs=4),
    decode_head=dict(
        type='FPNHead',
        in_channels=[128, 128, 128, 128],
        in_index=[0, 1, 2, 3],
        feature_strides=[4, 8, 16, 32],
        channels=64,
        num_classes=19,
        dropout_ratio=0.1,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
