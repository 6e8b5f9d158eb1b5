_base_ = [
    '../_base_/models/deeplabv2_r18-w16-d8.py',
    '../_base_/datasets/fashion_scenes_128x128.py',
    '../_base_/schedules/scenes_bs8_2k_adamw.py',
    '../_base_/default_runtime_seg.py',
]
model = dict(data_preprocessor={{_base_.data_preprocessor}})

default_hooks = dict(checkpoint=dict(interval=500, max_keep_ckpts=1))
randomness = dict(seed=0)
