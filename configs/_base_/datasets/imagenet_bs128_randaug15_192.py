_base_ = './imagenet_bs128_randaug15_224.py'

image_size = 192
magnitude_level = 15

train_pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=image_size),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='RandAugment',
        policies=_base_.policies,
        num_policies=2,
        total_level=10,
        magnitude_level=magnitude_level,
    ),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(type='mmpretrain.EfficientNetCenterCrop', crop_size=image_size, interpolation='bilinear'),
    dict(type='mmpretrain.PackInputs'),
]

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
