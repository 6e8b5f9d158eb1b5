# The split of QKFormer: the test set is the last 10 % of each class, in the order of file names.
dataset_type = 'mmkron.CIFAR10DVS'
data_root = 'data/cifar10-dvs/'
data_preprocessor = dict(type='mmkron.EventDataPreprocessor', num_classes=10)

train_pipeline = [
    dict(type='mmkron.EventFlip', prob=0.5),
    dict(type='mmkron.EventAugment'),
    dict(type='mmkron.PackEventInputs'),
]
test_pipeline = [dict(type='mmkron.PackEventInputs')]

dataset = dict(type=dataset_type, data_root=data_root, frames=16, by='number')
dataloader = dict(batch_size=16, num_workers=4, persistent_workers=True)
train_dataloader = dict(
    **dataloader,
    dataset=dict(**dataset, split='train', pipeline=train_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True),
)
val_dataloader = dict(
    **dataloader,
    dataset=dict(**dataset, split='test', pipeline=test_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
val_evaluator = dict(type='Accuracy', topk=(1,))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
