_base_ = './deeplabv2_r101-d8_1xb8-25k_voc12aug-321x321.py'

model = dict(
    decode_head=dict(
        _delete_=True,
        type='mmkron.KAOHead',
        mode='kv',
        in_channels=2048,
        in_index=3,
        channels=512,
        kernel_size=1,
        num_classes=21,
        dropout_ratio=0.0,
        norm_cfg=dict(type='BN', requires_grad=True),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    )
)
