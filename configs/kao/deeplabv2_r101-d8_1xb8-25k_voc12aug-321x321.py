_base_ = [
    '../_base_/models/deeplabv2_r101-d8.py',
    '../_base_/datasets/voc12aug_321x321.py',
    '../_base_/schedules/voc_bs8_25k.py',
    '../_base_/default_runtime_seg.py',
]
model = dict(data_preprocessor={{_base_.data_preprocessor}})
