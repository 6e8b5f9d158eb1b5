_base_ = [
    '../_base_/models/upernet_qkformer-hst-10-384.py',
    '../_base_/datasets/ade20k_512x512.py',
    '../_base_/schedules/seg_80k_adamw.py',
    '../_base_/default_runtime_seg.py',
]
model = dict(
    data_preprocessor={{_base_.data_preprocessor}},
    backbone=dict(
        init_cfg=dict(
            type='Pretrained',
            prefix='backbone.',
            checkpoint='work_dirs/qkformer-hst-10-384_8xb32_in1k/epoch_200.pth',
        )
    ),
)

auto_scale_lr = dict(base_batch_size=16)
default_hooks = dict(checkpoint=dict(interval=8000))
