_base_ = './retinanet_lambda-r50_fpn.py'

# From the maps of stride 8 and 16; the pyramid adds levels of stride 32, 64 and 128.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmkron.QKFormer',
        arch='hst-10-384',
        out_indices=(0, 1, 2),
        norm_cfg=dict(type='BN', requires_grad=True),
    ),
    neck=dict(in_channels=[96, 192, 384], start_level=1),
)
