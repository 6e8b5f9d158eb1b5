"""Every shipped config parses, builds and computes a loss; the metafiles say what is measured."""

import copy
import re

import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope

from support.flops import count_flops
from support.tools import ROOT

# A sharded run trains the model of the config that it is based on: test_fsdp_configs holds it to that.
FSDP_CONFIGS = sorted((ROOT / 'configs').glob('*/*-fsdp*.py'))
CONFIGS = sorted({p for p in (ROOT / 'configs').glob('*/*.py') if p.parent.name != '_base_'} - set(FSDP_CONFIGS))
METAFILES = sorted((ROOT / 'configs').glob('*/metafile.yml'))
HOSTS = ('mmpretrain', 'mmseg', 'mmdet')


def entries():
    return [(path, model) for path in METAFILES for model in yaml.safe_load(path.read_text(encoding='utf-8'))['Models']]


def build(cfg):
    """Return the model, initialized without pretrained weights, which would have to be downloaded."""
    cfg = copy.deepcopy(cfg)
    if (cfg.model.backbone.get('init_cfg') or {}).get('type') == 'Pretrained':
        cfg.model.backbone.pop('init_cfg')
    model = MODELS.build(
        cfg.model
        if 'data_preprocessor' in cfg.model
        else {**cfg.model, 'data_preprocessor': cfg.get('data_preprocessor')}
    )
    model.init_weights()
    return revert_sync_batchnorm(model)


def is_deeper(cfg, depth):
    return cfg.model.backbone.type == 'mmkron.LambdaResNet' and cfg.model.backbone.get('depth', 0) > depth


def few_regions(cfg):
    """Let a two-stage detector use 16 regions of an image instead of 512, to save time."""
    if 'rcnn' in (cfg.model.get('train_cfg') or {}):
        cfg.model.train_cfg.rcnn.sampler.num = 16
        cfg.model.train_cfg.rpn_proposal.max_per_img = 32
    return cfg


def input_shape(cfg, most=10**6):
    """Return the (C, H, W) of a config's training, for events (T, 2, H, W), with H and W at most ``most``."""
    dataset = cfg.train_dataloader.dataset
    if 'frames' in dataset:
        return (dataset.frames, 2, min(128, most), min(128, most))
    steps = [*cfg.train_pipeline, *cfg.test_pipeline]
    size = next((step.crop_size for step in steps if 'crop_size' in step), None)
    if size is None:
        size = next(step.scale for step in steps if step.type == 'Resize')[::-1]
    height, width = (size, size) if isinstance(size, int) else size
    return (cfg.model.backbone.get('in_channels', 3), min(height, most), min(width, most))


def loss_of(model, scope, shape):
    """Return the loss of two random images."""
    inputs = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    if scope == 'mmpretrain':
        from mmpretrain.structures import DataSample

        samples = [DataSample().set_gt_label(i) for i in (1, 7)]
    elif scope == 'mmdet':
        samples = [detection_sample(shape[1:], label) for label in (1, 7)]
        if model.data_preprocessor.batch_augments:
            model.data_preprocessor.batch_augments[0].size = shape[1:]
        model.data_preprocessor.pad_size_divisor = 32
    else:
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        labels = torch.randint(0, model.num_classes, (2, 1, *shape[1:]))
        meta = dict(img_shape=shape[1:])
        samples = [SegDataSample(gt_sem_seg=PixelData(data=each), metainfo=meta) for each in labels]
        model.data_preprocessor.size = shape[1:]
    data = model.data_preprocessor(dict(inputs=list(inputs), data_samples=samples), training=True)
    losses = model(**data, mode='loss')
    if scope == 'mmdet':
        assert set(losses) == DETECTION_LOSSES[type(model).__name__]
    # Detectors return a list with one loss per level.
    losses = {k: v if isinstance(v, list) else [v] for k, v in losses.items() if 'loss' in k}
    assert losses
    assert all(value.isfinite().all() for values in losses.values() for value in values)
    return sum(value.sum() for values in losses.values() for value in values)


DETECTION_LOSSES = {
    'MaskRCNN': {'loss_rpn_cls', 'loss_rpn_bbox', 'loss_cls', 'loss_bbox', 'loss_mask', 'acc'},
    'RetinaNet': {'loss_cls', 'loss_bbox'},
}


def detection_sample(size, label):
    """Return a sample with one box and mask of half the height and width of the image."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    top, left = size[0] // 4, size[1] // 4
    masks = np.zeros((1, *size), np.uint8)
    masks[0, top : 3 * top, left : 3 * left] = 1
    sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1, 1)))
    boxes = torch.tensor([[left, top, 3 * left, 3 * top]], dtype=torch.float)
    sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.tensor([label]), masks=BitmapMasks(masks, *size))
    return sample


class DenseParts(torch.nn.Module):
    """Parts of a detector that run on whole maps: backbone, neck, and the RPN or the one-stage head."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, x):
        head = self.detector.rpn_head if 'rpn_head' in dict(self.detector.named_children()) else self.detector.bbox_head
        return head(self.detector.extract_feat(x))


def flops_of(model, cfg):
    """Return the multiply-adds of a model; of a detector without RoI heads, whose work depends on the proposals.

    A detector's count is for 1024 x 1024 (the scenes': 128 x 128) and comes from 128 x 128, because it is proportional
    to the number of positions if the coarsest stride divides the sides.
    """
    if cfg.default_scope != 'mmdet':
        return count_flops(model, 1, *input_shape(cfg))
    count = count_flops(DenseParts(model), 1, 3, 128, 128)
    return count if input_shape(cfg)[1:] == (128, 128) else 64 * count


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.name)
def test_config(path, tmp_path):
    """A config names its host and survives a dump; its loss is finite with a gradient for every parameter.

    A classifier deeper than LambdaResNet-101 has more blocks of the same kinds; test_metafile_counts alone builds it.
    """
    cfg = Config.fromfile(path)
    assert cfg.default_scope in HOSTS
    cfg.dump(tmp_path / 'dump.py')
    assert Config.fromfile(tmp_path / 'dump.py').to_dict() == cfg.to_dict()
    assert cfg.train_dataloader.batch_size > 0
    assert cfg.auto_scale_lr.base_batch_size > 0
    if cfg.default_scope == 'mmpretrain' and is_deeper(cfg, 101):
        return
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = build(few_regions(cfg))
        loss = loss_of(model, cfg.default_scope, input_shape(cfg, most=64))
        loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_fsdp_configs():
    """There is one for each family, equal to a listed config except for the runner and the strategy."""
    assert [path.parent.name for path in FSDP_CONFIGS] == ['kanet', 'lambda_resnet', 'qkformer']
    for path in FSDP_CONFIGS:
        cfg = Config.fromfile(path)
        assert (cfg.pop('runner_type'), cfg.pop('strategy')) == (
            'mmkron.FlexibleRunner',
            dict(type='mmkron.FSDPStrategy'),
        )
        base = path.with_name(re.search(r"'\./(.+?)'", path.read_text())[1])
        assert base in CONFIGS
        assert cfg.to_dict() == Config.fromfile(base).to_dict()


def test_names_are_unique():
    names = [path.name for path in (ROOT / 'configs').rglob('*.py')]
    assert len(names) == len(set(names))


def test_every_config_is_in_a_metafile():
    listed = {ROOT / model['Config'] for _, model in entries()}
    assert listed == set(CONFIGS)
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text(encoding='utf-8'))['Import']
    assert [ROOT / name for name in index] == METAFILES


def test_metafile_fields():
    aliases = {'kanet-kv_8xb64_in1k': 'kanet_kv_imagenet'}  # the promised path of the main entry
    for path, model in entries():
        collections = {c['Name']: c for c in yaml.safe_load(path.read_text(encoding='utf-8'))['Collections']}
        collection = collections[model['In Collection']]
        assert (ROOT / model['Config']).stem == aliases.get(model['Name'], model['Name'])
        assert (ROOT / collection['README']).is_file()
        assert (ROOT / collection['Code']['URL']).is_file()
    names = [model['Name'] for _, model in entries()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize('model', [model for _, model in entries()], ids=lambda model: model['Name'])
def test_metafile_counts(model):
    cfg = Config.fromfile(ROOT / model['Config'])
    with DefaultScope.overwrite_default_scope(cfg.default_scope), torch.device('meta'):
        network = revert_sync_batchnorm(MODELS.build({'data_preprocessor': cfg.get('data_preprocessor'), **cfg.model}))
    assert sum(p.numel() for p in network.parameters()) == model['Metadata']['Parameters']
    assert flops_of(network, cfg) == model['Metadata']['FLOPs']


def test_coco_from_scratch():
    """Every norm is synchronized, including lambda layers, neck and heads, and nothing is frozen."""
    cfg = Config.fromfile(next((ROOT / 'configs/lambda_resnet').glob('*lambda-r50*lsj-130k*.py')))
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(cfg.model).train()
    norms = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)}
    assert all(isinstance(m, torch.nn.SyncBatchNorm) for m in norms.values())
    assert {(m.eps, m.momentum, m.training) for m in norms.values()} == {(1e-3, 0.01, True)}
    parts = ('backbone', 'neck', 'roi_head.bbox_head', 'roi_head.mask_head')
    assert all(any(name.startswith(f'{part}.') for name in norms) for part in parts)
    assert sum(name.endswith(('query_norm', 'value_norm')) for name in norms) == 2 * 4
    assert all(p.requires_grad for p in model.parameters())
