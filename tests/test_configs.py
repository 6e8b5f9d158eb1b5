"""Every shipped config parses, builds and computes a loss; the metafiles say what is measured."""

import itertools

import pytest
import torch
import yaml
from mmengine.analysis import get_model_complexity_info
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from conftest import KANET_COUNTS, ROOT

CONFIGS = sorted(path for path in (ROOT / 'configs').glob('*/*.py') if path.parent.name != '_base_')
METAFILES = sorted((ROOT / 'configs').glob('*/metafile.yml'))
HOSTS = ('mmpretrain', 'mmseg', 'mmdet')


def entries():
    return [(path, model) for path in METAFILES for model in yaml.safe_load(path.read_text(encoding='utf-8'))['Models']]


def build(cfg):
    model = MODELS.build(
        cfg.model
        if 'data_preprocessor' in cfg.model
        else {**cfg.model, 'data_preprocessor': cfg.get('data_preprocessor')}
    )
    model.init_weights()
    return model


def input_shape(cfg, most=None):
    """(C, H, W) that the config trains on, with H and W cut to ``most``."""
    size = next(step.crop_size for step in cfg.train_pipeline if 'crop_size' in step)
    size = min(size, most or size)
    return (cfg.model.backbone.get('in_channels', 3), size, size)


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.name)
def test_config(path, tmp_path):
    """Names its host, survives a dump, and its model computes a finite loss with a gradient for every parameter."""
    cfg = Config.fromfile(path)
    assert cfg.default_scope in HOSTS
    cfg.dump(tmp_path / 'dump.py')
    assert Config.fromfile(tmp_path / 'dump.py').to_dict() == cfg.to_dict()
    assert cfg.train_dataloader.batch_size > 0
    assert cfg.auto_scale_lr.base_batch_size > 0
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = build(cfg)
        from mmpretrain.structures import DataSample

        inputs = torch.randint(0, 256, (2, *input_shape(cfg, most=64)), dtype=torch.uint8)
        samples = [DataSample().set_gt_label(i) for i in (1, 7)]
        data = model.data_preprocessor(dict(inputs=inputs, data_samples=samples), training=True)
        loss = model(**data, mode='loss')['loss']
        loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters())


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
    """Parameters and FLOPs are those of mmengine.analysis on the whole classifier."""
    cfg = Config.fromfile(ROOT / model['Config'])
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        network = build(cfg).eval()
    inputs = torch.randn(1, *input_shape(cfg))
    measured = get_model_complexity_info(network, inputs=inputs, show_table=False, show_arch=False)
    assert measured['params'] == model['Metadata']['Parameters']
    assert measured['flops'] == model['Metadata']['FLOPs']


def test_readme_of_kanet():
    """Every figure in the folder's README is the metafile's or the one that test_kanet.py counts."""
    text = (ROOT / 'configs/kanet/README.md').read_text(encoding='utf-8')
    for _, model in entries():
        name, metadata = model['Config'].rsplit('/', 1)[-1], model['Metadata']
        if '_in1k' in model['Name']:
            arch = Config.fromfile(ROOT / model['Config']).model.backbone.arch
            figures = (metadata['Parameters'], metadata['FLOPs'], *KANET_COUNTS[arch])
            row = next(line for line in text.splitlines() if line.startswith('|') and f']({name})' in line)
            assert '| ' + ' | '.join(f'{figure:,}' for figure in figures) + ' |' in row
        else:
            paragraph = next(part for part in text.split('\n\n') if f']({name})' in part)
            assert f'{model["Results"][0]["Metrics"]["Top 1 Accuracy"]:.2f} %' in paragraph


def test_paper_recipe():
    """Section 4.1 of the paper, in numbers."""
    cfg = Config.fromfile(ROOT / 'configs/kanet/kanet_kv_imagenet.py')
    assert cfg.train_cfg.max_epochs == 150
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.momentum) == ('SGD', 0.1, 0.9)
    assert (cfg.param_scheduler.milestones, cfg.param_scheduler.gamma) == ([80, 105, 120], 0.1)
    assert cfg.auto_scale_lr.base_batch_size == 8 * cfg.train_dataloader.batch_size == 512
    assert cfg.model.neck.drop_rate == pytest.approx(1 - 0.8)
    steps = list(itertools.chain(cfg.train_pipeline, cfg.test_pipeline))
    assert {step.scale for step in steps if step.type == 'Resize'} == {(256, 256)}
    assert {step.crop_size for step in steps if 'Crop' in step.type} == {224}
