# For small images and two CPU cores: the layout of the ImageNet networks at a sixth of the width, two steps.
norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    type='EncoderDecoder',
    backbone=dict(
        type='mmkron.QKFormer',
        arch=dict(
            dims=(16, 32, 64),
            depths=(1, 1, 2),
            heads=4,
            mlp_ratio=4,
            steps=2,
            attentions=('qkta', 'qkta', 'ssa'),
            stem=dict(widths=(8, 16, 16), pools=(True, True, False), shortcut_from=1),
            pools=(True, False),
        ),
        out_indices=(0, 1, 2),
        norm_cfg=norm_cfg,
    ),
    neck=dict(type='FPN', in_channels=[16, 32, 64], out_channels=32, num_outs=4),
    decode_head=dict(
        type='FPNHead',
        in_channels=[32, 32, 32, 32],
        in_index=[0, 1, 2, 3],
        feature_strides=[4, 8, 16, 32],
        channels=32,
        num_classes=11,
        dropout_ratio=0.0,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
