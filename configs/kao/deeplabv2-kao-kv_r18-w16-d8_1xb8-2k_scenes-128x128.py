_base_ = './deeplabv2_r18-w16-d8_1xb8-2k_scenes-128x128.py'

# The number of parameters matches the ASPP head.
model = dict(
    decode_head=dict(
        _delete_=True,
        type='mmkron.KAOHead',
        mode='kv',
        in_channels=128,
        in_index=3,
        channels=40,
        num_classes=11,
        dropout_ratio=0.0,
        norm_cfg=dict(type='BN', requires_grad=True),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    )
)
