_base_ = './kanet.py'

# For gray images of about 32 x 32 in 10 classes.
model = dict(
    backbone=dict(widen_factor=0.35, in_channels=1, stem_stride=1),
    head=dict(num_classes=10, topk=(1,)),
)
