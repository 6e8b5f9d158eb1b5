_base_ = './qkformer.py'

model = dict(
    backbone=dict(arch='cifar'),
    head=dict(num_classes=10, topk=(1,), cal_acc=False),
    train_cfg=dict(augments=dict(type='Mixup', alpha=0.5)),
)
