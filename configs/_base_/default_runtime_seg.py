default_scope = 'mmseg'

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='CheckpointHook',
        backend_args=dict(backend='atomic'),
        by_epoch=False,
        interval=2500,
        max_keep_ckpts=3,
        save_best='mIoU',
    ),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    preemption=dict(type='mmkron.PreemptionHook'),
    visualization=dict(type='SegVisualizationHook'),
)
env_cfg = dict(
    cudnn_benchmark=True,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(type='SegLocalVisualizer', vis_backends=vis_backends, name='visualizer')
log_processor = dict(by_epoch=False)
log_level = 'INFO'
load_from = None
resume = False
randomness = dict(seed=None, deterministic=False)

# Test-time augmentation, by --tta: six scales, mirrored and not.
tta_model = dict(type='SegTTAModel')
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='Resize', scale_factor=r, keep_ratio=True) for r in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)],
            [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0, direction='horizontal')],
            [dict(type='LoadAnnotations')],
            [dict(type='PackSegInputs')],
        ],
    ),
]
