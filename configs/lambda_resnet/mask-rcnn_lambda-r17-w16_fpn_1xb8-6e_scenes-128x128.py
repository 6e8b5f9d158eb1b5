_base_ = [
    '../_base_/models/mask-rcnn_lambda-r17-w16_fpn.py',
    '../_base_/datasets/fashion_scenes_instance_128x128.py',
    '../_base_/default_runtime_det.py',
]

max_epochs = 6
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=5e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=10.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, begin=0, end=100, by_epoch=False),
    dict(type='CosineAnnealingLR', begin=0, end=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(enable=False, base_batch_size=8)
default_hooks = dict(checkpoint=dict(interval=1, max_keep_ckpts=1, save_best='coco/segm_mAP'))
randomness = dict(seed=0)
visualizer = dict(alpha=0.4)  # of boxes and masks; MMDetection's default of 0.8 hides the image
