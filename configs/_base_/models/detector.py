# Shared by the detectors. The backbone starts from the weights of a classifier, which the config names; its stem and
# first stage are frozen, and its batch norm is in evaluation mode.
model = dict(
    data_preprocessor=dict(
        type='DetDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=32,
    ),
    backbone=dict(
        norm_cfg=dict(type='BN', requires_grad=True),
        frozen_stages=1,
        norm_eval=True,
        init_cfg=dict(type='Pretrained', prefix='backbone.'),
    ),
)
