dataset_type = 'FashionMNIST'
data_root = 'data/fashionmnist'
data_preprocessor = dict(num_classes=10, mean=[72.94], std=[90.02], to_rgb=False)

train_pipeline = [
    dict(type='RandomCrop', crop_size=28, padding=2),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [dict(type='PackInputs')]

train_dataloader = dict(
    batch_size=128,
    num_workers=2,
    dataset=dict(type=dataset_type, data_root=data_root, split='train', pipeline=train_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True),
)
val_dataloader = dict(
    batch_size=250,
    num_workers=2,
    dataset=dict(type=dataset_type, data_root=data_root, split='test', test_mode=True, pipeline=test_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
val_evaluator = dict(type='Accuracy', topk=(1,))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
