_base_ = './deeplabv2-kao-kv_r101-d8_1xb8-25k_voc12aug-321x321.py'

model = dict(decode_head=dict(mode='qkv'))
