_base_ = './cifar10_dvs_t16.py'

# The split is the official one, by persons.
dataset_type = 'mmkron.DVS128Gesture'
data_root = 'data/DvsGesture/'
data_preprocessor = dict(num_classes=11)
train_dataloader = dict(dataset=dict(type=dataset_type, data_root=data_root))
val_dataloader = dict(dataset=dict(type=dataset_type, data_root=data_root))
test_dataloader = val_dataloader
