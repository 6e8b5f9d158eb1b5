_base_ = [
    '../_base_/models/fpn_qkformer-small.py',
    '../_base_/datasets/fashion_scenes_128x128.py',
    '../_base_/schedules/scenes_bs8_2k_adamw.py',
    '../_base_/default_runtime_seg.py',
]
model = dict(data_preprocessor={{_base_.data_preprocessor}})

optim_wrapper = dict(optimizer=dict(lr=5e-3))
default_hooks = dict(checkpoint=dict(interval=500, max_keep_ckpts=1))
randomness = dict(seed=0)
