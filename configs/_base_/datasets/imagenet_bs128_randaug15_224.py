_base_ = './imagenet_bs128_224.py'

# Ranges are for level 10. The recipe exceeds level 10, where MMPretrain's 'timm_increasing' leaves its valid range
# (it would posterize to -2 bits), so posterize, solarize and the color operations follow the original implementation.
color = dict(magnitude_range=(-0.9, 0.9), random_negative_prob=0.0)
policies = [
    dict(type='AutoContrast'),
    dict(type='Equalize'),
    dict(type='Invert'),
    dict(type='Rotate', magnitude_range=(0, 30)),
    dict(type='Posterize', magnitude_range=(0, 4)),
    dict(type='Solarize', magnitude_range=(0, 256)),
    dict(type='SolarizeAdd', magnitude_range=(0, 110)),
    dict(type='ColorTransform', **color),
    dict(type='Contrast', **color),
    dict(type='Brightness', **color),
    dict(type='Sharpness', **color),
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
# Crops crop_size / (crop_size + 32) of the shorter side.
# MMPretrain's inferencers build this list in the scope that another host's inferencer left; hence the prefixes.
test_pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(type='mmpretrain.EfficientNetCenterCrop', crop_size=224, interpolation='bilinear'),
    dict(type='mmpretrain.PackInputs'),
]

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
