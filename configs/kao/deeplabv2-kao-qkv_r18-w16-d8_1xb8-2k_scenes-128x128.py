_base_ = './deeplabv2-kao-kv_r18-w16-d8_1xb8-2k_scenes-128x128.py'

model = dict(decode_head=dict(mode='qkv'))
