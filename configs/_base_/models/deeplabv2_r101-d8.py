norm_cfg = dict(type='BN', requires_grad=False)
model = dict(
    type='EncoderDecoder',
    # As in DeepLabV2: plain stem, all units of a dilated stage dilated, frozen batch norm.
    backbone=dict(
        type='ResNet',
        depth=101,
        num_stages=4,
        out_indices=(0, 1, 2, 3),
        dilations=(1, 1, 2, 4),
        strides=(1, 2, 1, 1),
        contract_dilation=False,
        norm_cfg=norm_cfg,
        norm_eval=True,
        style='pytorch',
        init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet101'),
    ),
    decode_head=dict(
        type='mmkron.ASPPV2Head',
        in_channels=2048,
        in_index=3,
        num_classes=21,
        dilations=(6, 12, 18, 24),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
