_base_ = './qkformer-hst-10-384_8xb32_in1k.py'

model = dict(backbone=dict(arch='hst-10-768'), head=dict(in_channels=768))

# Three steps of 8 x 24 images: a batch of 576, as in the released log; the paper says 512.
train_dataloader = dict(batch_size=24)
optim_wrapper = dict(optimizer=dict(lr=1.35e-3), accumulative_counts=3)
auto_scale_lr = dict(base_batch_size=192)
