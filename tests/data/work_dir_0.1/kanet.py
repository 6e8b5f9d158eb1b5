auto_scale_lr = dict(base_batch_size=8)
data_preprocessor = dict(
    mean=[
        127.5,
        127.5,
        127.5,
    ],
    num_classes=2,
    std=[
        127.5,
        127.5,
        127.5,
    ],
    to_rgb=True)
dataset = dict(
    data_root='imagenet',
    metainfo=dict(classes=(
        'a',
        'b',
    )),
    pipeline=[
        dict(type='mmkron.LoadImageFromFile'),
        dict(scale=(
            32,
            32,
        ), type='Resize'),
        dict(type='PackInputs'),
    ],
    split='train',
    type='ImageNet')
default_hooks = dict(
    checkpoint=dict(interval=1, type='mmkron.CheckpointHook'),
    resume=dict(type='mmkron.ResumeHook'),
    visualization=dict(type='VisualizationHook'))
default_scope = 'mmpretrain'
launcher = 'none'
model = dict(
    backbone=dict(out_indices=1, type='mmkron.KANet', widen_factor=0.1),
    head=dict(
        in_channels=8,
        loss=dict(loss_weight=1.0, type='CrossEntropyLoss'),
        num_classes=2,
        topk=(1, ),
        type='LinearClsHead'),
    neck=dict(type='GlobalAveragePooling'),
    type='ImageClassifier')
optim_wrapper = dict(
    optimizer=dict(lr=0.01, momentum=0.9, type='SGD'), type='OptimWrapper')
param_scheduler = dict(step_size=1, type='StepLR')
pipeline = [
    dict(type='mmkron.LoadImageFromFile'),
    dict(scale=(
        32,
        32,
    ), type='Resize'),
    dict(type='PackInputs'),
]
randomness = dict(seed=0)
test_cfg = dict()
test_dataloader = dict(
    batch_size=4,
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        data_root='imagenet',
        metainfo=dict(classes=(
            'a',
            'b',
        )),
        pipeline=[
            dict(type='mmkron.LoadImageFromFile'),
            dict(scale=(
                32,
                32,
            ), type='Resize'),
            dict(type='PackInputs'),
        ],
        split='val',
        type='ImageNet'),
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(shuffle=False, type='DefaultSampler'))
test_evaluator = dict(topk=(1, ), type='Accuracy')
train_cfg = dict(by_epoch=True, max_epochs=1, val_interval=1)
train_dataloader = dict(
    batch_size=4,
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        data_root='imagenet',
        metainfo=dict(classes=(
            'a',
            'b',
        )),
        pipeline=[
            dict(type='mmkron.LoadImageFromFile'),
            dict(scale=(
                32,
                32,
            ), type='Resize'),
            dict(type='PackInputs'),
        ],
        split='train',
        type='ImageNet'),
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(shuffle=True, type='DefaultSampler'))
val_cfg = dict()
val_dataloader = dict(
    batch_size=4,
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        data_root='imagenet',
        metainfo=dict(classes=(
            'a',
            'b',
        )),
        pipeline=[
            dict(type='mmkron.LoadImageFromFile'),
            dict(scale=(
                32,
                32,
            ), type='Resize'),
            dict(type='PackInputs'),
        ],
        split='val',
        type='ImageNet'),
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(shuffle=False, type='DefaultSampler'))
val_evaluator = dict(topk=(1, ), type='Accuracy')
visualizer = dict(
    type='UniversalVisualizer', vis_backends=[
        dict(type='LocalVisBackend'),
    ])
work_dir = 'work'
