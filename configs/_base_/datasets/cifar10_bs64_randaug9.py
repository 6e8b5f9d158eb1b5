dataset_type = 'CIFAR10'
data_root = 'data/cifar10'
data_preprocessor = dict(
    num_classes=10,
    mean=[125.307, 122.961, 113.8575],
    std=[62.985, 62.0925, 66.708],
    to_rgb=False,  # images are RGB already
)

train_pipeline = [
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='RandAugment',
        policies='timm_increasing',
        num_policies=1,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.4,
        hparams=dict(pad_val=[125, 123, 114], interpolation='bicubic'),
    ),
    dict(
        type='RandomErasing',
        erase_prob=0.25,
        mode='const',
        min_area_ratio=0.02,
        max_area_ratio=1 / 3,
        fill_color=data_preprocessor['mean'],
    ),
    dict(type='PackInputs'),
]
# MMPretrain's inferencers build this list in the scope that another host's inferencer left; hence the prefixes.
test_pipeline = [
    dict(type='mmpretrain.CenterCrop', crop_size=32),
    dict(type='mmpretrain.PackInputs'),
]

train_dataloader = dict(
    batch_size=64,
    num_workers=4,
    dataset=dict(type=dataset_type, data_root=data_root, split='train', pipeline=train_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True),
)
val_dataloader = dict(
    batch_size=64,
    num_workers=4,
    dataset=dict(type=dataset_type, data_root=data_root, split='test', pipeline=test_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
val_evaluator = dict(type='Accuracy', topk=(1,))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
