_base_ = './cifar10_bs64_randaug9.py'

# The mean and standard deviation of CIFAR-10, as in the released code.
data_preprocessor = dict(num_classes=100)
train_dataloader = dict(dataset=dict(type='CIFAR100', data_root='data/cifar100'))
val_dataloader = dict(dataset=dict(type='CIFAR100', data_root='data/cifar100'))
test_dataloader = val_dataloader
