_base_ = './mask-rcnn_lambda-r50_fpn.py'

# The backbone ends at stride 16; the pyramid adds levels of stride 32 and 64.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmkron.QKFormer',
        arch='hst-10-384',
        out_indices=(0, 1, 2),
        norm_cfg=dict(type='BN', requires_grad=True),
    ),
    neck=dict(in_channels=[96, 192, 384], add_extra_convs='on_output'),
)
