_base_ = ['./qkformer-hst-10-768_8xb24_in1k.py', '../_base_/strategies/fsdp.py']
