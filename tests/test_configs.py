"""Every shipped config parses, builds and computes a loss; the counts of the metafiles are right."""

import copy
import re

import pytest
import torch
import yaml
from mmengine.config import Config, ConfigDict
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope

from support.detection import detection_sample, total_loss
from support.flops import count_flops
from support.tools import ROOT

# Sharded runs train the model of another config, which test_fsdp_configs checks.
FSDP_CONFIGS = sorted((ROOT / 'configs').glob('*/*-fsdp*.py'))
CONFIGS = sorted({p for p in (ROOT / 'configs').glob('*/*.py') if p.parent.name != '_base_'} - set(FSDP_CONFIGS))
METAFILES = sorted((ROOT / 'configs').glob('*/metafile.yml'))
TRAINED: list[ConfigDict] = []
HOSTS = ('mmpretrain', 'mmseg', 'mmdet')


def entries():
    return [(path, model) for path in METAFILES for model in yaml.safe_load(path.read_text(encoding='utf-8'))['Models']]


def build(cfg):
    """Return the model, initialized without pretrained weights, which would have to be downloaded."""
    cfg = copy.deepcopy(cfg)
    if (cfg.model.backbone.get('init_cfg') or {}).get('type') == 'Pretrained':
        cfg.model.backbone.pop('init_cfg')
    model = MODELS.build({'data_preprocessor': cfg.get('data_preprocessor'), **cfg.model})
    model.init_weights()
    return revert_sync_batchnorm(model)


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
    size = shape[1:]
    if scope == 'mmpretrain':
        from mmpretrain.structures import DataSample

        samples = [DataSample().set_gt_label(i) for i in (1, 7)]
    elif scope == 'mmdet':
        top, left = size[0] // 4, size[1] // 4
        samples = [detection_sample(size, [(left, top, 3 * left, 3 * top)], [label]) for label in (1, 7)]
        if model.data_preprocessor.batch_augments:
            model.data_preprocessor.batch_augments[0].size = size
        model.data_preprocessor.pad_size_divisor = 32
    else:
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        labels = torch.randint(0, model.num_classes, (2, 1, *size))
        samples = [SegDataSample(gt_sem_seg=PixelData(data=x), metainfo=dict(img_shape=size)) for x in labels]
        model.data_preprocessor.size = size
    inputs = [*torch.randint(0, 256, (2, *shape), dtype=torch.uint8)]
    data = model.data_preprocessor(dict(inputs=inputs, data_samples=samples), training=True)
    return total_loss({key: value for key, value in model(**data, mode='loss').items() if 'loss' in key})


class DenseParts(torch.nn.Module):
    """Parts of a detector that run on whole maps: backbone, neck, and the RPN or the one-stage head."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, x):
        head = self.detector.rpn_head if 'rpn_head' in dict(self.detector.named_children()) else self.detector.bbox_head
        return head(self.detector.extract_feat(x))


def flops_of(model, cfg):
    """Return the multiply-adds of a model; RoI heads are not counted, whose work depends on the proposals.

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

    Each model is trained once. A LambdaResNet of more than 50 layers only has more blocks of the same kinds;
    test_metafile_counts runs it.
    """
    cfg = Config.fromfile(path)
    assert cfg.default_scope in HOSTS
    cfg.dump(tmp_path / 'dump.py')
    assert Config.fromfile(tmp_path / 'dump.py').to_dict() == cfg.to_dict()
    assert cfg.train_dataloader.batch_size > 0
    assert cfg.auto_scale_lr.base_batch_size > 0
    deep = cfg.model.backbone.type == 'mmkron.LambdaResNet' and cfg.model.backbone.get('depth', 0) > 50
    if deep or cfg.model in TRAINED:
        return
    TRAINED.append(copy.deepcopy(cfg.model))
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = build(few_regions(cfg))
        loss = loss_of(model, cfg.default_scope, input_shape(cfg, most=64))
        loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_fsdp_configs():
    """A sharded config equals a listed config except for the runner and the strategy."""
    for path in FSDP_CONFIGS:
        cfg = Config.fromfile(path)
        assert (cfg.pop('runner_type'), cfg.pop('strategy').type) == ('mmkron.FlexibleRunner', 'mmkron.FSDPStrategy')
        base = path.with_name(re.search(r"'\./(.+?)'", path.read_text())[1])
        assert base in CONFIGS
        assert cfg.to_dict() == Config.fromfile(base).to_dict()


def test_metafiles():
    """Every config is listed once, and the paths of the metafiles exist."""
    names = [path.name for path in (ROOT / 'configs').rglob('*.py')]
    assert len(names) == len(set(names))
    models = [model for _, model in entries()]
    assert sorted(ROOT / model['Config'] for model in models) == CONFIGS
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text(encoding='utf-8'))['Import']
    assert [ROOT / name for name in index] == METAFILES
    collections = [c for path in METAFILES for c in yaml.safe_load(path.read_text(encoding='utf-8'))['Collections']]
    assert {model['In Collection'] for model in models} <= {collection['Name'] for collection in collections}
    for collection in collections:
        assert (ROOT / collection['README']).is_file()
        assert (ROOT / collection['Code']['URL']).is_file()


@pytest.mark.parametrize('model', [model for _, model in entries()], ids=lambda model: model['Name'])
def test_metafile_counts(model):
    cfg = Config.fromfile(ROOT / model['Config'])
    with DefaultScope.overwrite_default_scope(cfg.default_scope), torch.device('meta'):
        network = revert_sync_batchnorm(MODELS.build({'data_preprocessor': cfg.get('data_preprocessor'), **cfg.model}))
    assert sum(p.numel() for p in network.parameters()) == model['Metadata']['Parameters']
    assert flops_of(network, cfg) == model['Metadata']['FLOPs']
