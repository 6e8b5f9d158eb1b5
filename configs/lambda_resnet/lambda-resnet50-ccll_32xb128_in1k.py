_base_ = './lambda-resnet50-llll_32xb128_in1k.py'

model = dict(backbone=dict(stage_layers='CCLL'))
