_base_ = [
    '../_base_/models/kao-kv_r50-d8.py',
    '../_base_/datasets/ade20k_512x512.py',
    '../_base_/schedules/seg_80k.py',
    '../_base_/default_runtime_seg.py',
]
model = dict(
    data_preprocessor={{_base_.data_preprocessor}},
    decode_head=dict(num_classes=150),
    auxiliary_head=dict(num_classes=150),
)

auto_scale_lr = dict(base_batch_size=16)
default_hooks = dict(checkpoint=dict(interval=8000))
