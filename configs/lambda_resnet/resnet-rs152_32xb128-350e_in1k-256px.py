_base_ = './lambda-resnet152_32xb128-350e_in1k-256px.py'

model = dict(backbone=dict(stage_layers='CCCC'))
