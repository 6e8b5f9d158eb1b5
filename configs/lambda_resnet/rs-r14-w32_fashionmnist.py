_base_ = './lambda-r14-w32_fashionmnist.py'

# The same network with 3 x 3 convolutions.
model = dict(backbone=dict(stage_layers='CCCC', lambda_cfg=None))
