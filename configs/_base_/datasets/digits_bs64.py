dataset_type = 'mmkron.Digits'
data_preprocessor = dict(num_classes=10, mean=[127.5], std=[127.5], to_rgb=False)

train_pipeline = [
    dict(type='Resize', scale=(32, 32), interpolation='bicubic'),
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='Resize', scale=(32, 32), interpolation='bicubic'),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    dataset=dict(type=dataset_type, split='train', pipeline=train_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True),
)
val_dataloader = dict(
    batch_size=150,
    num_workers=0,
    dataset=dict(type=dataset_type, split='val', pipeline=test_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
val_evaluator = dict(type='Accuracy', topk=(1,))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
