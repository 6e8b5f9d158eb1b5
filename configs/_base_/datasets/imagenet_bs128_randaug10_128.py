_base_ = './imagenet_bs128_randaug15_224.py'

train_pipeline = _base_.train_pipeline
train_pipeline[1].scale = 128
train_pipeline[3].magnitude_level = 10
test_pipeline = _base_.test_pipeline
test_pipeline[1].crop_size = 128

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
