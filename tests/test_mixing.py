"""Snippets of README and cookbook in the hosts' own configs, and weights of a classifier in dense models."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import load_checkpoint, save_checkpoint

from mmkron.layers import KroneckerAttention2d, LambdaLayer
from mmkron.models import ASPPV2Head, KANet, KAOHead, KroneckerNeck, LambdaResNet, QKFormer, SpikeRateNeck
from support.detection import detection_sample, total_loss
from support.docs import read_blocks
from support.tools import ROOT

META = [dict(img_shape=(65, 97))]


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
    """Build a model whose gradients reach all layers and whose neurons fire at every depth."""
    torch.manual_seed(0)
    backbone = cfg.model.backbone
    if backbone.type == 'mmkron.LambdaResNet' and host != 'mmpretrain':
        backbone.zero_init_residual = False
    with DefaultScope.overwrite_default_scope(host):
        if cfg.get('data_preprocessor'):
            cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
        model = revert_sync_batchnorm(MODELS.build(cfg.model))
    if isinstance(model.backbone, QKFormer):
        for part in model.backbone.modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                torch.nn.init.uniform_(part.weight, 2, 4)
                torch.nn.init.uniform_(part.bias, 0, 2)
    return model


def layers_of(model, kind):
    return [module for module in model.backbone.modules() if isinstance(module, kind)]


@pytest.mark.parametrize(
    ('name', 'backbone'),
    [('mmpretrain', KANet), ('mmpretrain lambda', LambdaResNet), ('mmpretrain qkformer', QKFormer)],
)
def test_classifiers(name, backbone, tmp_path):
    """The logits come from the mean of the last map, and do not depend on the other samples."""
    model = build(mix(name, tmp_path), 'mmpretrain').eval()
    assert isinstance(model.backbone, backbone)
    x = torch.randn(2, 3, 65, 97)
    with torch.no_grad():
        logits, features = model(x), model.backbone(x)[0]
        torch.testing.assert_close(logits, model.head.fc(features.mean((2, 3))))
        torch.testing.assert_close(model(x[1:]), logits[1:])
    assert features.any()
    assert not torch.equal(logits[0], logits[1])


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


@pytest.mark.parametrize(
    ('name', 'kind'),
    [('mmseg', KroneckerAttention2d), ('mmseg lambda', LambdaLayer), ('mmdet lambda plug-in', LambdaLayer)],
)
def test_plugins(name, kind, tmp_path):
    """The plug-ins do not change the outputs of a trained network before they are trained."""
    host = name.split()[0]
    model = build(mix(name, tmp_path), host).eval()
    layers = layers_of(model, kind)
    channels = [layer.channels if kind is KroneckerAttention2d else layer.dim for layer in layers]
    assert channels == [256] * 6 + [512] * 3
    cfg = mix(name, tmp_path)
    cfg.model.backbone.pop('plugins')
    plain = build(cfg, host).eval()
    assert plain.load_state_dict(model.state_dict(), strict=False).missing_keys == []
    x = torch.randn(1, 3, 65, 97)
    with torch.no_grad():
        expected = plain.backbone(x)
        for level, plain_level in zip(model.backbone(x), expected):
            torch.testing.assert_close(level, plain_level)
        for layer in layers:
            torch.nn.init.constant_(
                layer.value_map.weight if kind is KroneckerAttention2d else layer.value_norm.weight, 0.1
            )
        assert not torch.allclose(model.backbone(x)[3], expected[3])


SEGMENTORS = {
    'mmseg pspnet': (KAOHead, lambda model: model.decode_head.attention.value_map.weight.normal_()),
    'mmseg fcn': (ASPPV2Head, lambda model: model.decode_head.convs[3].weight.mul_(2)),
    'mmseg upernet': (KroneckerNeck, lambda model: model.neck.scales['3'].fill_(0.5)),
    'mmseg lambda upernet': (LambdaResNet, lambda model: layers_of(model, LambdaLayer)[-1].position_table.zero_()),
    'mmseg qkformer upernet': (QKFormer, lambda model: model.decode_head.lateral_convs[0].conv.weight.zero_()),
}


@pytest.mark.parametrize('name', SEGMENTORS)
def test_segmentors(name, tmp_path):
    """Each part affects the logits, which have the size of the image."""
    kind, change = SEGMENTORS[name]
    model = build(mix(name, tmp_path), 'mmseg').eval()
    assert any(isinstance(module, kind) for module in model.children())
    x = torch.randn(1, 3, 65, 97)
    with torch.no_grad():
        first = model.whole_inference(x, META)
        assert first.shape == (1, model.num_classes, 65, 97)
        if kind is KroneckerNeck:  # which is the identity at first
            features = model.backbone(x)
            torch.testing.assert_close(model.decode_head(features), model.decode_head(model.neck(features)))
        change(model)
        assert not torch.allclose(model.whole_inference(x, META), first)


def test_spike_rate_neck(tmp_path):
    """The logits are equal if the neck computes the mean over time."""
    model = build(mix('mmseg qkformer steps', tmp_path), 'mmseg').eval()
    assert isinstance(model.neck, SpikeRateNeck)
    x = torch.randn(1, 3, 65, 97)
    with torch.no_grad():
        first = model.whole_inference(x, META)
        assert model.backbone(x)[0].shape[:2] == (4, 1)
        model.backbone.out_mode = 'mean'
        torch.testing.assert_close(model.decode_head.predict(model.backbone(x), META, model.test_cfg), first)


def detector_loss(model, size):
    """Return the loss of a random image after its backward pass."""
    loss = total_loss(
        model.train()(torch.randn(1, 3, *size), [detection_sample(size, [(10, 20, 70, 80)])], mode='loss')
    )
    assert loss.isfinite()
    loss.backward()
    return loss


def all_have_gradients(*modules):
    return all(p.grad is not None and p.grad.abs().max() > 0 for module in modules for p in module.parameters())


@pytest.mark.parametrize('name', ['retinanet', 'mask-rcnn'])
def test_refined_pyramids(name, tmp_path):
    """The refined pyramid equals the host's at first, and every new parameter has a gradient."""
    model = build(mix(f'mmdet {name}', tmp_path), 'mmdet')
    fpn, neck = model.neck
    assert isinstance(neck, KroneckerNeck)
    plugins = layers_of(model, KroneckerAttention2d)
    assert len(plugins) == (9 if name == 'mask-rcnn' else 0)
    levels = model.backbone(torch.randn(1, 3, 128, 192))  # the last level is 1 x 2: coefficients need two keys
    for out, plain in zip(model.neck(levels), fpn(levels)):
        assert torch.equal(out, plain)
    with torch.no_grad():
        for scale in neck.scales.values():
            scale.fill_(0.1)
        for layer in plugins:
            layer.value_map.weight.normal_(std=0.01)
    detector_loss(model, (128, 192))
    assert all_have_gradients(neck, *plugins)


@pytest.mark.parametrize('name', ['mask-rcnn', 'retinanet'])
@pytest.mark.parametrize('family', ['lambda', 'qkformer'])
def test_detectors(name, family, tmp_path):
    """The host's own config trains the backbone; the sizes of the levels match the strides of the anchors."""
    cfg = mix(f'mmdet {family} {name}', tmp_path)
    model = build(cfg, 'mmdet')
    assert isinstance(model.backbone, LambdaResNet if family == 'lambda' else QKFormer)
    assert model.backbone.out_channels == tuple(cfg.model.neck.in_channels)
    head = model.rpn_head if name == 'mask-rcnn' else model.bbox_head
    sizes = [tuple(x.shape[2:]) for x in model.extract_feat(torch.zeros(1, 3, 128, 160))]
    assert sizes == [(-(-128 // s), -(-160 // s)) for s, _ in head.prior_generator.strides]
    detector_loss(model, (128, 160))
    if family == 'lambda':
        assert [layer.dim for layer in layers_of(model, LambdaLayer)] == [256] + [512] * 3
        assert all_have_gradients(*layers_of(model, LambdaLayer))
    else:
        assert all(p.grad is not None for p in model.backbone.parameters())
        assert model.backbone.stages[2][1].attention.operand_map.conv.weight.grad.abs().max() > 0


# ------------------------------------------------------------------------------------------- weights of a classifier


def save_classifier(config, path):
    """Save a checkpoint of a config's classifier, and return the weights of its backbone."""
    model = build(Config.fromfile(ROOT / 'configs' / config), 'mmpretrain')
    save_checkpoint(dict(state_dict=model.state_dict(), meta={}), str(path))
    return model.backbone.state_dict()


@pytest.fixture(scope='module')
def classifier_checkpoint(tmp_path_factory):
    """Return the path of a checkpoint of the ImageNet classifier, and the weights of its backbone."""
    path = tmp_path_factory.mktemp('weights') / 'kanet-kv.pth'
    return path, save_classifier('kanet/kanet_kv_imagenet.py', path)


@pytest.mark.parametrize('name', ['mmdet', 'mmdet weights'])
def test_detectors_with_weights(name, tmp_path, classifier_checkpoint):
    """RetinaNet loads all weights of the classifier's backbone, and freezes its first stage."""
    path, weights = classifier_checkpoint
    if name == 'mmdet weights':
        path = tmp_path / 'qkformer.pth'
        weights = save_classifier('qkformer/qkformer-hst-10-384_8xb32_in1k.py', path)
    cfg = mix(name, tmp_path)
    cfg.model.backbone.init_cfg.checkpoint = str(path)
    model = build(cfg, 'mmdet')
    model.init_weights()
    for key, value in model.backbone.state_dict().items():
        assert torch.equal(value, weights[key]), key
    if name == 'mmdet':
        detector_loss(model, (128, 160))
    for key, parameter in model.backbone.named_parameters():
        assert parameter.requires_grad != key.startswith(('stem.', 'stages.0.')), key


@pytest.mark.parametrize('out_indices', [(1, 2, 3, 4), (2,)])
def test_weights_of_unused_stages_are_dropped(classifier_checkpoint, out_indices, capsys):
    """No key of the backbone is missing or unexpected, although the dense model has no last convolution."""
    path, weights = classifier_checkpoint
    init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    backbone = KANet('kanet-kv', out_indices=out_indices, init_cfg=init_cfg)
    backbone.init_weights()
    assert all(torch.equal(value, weights[name]) for name, value in backbone.state_dict().items())
    fresh = KANet('kanet-kv', out_indices=out_indices)
    assert fresh.load_state_dict(weights, strict=False) == ([], [])
    unknown = {**weights, 'stages.9.weight': torch.zeros(1)}
    assert fresh.load_state_dict(unknown, strict=False) == ([], ['stages.9.weight'])
    whole = torch.nn.ModuleDict(dict(backbone=fresh))
    load_checkpoint(whole, str(path), map_location='cpu', strict=False)
    assert 'stages.5' not in capsys.readouterr().out
