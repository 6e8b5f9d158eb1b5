_base_ = '../kanet/kanet_kv_imagenet.py'

model = dict(backbone=dict(_delete_=True, type='mmkron.LambdaMobileNetV2'))
