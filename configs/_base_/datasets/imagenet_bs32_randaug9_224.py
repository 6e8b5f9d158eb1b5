_base_ = './imagenet_bs128_224.py'

bgr_mean = _base_.data_preprocessor['mean'][::-1]
bgr_std = _base_.data_preprocessor['std'][::-1]
bicubic = dict(backend='pillow', interpolation='bicubic')

rand_augment = dict(
    type='RandAugment',
    policies='timm_increasing',
    num_policies=2,
    total_level=10,
    magnitude_level=9,
    magnitude_std=0.5,
    hparams=dict(pad_val=[round(x) for x in bgr_mean], interpolation='bicubic'),
)
random_erasing = dict(
    type='RandomErasing',
    erase_prob=0.25,
    mode='rand',
    min_area_ratio=0.02,
    max_area_ratio=1 / 3,
    fill_color=bgr_mean,
    fill_std=bgr_std,
)

train_pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=224, **bicubic),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    rand_augment,
    random_erasing,
    dict(type='PackInputs'),
]
# MMPretrain's inferencers build this list in the scope that another host's inferencer left; hence the prefixes.
test_pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(type='mmpretrain.ResizeEdge', scale=256, edge='short', **bicubic),
    dict(type='mmpretrain.CenterCrop', crop_size=224),
    dict(type='mmpretrain.PackInputs'),
]

train_dataloader = dict(batch_size=32, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=32, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
