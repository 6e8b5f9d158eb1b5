_base_ = './mask-rcnn_lambda-r50_fpn_4conv1fc_syncbn-all_64xb4-lsj-130k_coco-1024x1024.py'

model = dict(backbone=dict(depth=152, stage_layers='CCCC'))
