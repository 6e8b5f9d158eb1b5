_base_ = [
    '../_base_/models/upernet_lambda-r50.py',
    '../_base_/datasets/ade20k_512x512.py',
    '../_base_/schedules/seg_80k.py',
    '../_base_/default_runtime_seg.py',
]
model = dict(
    data_preprocessor={{_base_.data_preprocessor}},
    backbone=dict(
        init_cfg=dict(
            type='Pretrained',
            prefix='backbone.',
            checkpoint='work_dirs/lambda-resnet50_32xb128-350e_in1k-160px/epoch_350.pth',
        )
    ),
)

auto_scale_lr = dict(base_batch_size=16)
default_hooks = dict(checkpoint=dict(interval=8000))
