_base_ = './qkformer-hst-10-384_8xb32_in1k.py'

model = dict(backbone=dict(arch='hst-10-512'), head=dict(in_channels=512))
