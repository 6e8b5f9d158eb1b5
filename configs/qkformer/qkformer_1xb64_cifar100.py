_base_ = [
    '../_base_/models/qkformer_cifar.py',
    '../_base_/datasets/cifar100_bs64_randaug9.py',
    '../_base_/schedules/cifar_bs64_410e.py',
    '../_base_/default_runtime_cls.py',
]

model = dict(head=dict(num_classes=100))
