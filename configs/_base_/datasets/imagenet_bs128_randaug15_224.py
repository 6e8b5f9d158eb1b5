_base_ = './imagenet_bs128_224.py'

# Strengths at level 10; the recipe goes beyond it, where those of MMPretrain's 'timm_increasing' leave their range
# (posterizing to -2 bits). So posterizing, solarizing and the colours go the way of the first implementation.
colour = dict(magnitude_range=(-0.9, 0.9), random_negative_prob=0.0)
policies = [
    dict(type='AutoContrast'),
    dict(type='Equalize'),
    dict(type='Invert'),
    dict(type='Rotate', magnitude_range=(0, 30)),
    dict(type='Posterize', magnitude_range=(0, 4)),
    dict(type='Solarize', magnitude_range=(0, 256)),
    dict(type='SolarizeAdd', magnitude_range=(0, 110)),
    dict(type='ColorTransform', **colour),
    dict(type='Contrast', **colour),
    dict(type='Brightness', **colour),
    dict(type='Sharpness', **colour),
    dict(type='Shear', magnitude_range=(0, 0.3), direction='horizontal'),
    dict(type='Shear', magnitude_range=(0, 0.3), direction='vertical'),
    dict(type='Translate', magnitude_range=(0, 0.45), direction='horizontal'),
    dict(type='Translate', magnitude_range=(0, 0.45), direction='vertical'),
    dict(type='Cutout', magnitude_range=(0, 80)),
]

train_pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=224),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandAugment', policies=policies, num_policies=2, total_level=10, magnitude_level=15),
    dict(type='PackInputs'),
]
# Of an image's shorter side, crop_size / (crop_size + 32), whatever the size.
# With the host's scope: MMPretrain's inferencers build it in whatever scope another host's inferencer has left.
test_pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(type='mmpretrain.EfficientNetCenterCrop', crop_size=224, interpolation='bilinear'),
    dict(type='mmpretrain.PackInputs'),
]

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
