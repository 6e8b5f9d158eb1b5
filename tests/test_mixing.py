"""README's snippets, each mixed into the host's own config; weights that flow from a classifier to dense models."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import load_checkpoint, save_checkpoint

from conftest import ROOT
from mmkron.layers import KroneckerAttention2d
from mmkron.models import KANet


def snippets():
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    return dict(re.findall(r'```python\n# mix: (\w+)\n(.*?)```', text, re.S))


def mix(host, tmp_path):
    """The config that a user gets who puts the snippet beside the host's config."""
    configs = Path(import_module(host).__file__).parent / '.mim' / 'configs'
    text = snippets()[host]
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
    """A checkpoint of the shipped ImageNet classifier, with weights that are not the initial ones."""
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


def test_mmdet(tmp_path, classifier_checkpoint):
    """RetinaNet on KANet: takes the classifier's weights whole, freezes what the snippet says, computes its losses."""
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    path, weights = classifier_checkpoint
    cfg = mix('mmdet', tmp_path)
    cfg.model.backbone.init_cfg.checkpoint = str(path)
    model = build(cfg, 'mmdet')
    model.init_weights()
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert model.backbone.out_strides == (4, 8, 16, 32)
    sample = DetDataSample(
        metainfo=dict(img_shape=(128, 160), pad_shape=(128, 160), ori_shape=(128, 160), scale_factor=(1, 1))
    )
    sample.gt_instances = InstanceData(bboxes=torch.tensor([[10.0, 20.0, 90.0, 100.0]]), labels=torch.tensor([3]))
    losses = model.train()(torch.randn(1, 3, 128, 160), [sample], mode='loss')
    total = sum(torch.stack(value).sum() for value in losses.values())
    assert total.isfinite()
    total.backward()
    frozen = [name for name, p in model.backbone.named_parameters() if p.grad is None]
    assert frozen
    assert all(name.startswith(('stem.', 'stages.0.')) for name in frozen)


@pytest.mark.parametrize('out_indices', [(1, 2, 3, 4), (2,)])
def test_classifier_weights_load_without_a_rest(classifier_checkpoint, out_indices, capsys):
    """Zero missing, zero unexpected backbone keys, though the dense model has no last convolution."""
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
