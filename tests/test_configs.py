"""Every shipped config parses, builds and computes a loss; the metafiles say what is measured."""

import copy
import itertools

import pytest
import torch
import yaml
from mmengine.analysis import get_model_complexity_info
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope

from conftest import KANET_COUNTS, ROOT

CONFIGS = sorted(path for path in (ROOT / 'configs').glob('*/*.py') if path.parent.name != '_base_')
METAFILES = sorted((ROOT / 'configs').glob('*/metafile.yml'))
HOSTS = ('mmpretrain', 'mmseg', 'mmdet')


def entries():
    return [(path, model) for path in METAFILES for model in yaml.safe_load(path.read_text(encoding='utf-8'))['Models']]


def build(cfg):
    """The model, initialised without the pretrained weights that would have to be downloaded."""
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


def input_shape(cfg, most=10**6):
    """(C, H, W) that the config trains on, with H and W cut to ``most``."""
    size = next(step.crop_size for step in cfg.train_pipeline if 'crop_size' in step)
    height, width = (size, size) if isinstance(size, int) else size
    return (cfg.model.backbone.get('in_channels', 3), min(height, most), min(width, most))


def loss_of(model, scope, shape):
    """The loss of two random images, and the parameters that it should reach."""
    inputs = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    if scope == 'mmpretrain':
        from mmpretrain.structures import DataSample

        samples = [DataSample().set_gt_label(i) for i in (1, 7)]
    else:
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        labels = torch.randint(0, model.num_classes, (2, 1, *shape[1:]))
        meta = dict(img_shape=shape[1:])
        samples = [SegDataSample(gt_sem_seg=PixelData(data=each), metainfo=meta) for each in labels]
        model.data_preprocessor.size = shape[1:]
    data = model.data_preprocessor(dict(inputs=list(inputs), data_samples=samples), training=True)
    losses = model(**data, mode='loss')
    return sum(value for name, value in losses.items() if 'loss' in name)


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
        loss = loss_of(model, cfg.default_scope, input_shape(cfg, most=64))
        loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


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


def readme_of(folder):
    """The text of a folder's README and its models: (name, file name of the config, metadata, results)."""
    text = (ROOT / 'configs' / folder / 'README.md').read_text(encoding='utf-8')
    models = [model for path, model in entries() if path.parent.name == folder]
    assert models
    return text, [(m['Name'], m['Config'].rsplit('/', 1)[-1], m['Metadata'], m['Results']) for m in models]


def cells(text, name):
    """The cells of the table row that links to ``name``."""
    (row,) = (line for line in text.splitlines() if line.startswith('|') and f']({name})' in line)
    return [cell.strip() for cell in row.strip('|').split('|')]


def test_readme_of_kanet():
    """Every figure in the folder's README is the metafile's or the one that test_kanet.py counts."""
    text, models = readme_of('kanet')
    for name, file, metadata, results in models:
        figures = [metadata['Parameters'], metadata['FLOPs']]
        if '_in1k' in name:
            figures += KANET_COUNTS[Config.fromfile(ROOT / 'configs/kanet' / file).model.backbone.arch]
            assert cells(text, file)[2:6] == [f'{figure:,}' for figure in figures]
            continue
        paragraph = next(part for part in text.split('\n\n') if f']({file})' in part)
        if results:
            assert f'{results[0]["Metrics"]["Top 1 Accuracy"]:.2f} %' in paragraph
        else:
            assert all(f'{figure:,}' in paragraph for figure in figures)


def test_readme_of_kao_deeplabv2():
    """Parameters, FLOPs and the means over the seeds are the metafile's."""
    text, models = readme_of('kao_deeplabv2')
    for _, file, metadata, results in models:
        row = cells(text, file)
        assert {f'{metadata["Parameters"]:,}', f'{metadata["FLOPs"]:,}'} <= set(row)
        if results:
            metrics = results[0]['Metrics']
            seeds, mean, accuracy = [float(cell) for cell in row[1:4]], float(row[4]), float(row[5])
            assert mean == metrics['mIoU'] == pytest.approx(sum(seeds) / 3, abs=0.006)
            assert accuracy == metrics['aAcc']


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
