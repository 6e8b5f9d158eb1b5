_base_ = './imagenet_bs32_randaug9_224.py'

image_size = 288

train_pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=image_size, **_base_.bicubic),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    _base_.rand_augment,
    _base_.random_erasing,
    dict(type='PackInputs'),
]
# Above 224 pixels, the shorter edge of a test image is as long as the crop.
test_pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(type='mmpretrain.ResizeEdge', scale=image_size, edge='short', **_base_.bicubic),
    dict(type='mmpretrain.CenterCrop', crop_size=image_size),
    dict(type='mmpretrain.PackInputs'),
]

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
