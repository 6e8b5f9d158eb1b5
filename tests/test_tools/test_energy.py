"""The energy report: its figures against independent counts, and its errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from PIL import Image

from mmkron.datasets import Digits
from mmkron.layers import SpikingConv
from support.tools import load_tool

MODEL = """
arch = dict(
    dims=(8, 16), depths=(1, 1), heads=2, mlp_ratio=2, steps=3, attentions=('qkta', 'ssa'),
    stem=dict(widths=(4, 8), pools=(True, False), shortcut_from=1), pools=(False, True))
backbone = dict(type='mmkron.QKFormer', arch=arch)
"""
CLASSIFIER = f"""{MODEL}
default_scope = 'mmpretrain'
data_preprocessor = dict(num_classes=10, mean=[127.5], std=[127.5], to_rgb=False)
model = dict(
    type='ImageClassifier', backbone=dict(backbone, in_channels=1), neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=10, in_channels=16, topk=(1,)))
val_dataloader = dict(
    batch_size=4, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='mmkron.Digits', split='val', pipeline=[dict(type='PackInputs')]))
"""
SEGMENTOR = f"""{MODEL}
default_scope = 'mmseg'
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='SegDataPreProcessor', mean=[127.5] * 3, std=[60.0] * 3),
    backbone=dict(backbone, out_indices=(0, 1)),
    decode_head=dict(type='FPNHead', in_channels=[8, 16], in_index=[0, 1], feature_strides=[2, 4], channels=8,
                     num_classes=2),
    test_cfg=dict(mode='slide', crop_size=(16, 16), stride=(16, 16)))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='BaseSegDataset', data_root='.', data_prefix=dict(img_path='images', seg_map_path='labels'),
        img_suffix='.png', metainfo=dict(classes=('a', 'b')),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]))
"""
CONVENTIONS = ('paper', 'strict', 'events')


def build(config):
    """Return the model of a config in evaluation mode, with norms that make neurons fire."""
    cfg = Config.fromfile(str(config))
    if 'data_preprocessor' in cfg:
        cfg.model.data_preprocessor = cfg.data_preprocessor
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model)
    for module in model.backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 1, 3)
            module.running_var.fill_(0.05)
    return model.eval()


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Return a function that runs the tool in ``tmp_path`` and returns the JSON that it wrote."""
    tool = load_tool('analysis_tools/energy')
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        tool.main([str(arg) for arg in argv])
        return json.loads((tmp_path / 'out/energy.json').read_text())

    return run


@pytest.fixture
def classifier(tmp_path):
    (tmp_path / 'classifier.py').write_text(CLASSIFIER)
    model = build(tmp_path / 'classifier.py')
    torch.save(dict(state_dict=model.state_dict(), meta={}), tmp_path / 'a.pth')
    return model


def test_digits(report, classifier, tmp_path):
    """The energies follow from the inputs of the convolutions and, by the package's own counts, of the attentions."""
    figures = report('classifier.py', 'a.pth', '--batches', 2, '--out', 'out')
    layers = {layer['name']: layer for layer in figures['layers']}
    digits = Digits(split='val', pipeline=[])
    x = np.stack([digits.get_data_info(i)['img'] for i in range(8)]).reshape(8, 1, 8, 8)
    x = (torch.from_numpy(x).float() - 127.5) / 127.5
    inputs = {}
    for name, module in classifier.named_modules():
        if isinstance(module, SpikingConv):
            module.conv.register_forward_hook(lambda m, args, out, name=name: inputs.update({name: args[0].double()}))
    with torch.no_grad():
        pooled = classifier.neck(classifier.backbone(x))[-1]
    expected, kinds = dict.fromkeys(CONVENTIONS, 0.0), set()
    for name, value in inputs.items():
        layer, conv = layers[name], classifier.get_submodule(name).conv
        met = F.conv2d((value != 0).double(), torch.ones_like(conv.weight).double(), None, conv.stride, conv.padding)
        macs = met[0].numel() * conv.weight[0].numel()
        assert (layer['macs'], layer['events']) == (macs, met.sum().item() / 8)
        assert layer['mean'] == pytest.approx(value.mean().item(), rel=1e-12)
        assert layer['once'] == (name == 'backbone.stem.convs.0')
        if layer['once']:
            energies = dict.fromkeys(CONVENTIONS, 4.6e-9 * macs)
        else:
            counts = set(value.unique().tolist()) > {0, 1}
            kinds.add(counts)
            spikes = 0.9e-9 * value.mean().item() * macs * 3
            energies = dict(
                paper=spikes, strict=4.6e-9 * macs * 3 if counts else spikes, events=0.9e-9 * layer['events']
            )
        for convention, energy in energies.items():
            expected[convention] += energy
    assert kinds == {True, False}
    products = [layer for layer in figures['layers'] if layer['kind'] in ('sum', 'mask', 'product')]
    assert len(products) == 4
    for convention, value in expected.items():
        value += sum(layer['cost'][convention]['mJ'] for layer in products)
        assert figures['total'][convention]['mJ'] == pytest.approx(value, rel=1e-9)
        assert sum(stage[convention]['mJ'] for stage in figures['stages'].values()) == pytest.approx(value, rel=1e-9)
    assert list(figures['stages']) == list(figures['rates']) == ['stem', 'stage 1', 'stage 2']
    assert figures['samples'] == 8
    assert figures['dense_not_in_total'] == dict(macs=160, mJ=pytest.approx(160 * 4.6e-9))
    assert layers['head.fc']['mean'] == pytest.approx(pooled.mean().item(), rel=1e-6)
    rates = {neuron['name']: neuron['rate'] for neuron in figures['neurons']}
    # Their output is the input of the next convolution.
    assert rates['backbone.stem.convs.0.neuron'] == pytest.approx(inputs['backbone.stem.convs.1'].mean().item())
    assert {path.name for path in (tmp_path / 'out').iterdir()} >= {'energy.png', 'activity.png'}


def test_silent_network(report, classifier, tmp_path):
    """Silent neurons cost nothing; with another number of steps the first convolution still runs once."""
    for module in classifier.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.zeros_(module.weight)
    torch.save(dict(state_dict=classifier.state_dict()), tmp_path / 'silent.pth')
    options = ['--batches', 1, '--out', 'out', '--cfg-options', 'model.backbone.steps=5']
    figures = report('classifier.py', 'silent.pth', *options)
    first, second = figures['layers'][:2]
    assert (first['steps'], first['once'], second['once']) == (5, True, False)
    assert {name: total['mJ'] for name, total in figures['total'].items()} == {
        name: pytest.approx(first['macs'] * 4.6e-9) for name in CONVENTIONS
    }


def test_dense_prediction(report, tmp_path):
    """The samples of a sliding segmentor are crops; layers after the backbone are not in the totals."""
    pytest.importorskip('mmseg')
    for folder, shape, high in (('images', (24, 32, 3), 256), ('labels', (24, 32), 2)):
        (tmp_path / folder).mkdir()
        for i in range(2):
            pixels = np.random.default_rng(i).integers(0, high, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f'{i}.png')
    (tmp_path / 'dense.py').write_text(SEGMENTOR)
    torch.save(build(tmp_path / 'dense.py').state_dict(), tmp_path / 'a.pth')
    figures = report('dense.py', 'a.pth', '--out', 'out')
    assert figures['samples'] == 2 * 4
    layers = {layer['name']: layer for layer in figures['layers']}
    assert layers['backbone.stem.convs.0']['macs'] == 16 * 16 * 3 * 4 * 9
    # The two maps are a half and a quarter as high and wide.
    assert layers['decode_head.scale_heads.0.0.conv']['macs'] == 8 * 8 * 8 * 8 * 9
    assert layers['decode_head.scale_heads.1.0.conv']['macs'] == 4 * 4 * 16 * 8 * 9
    dense = [layer for layer in figures['layers'] if layer['kind'] == 'dense']
    assert not any(layer['name'].startswith('backbone') for layer in dense)
    assert figures['dense_not_in_total']['macs'] == sum(layer['macs'] for layer in dense)
    assert list(figures['stages']) == ['stem', 'stage 1', 'stage 2']


def test_bad_input(report, classifier, tiny_config, tmp_path):
    torch.save(dict(state_dict={'backbone.x': torch.zeros(1)}), tmp_path / 'other.pth')
    (tmp_path / 'empty.pth').touch()
    (tmp_path / 'file').touch()
    (tmp_path / 'taken/energy.png').mkdir(parents=True)
    for argv, named in (
        ('gone.py a.pth', 'gone.py'),
        ('classifier.py gone.pth', 'gone.pth'),
        ('classifier.py other.pth', 'backbone.x'),
        ('classifier.py empty.pth', 'empty.pth'),
        ('tiny.py none', 'spiking layer'),
        ('classifier.py a.pth --batches 0', '--batches'),
        ('classifier.py a.pth --device nowhere', '--device nowhere'),
        ('classifier.py a.pth --out file', "--out 'file'"),
        ('classifier.py a.pth --batches 1 --out taken', 'energy.png'),
        ('classifier.py a.pth --cfg-options model=None', 'model'),
        ('classifier.py a.pth --cfg-options val_dataloader=None', 'val_dataloader'),
    ):
        with pytest.raises(SystemExit, match=f'^error: .*{named}'):
            report(*argv.split())
    assert not (tmp_path / 'out').exists()
