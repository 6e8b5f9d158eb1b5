_base_ = './kanet_kv_imagenet.py'

model = dict(backbone=dict(arch='attnnet-pool'))
