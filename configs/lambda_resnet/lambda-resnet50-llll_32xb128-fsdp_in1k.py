_base_ = ['./lambda-resnet50-llll_32xb128_in1k.py', '../_base_/strategies/fsdp.py']
