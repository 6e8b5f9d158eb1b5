_base_ = './lambda-resnet50-llll_32xb128_in1k.py'

model = dict(backbone=dict(lambda_cfg=dict(intra_depth=4, scope=7)))
