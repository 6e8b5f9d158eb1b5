_base_ = './retinanet_fpn.py'

# From the maps of strides 8 and 16; the pyramid adds levels of strides 32, 64 and 128.
model = dict(
    backbone=dict(type='mmkron.QKFormer', arch='hst-10-384', out_indices=(0, 1, 2)),
    neck=dict(in_channels=[96, 192, 384], start_level=1),
)
