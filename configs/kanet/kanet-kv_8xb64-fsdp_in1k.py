_base_ = ['./kanet_kv_imagenet.py', '../_base_/strategies/fsdp.py']
