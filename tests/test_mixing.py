"""Snippets of README and cookbook in the hosts' own configs, and weights of a classifier in dense models."""

import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import load_checkpoint, save_checkpoint

from mmkron.layers import KroneckerAttention2d, LambdaLayer
from mmkron.models import ASPPV2Head, KANet, KAOHead, KroneckerNeck, LambdaResNet, QKFormer, SpikeRateNeck
from support.docs import read_blocks
from support.tools import ROOT


def snippets():
    """Return the snippets of README and cookbook by their marker."""
    blocks = [block for page in ('README.md', 'docs/cookbook.md') for block in read_blocks(ROOT / page, 'python')]
    found = [(block.value, block.text) for block in blocks if block.key == 'mix']
    assert len(dict(found)) == len(found)
    return dict(found)


def mix(name, tmp_path):
    """Return the config of a snippet in the folder of the host's config; its name begins with the host."""
    configs = Path(import_module(name.split()[0]).__file__).parent / '.mim' / 'configs'
    text = snippets()[name]
    name = re.search(r"_base_ = '\./(.+?)'", text).group(1)
    (base,) = configs.rglob(name)
    (tmp_path / 'mixed.py').write_text(text.replace(f'./{name}', str(base)))
    return Config.fromfile(tmp_path / 'mixed.py')


def build(cfg, host):
    with DefaultScope.overwrite_default_scope(host):
        if cfg.get('data_preprocessor'):
            cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
        return revert_sync_batchnorm(MODELS.build(cfg.model))


@pytest.fixture(scope='module')
def classifier_checkpoint(tmp_path_factory):
    """Return the path of a checkpoint of the ImageNet classifier, and the weights of its backbone."""
    cfg = Config.fromfile(ROOT / 'configs/kanet/kanet_kv_imagenet.py')
    torch.manual_seed(3)
    model = build(cfg, 'mmpretrain')
    model.init_weights()
    path = tmp_path_factory.mktemp('weights') / 'kanet-kv.pth'
    save_checkpoint(dict(state_dict=model.state_dict(), meta={}), str(path))
    return path, model.backbone.state_dict()


def test_mmpretrain(tmp_path):
    cfg = mix('mmpretrain', tmp_path)
    model = build(cfg, 'mmpretrain').eval()
    assert isinstance(model.backbone, KANet)
    x = torch.randn(2, 3, 65, 97)
    features = model.backbone(x)[0].mean((2, 3))
    torch.testing.assert_close(model(x), model.head.fc(features))


def test_mmseg(tmp_path):
    cfg = mix('mmseg', tmp_path)
    model = build(cfg, 'mmseg').eval()
    layers = [m for m in model.backbone.modules() if isinstance(m, KroneckerAttention2d)]
    assert [layer.channels for layer in layers] == [256] * 6 + [512] * 3
    x = torch.randn(1, 3, 65, 97)
    with torch.no_grad():
        first = model.whole_inference(x, [dict(img_shape=(65, 97))])
        assert first.shape == (1, 19, 65, 97)
        for layer in layers:
            layer.value_map.weight.add_(0.1)
        assert not torch.allclose(model.whole_inference(x, [dict(img_shape=(65, 97))]), first)


def test_layer_decay(tmp_path):
    """The learning rate falls by a factor of 0.8 per layer, from the head to the stem."""
    cfg = mix('mmpretrain layer decay', tmp_path)
    model = build(cfg, 'mmpretrain')
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        optimizer = build_optim_wrapper(model, cfg.optim_wrapper).optimizer
    rates = {id(group['params'][0]): group['lr'] for group in optimizer.param_groups}
    base = cfg.optim_wrapper.optimizer.lr
    for name, parameter in model.backbone.named_parameters():
        depth, layers = model.backbone.get_layer_depth(f'backbone.{name}', 'backbone.')
        assert rates[id(parameter)] == pytest.approx(base * 0.8 ** (layers - 1 - depth)), name
    assert rates[id(model.head.fc.weight)] == pytest.approx(base)
    assert len(set(rates.values())) > 5


def test_mmpretrain_lambda(tmp_path):
    model = build(mix('mmpretrain lambda', tmp_path), 'mmpretrain').eval()
    assert isinstance(model.backbone, LambdaResNet)
    x = torch.randn(2, 3, 65, 97)
    torch.testing.assert_close(model(x), model.head.fc(model.backbone(x)[0].mean((2, 3))))


def test_mmseg_lambda(tmp_path):
    """The plug-ins do not change the outputs of a trained network before they are trained."""
    model = build(mix('mmseg lambda', tmp_path), 'mmseg').eval()
    layers = [m for m in model.backbone.modules() if isinstance(m, LambdaLayer)]
    assert [layer.dim for layer in layers] == [256] * 6 + [512] * 3
    cfg = mix('mmseg lambda', tmp_path)
    cfg.model.backbone.plugins = None
    plain = build(cfg, 'mmseg').eval()
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert all('lambda_layer' in name for name in unexpected)
    x, meta = torch.randn(1, 3, 65, 97), [dict(img_shape=(65, 97))]
    with torch.no_grad():
        first = model.whole_inference(x, meta)
        torch.testing.assert_close(first, plain.whole_inference(x, meta))
        for layer in layers:
            layer.value_norm.weight.fill_(0.1)
        assert not torch.allclose(model.whole_inference(x, meta), first)


@pytest.mark.parametrize('name', ['pspnet', 'fcn', 'upernet'])
def test_mmseg_heads_and_neck(name, tmp_path):
    """Each part is in its place and affects the logits; the neck is the identity at first."""
    cfg = mix(f'mmseg {name}', tmp_path)
    model = build(cfg, 'mmseg').eval()
    x = torch.randn(1, 3, 65, 97)
    part = model.neck if name == 'upernet' else model.decode_head
    assert isinstance(part, dict(pspnet=KAOHead, fcn=ASPPV2Head, upernet=KroneckerNeck)[name])
    with torch.no_grad():
        features = model.backbone(x)
        first = model.whole_inference(x, [dict(img_shape=(65, 97))])
        assert first.shape == (1, model.num_classes, 65, 97)
        if name == 'upernet':
            torch.testing.assert_close(model.decode_head(features), model.decode_head(model.neck(features)))
            part.scales['3'].fill_(0.5)
        elif name == 'pspnet':
            part.attention.value_map.weight.normal_()
        else:
            part.convs[3].weight.mul_(2)
        assert not torch.allclose(model.whole_inference(x, [dict(img_shape=(65, 97))]), first)
        assert all(p.requires_grad for p in part.parameters())


@pytest.mark.parametrize('name', ['retinanet', 'mask-rcnn'])
def test_mmdet_neck_and_plugin(name, tmp_path):
    """The refined pyramid equals the host's at first, and every new parameter has a gradient."""
    cfg = mix(f'mmdet {name}', tmp_path)
    model = build(cfg, 'mmdet')
    fpn, neck = model.neck
    assert isinstance(neck, KroneckerNeck)
    plugins = [m for m in model.backbone.modules() if isinstance(m, KroneckerAttention2d)]
    assert len(plugins) == (9 if name == 'mask-rcnn' else 0)
    x = torch.randn(1, 3, 128, 192)  # the last level is 1 x 2: coefficients need two keys that differ
    levels = model.backbone(x)
    for out, plain in zip(model.neck(levels), fpn(levels)):
        assert torch.equal(out, plain)
    with torch.no_grad():
        for scale in neck.scales.values():
            scale.fill_(0.1)
        for layer in plugins:
            layer.value_map.weight.normal_(std=0.01)
    losses = model.train()(x, [detection_sample((128, 192))], mode='loss')
    values = [v for value in losses.values() for v in (value if isinstance(value, list) else [value])]
    total = sum(v.sum() for v in values if v.requires_grad)
    assert total.isfinite()
    total.backward()
    for module in (neck, *plugins):
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


def detection_sample(size):
    """Return a sample with one box and mask on an image of ``size``."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    sample = DetDataSample(metainfo=dict(img_shape=size, pad_shape=size, ori_shape=size, scale_factor=(1, 1)))
    masks = np.zeros((1, *size), np.uint8)
    masks[0, 20:80, 10:70] = 1
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor([[10.0, 20.0, 70.0, 80.0]]), labels=torch.tensor([3]), masks=BitmapMasks(masks, *size)
    )
    return sample


def lambda_layers(model):
    return [m for m in model.backbone.modules() if isinstance(m, LambdaLayer)]


@pytest.mark.parametrize('name', ['mask-rcnn', 'retinanet'])
def test_mmdet_lambda(name, tmp_path):
    """The host's own config trains the backbone: every lambda layer has a gradient."""
    cfg = mix(f'mmdet lambda {name}', tmp_path)
    cfg.model.backbone.zero_init_residual = False  # a residual branch that starts at zero hands no gradient down
    model = build(cfg, 'mmdet')
    assert isinstance(model.backbone, LambdaResNet)
    assert model.backbone.out_channels == tuple(cfg.model.neck.in_channels)
    losses = model.train()(torch.randn(1, 3, 128, 160), [detection_sample((128, 160))], mode='loss')
    values = [v for value in losses.values() for v in (value if isinstance(value, list) else [value])]
    total = sum(v.sum() for v in values if v.requires_grad)
    assert total.isfinite()
    total.backward()
    layers = lambda_layers(model)
    assert [layer.dim for layer in layers] == [256] + [512] * 3
    for layer in layers:
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.parameters())


def test_mmdet_lambda_plugin(tmp_path):
    """The plug-ins do not change the outputs of a trained backbone before they are trained."""
    cfg = mix('mmdet lambda plug-in', tmp_path)
    model = build(cfg, 'mmdet').eval()
    assert [layer.dim for layer in lambda_layers(model)] == [256] * 6 + [512] * 3
    cfg.model.backbone.pop('plugins')
    plain = build(cfg, 'mmdet').eval()
    assert plain.load_state_dict(model.state_dict(), strict=False).missing_keys == []
    x = torch.randn(1, 3, 65, 97)
    with torch.no_grad():
        for level, expected in zip(model.backbone(x), plain.backbone(x)):
            torch.testing.assert_close(level, expected)
        lambda_layers(model)[-1].value_norm.weight.fill_(0.1)
        assert not torch.allclose(model.backbone(x)[3], plain.backbone(x)[3])


def test_mmseg_lambda_upernet(tmp_path):
    cfg = mix('mmseg lambda upernet', tmp_path)
    cfg.model.backbone.zero_init_residual = False
    model = build(cfg, 'mmseg').eval()
    assert isinstance(model.backbone, LambdaResNet)
    x, meta = torch.randn(1, 3, 65, 97), [dict(img_shape=(65, 97))]
    with torch.no_grad():
        first = model.whole_inference(x, meta)
        assert first.shape == (1, 150, 65, 97)
        lambda_layers(model)[-1].position_table.zero_()
        assert not torch.allclose(model.whole_inference(x, meta), first)


def build_spiking(name, tmp_path):
    """Return a model whose neurons fire at every depth, unlike those of an untrained one."""
    torch.manual_seed(0)
    model = build(mix(name, tmp_path), name.split()[0]).eval()
    assert isinstance(model.backbone, QKFormer)
    with torch.no_grad():
        for part in model.backbone.modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                part.weight.uniform_(2, 4)
                part.bias.uniform_(0, 2)
        assert all(level.any() for level in model.backbone(torch.randn(1, 3, 65, 97)))
    return model


def test_mmpretrain_qkformer(tmp_path):
    """The logits come from the mean of the last map, and do not depend on the other samples."""
    model = build_spiking('mmpretrain qkformer', tmp_path)
    x = torch.randn(2, 3, 65, 97)
    with torch.no_grad():
        logits = model(x)
        torch.testing.assert_close(logits, model.head.fc(model.backbone(x)[0].mean((2, 3))))
        assert not torch.allclose(logits[0], logits[1])


@pytest.mark.parametrize('name', ['qkformer upernet', 'qkformer steps'])
def test_mmseg_qkformer(name, tmp_path):
    """The logits are equal if a neck computes the mean over time."""
    model = build_spiking(f'mmseg {name}', tmp_path)
    x, meta = torch.randn(1, 3, 65, 97), [dict(img_shape=(65, 97))]
    with torch.no_grad():
        first = model.whole_inference(x, meta)
        assert first.shape == (1, 150, 65, 97)
        if name == 'qkformer steps':
            assert isinstance(model.neck, SpikeRateNeck)
            assert model.backbone(x)[0].shape[:2] == (4, 1)
            model.backbone.out_mode = 'mean'
            torch.testing.assert_close(model.decode_head.predict(model.backbone(x), meta, model.test_cfg), first)
        else:
            model.decode_head.lateral_convs[0].conv.weight.zero_()
            assert not torch.allclose(model.whole_inference(x, meta), first)


@pytest.mark.parametrize('name', ['mask-rcnn', 'retinanet'])
def test_mmdet_qkformer(name, tmp_path):
    """The host's own config trains the backbone; the sizes of the levels match the strides of the anchors."""
    cfg = mix(f'mmdet qkformer {name}', tmp_path)
    model = build(cfg, 'mmdet')
    assert isinstance(model.backbone, QKFormer)
    assert model.backbone.out_channels == tuple(cfg.model.neck.in_channels)
    head = model.rpn_head if name == 'mask-rcnn' else model.bbox_head
    sizes = [tuple(x.shape[2:]) for x in model.extract_feat(torch.zeros(1, 3, 128, 160))]
    assert sizes == [(-(-128 // s), -(-160 // s)) for s, _ in head.prior_generator.strides]
    losses = model.train()(torch.randn(1, 3, 128, 160), [detection_sample((128, 160))], mode='loss')
    values = [v for value in losses.values() for v in (value if isinstance(value, list) else [value])]
    total = sum(v.sum() for v in values if v.requires_grad)
    assert total.isfinite()
    total.backward()
    assert all(p.grad is not None for p in model.backbone.parameters())
    assert model.backbone.stages[2][1].attention.operand_map.conv.weight.grad.abs().max() > 0


def test_mmdet(tmp_path, classifier_checkpoint):
    """RetinaNet on KANet loads all weights of the classifier, freezes what the snippet says, and has finite losses."""
    path, weights = classifier_checkpoint
    cfg = mix('mmdet', tmp_path)
    cfg.model.backbone.init_cfg.checkpoint = str(path)
    model = build(cfg, 'mmdet')
    model.init_weights()
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert model.backbone.out_strides == (4, 8, 16, 32)
    losses = model.train()(torch.randn(1, 3, 128, 160), [detection_sample((128, 160))], mode='loss')
    total = sum(torch.stack(value).sum() for value in losses.values())
    assert total.isfinite()
    total.backward()
    frozen = [name for name, p in model.backbone.named_parameters() if p.grad is None]
    assert frozen
    assert all(name.startswith(('stem.', 'stages.0.')) for name in frozen)


def test_mmdet_weights(tmp_path):
    """RetinaNet on QKFormer loads all weights of the classifier and freezes its first stage."""
    torch.manual_seed(3)
    classifier = build(Config.fromfile(ROOT / 'configs/qkformer/qkformer-hst-10-384_8xb32_in1k.py'), 'mmpretrain')
    path = tmp_path / 'qkformer.pth'
    save_checkpoint(dict(state_dict=classifier.state_dict(), meta={}), str(path))
    cfg = mix('mmdet weights', tmp_path)
    cfg.model.backbone.init_cfg.checkpoint = str(path)
    model = build(cfg, 'mmdet')
    model.init_weights()
    weights, ours = classifier.backbone.state_dict(), model.backbone.state_dict()
    assert ours.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in ours.items())
    for name, parameter in model.backbone.named_parameters():
        assert parameter.requires_grad != name.startswith(('stem.', 'stages.0.')), name


def test_classifier_weights_in_the_segmentor(classifier_checkpoint):
    """The segmentor on KANet loads the backbone of the classifier with no missing or unexpected key."""
    path, weights = classifier_checkpoint
    cfg = Config.fromfile(ROOT / 'configs/kanet/fpn_kanet-kv_4xb2-80k_cityscapes-512x1024.py')
    cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    model = build(cfg, 'mmseg')
    model.init_weights()
    assert all(torch.equal(value, weights[name]) for name, value in model.backbone.state_dict().items())
    missing, unexpected = model.backbone.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == ([], [])
    checkpoint = torch.load(path, weights_only=True)['state_dict']
    missing, unexpected = model.load_state_dict(checkpoint, strict=False)
    assert not [name for name in (*missing, *unexpected) if name.startswith('backbone.')]


@pytest.mark.parametrize('out_indices', [(1, 2, 3, 4), (2,)])
def test_classifier_weights_load_without_a_rest(classifier_checkpoint, out_indices, capsys):
    """No key of the backbone is missing or unexpected, although the dense model has no last convolution."""
    path, weights = classifier_checkpoint
    backbone = KANet(
        'kanet-kv', out_indices=out_indices, init_cfg=dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    )
    backbone.init_weights()
    assert all(torch.equal(value, weights[name]) for name, value in backbone.state_dict().items())
    fresh = KANet('kanet-kv', out_indices=out_indices)
    missing, unexpected = fresh.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == ([], [])
    missing, unexpected = fresh.load_state_dict({**weights, 'stages.9.weight': torch.zeros(1)}, strict=False)
    assert (missing, unexpected) == ([], ['stages.9.weight'])
    whole = torch.nn.ModuleDict(dict(backbone=fresh))
    load_checkpoint(whole, str(path), map_location='cpu', strict=False)
    assert 'stages.5' not in capsys.readouterr().out


def test_torch_snippet():
    scope = {}
    exec(snippets()['torch'], scope)  # README's own text
    assert scope['y'].shape == (2, 64, 40, 56)
    torch.testing.assert_close(scope['y'][:1], scope['kronecker_attention_kv'](scope['x'][:1]))
