# For small images and two CPU cores: a quarter of the width of ResNet-18, and dilations for maps of 16 x 16.
norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    type='EncoderDecoder',
    backbone=dict(
        type='ResNet',
        depth=18,
        base_channels=16,
        stem_channels=16,
        num_stages=4,
        out_indices=(0, 1, 2, 3),
        dilations=(1, 1, 2, 4),
        strides=(1, 2, 1, 1),
        contract_dilation=False,
        norm_cfg=norm_cfg,
        norm_eval=False,
        style='pytorch',
    ),
    decode_head=dict(
        type='mmkron.ASPPV2Head',
        in_channels=128,
        in_index=3,
        num_classes=11,
        dilations=(2, 4, 6, 8),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
