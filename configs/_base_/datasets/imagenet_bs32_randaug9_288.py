_base_ = './imagenet_bs32_randaug9_224.py'

# Above 224 the test image is not cut at its border: as large as the crop.
train_pipeline = _base_.train_pipeline
train_pipeline[1].scale = 288
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = 288
test_pipeline[2].crop_size = 288

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
