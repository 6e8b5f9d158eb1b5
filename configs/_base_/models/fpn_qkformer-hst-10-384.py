# Semantic FPN. The backbone ends at stride 16; the pyramid adds a level of stride 32.
norm_cfg = dict(type='SyncBN', requires_grad=True)
model = dict(
    type='EncoderDecoder',
    backbone=dict(type='mmkron.QKFormer', arch='hst-10-384', out_indices=(0, 1, 2), norm_cfg=norm_cfg),
    neck=dict(type='FPN', in_channels=[96, 192, 384], out_channels=128, num_outs=4),
    decode_head=dict(
        type='FPNHead',
        in_channels=[128, 128, 128, 128],
        in_index=[0, 1, 2, 3],
        feature_strides=[4, 8, 16, 32],
        channels=128,
        num_classes=150,
        dropout_ratio=0.1,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
