_base_ = './mask-rcnn_fpn.py'

# The backbone ends at stride 16; the pyramid adds levels of strides 32 and 64.
model = dict(
    backbone=dict(type='mmkron.QKFormer', arch='hst-10-384', out_indices=(0, 1, 2)),
    neck=dict(in_channels=[96, 192, 384], add_extra_convs='on_output'),
)
