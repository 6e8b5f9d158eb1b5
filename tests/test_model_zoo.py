"""The shipped configs by name: in MMPretrain's index, in the inferencers of all hosts, and by get_config."""

import sys

import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.dataset import Compose, default_collate, pseudo_collate
from mmengine.registry import MODELS, TRANSFORMS, DefaultScope
from mmengine.runner import save_checkpoint
from mmpretrain import ImageClassificationInferencer, list_models
from mmpretrain.apis.model import ModelHub
from PIL import Image

import mmkron
from mmkron import model_zoo
from support.errors import raises
from support.tools import ROOT

MODELS_BY_NAME = {
    model['Name']: model
    for path in sorted(ROOT.glob('configs/*/metafile.yml'))
    for model in yaml.safe_load(path.read_text(encoding='utf-8'))['Models']
}
CLASSIFIERS = [
    name
    for name, model in MODELS_BY_NAME.items()
    if any(result['Task'] == 'Image Classification' for result in model['Results'])
]


@pytest.fixture(scope='module')
def registered():
    """Register the models twice, before and after MMPretrain has read its own index."""
    first = mmkron.register_models()
    list_models()
    return first, mmkron.register_models()


@pytest.fixture(scope='module')
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp('picture') / 'picture.png'
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (72, 96, 3), dtype=np.uint8)).save(path)
    return str(path)


def test_public_names():
    """Public names are imported on first access."""
    assert set(mmkron.__all__) <= set(dir(mmkron))
    for name in set(mmkron.__all__) - {'__version__'}:
        assert getattr(mmkron, name).__name__ == name
    with raises(AttributeError, 'no_such_name'):
        _ = mmkron.no_such_name


def test_registered_models(registered):
    """Every classifier, and no other model, has the name and the config of its metafile."""
    first, second = registered
    assert first == second
    assert sorted(first) == sorted(CLASSIFIERS)
    assert list_models('*kanet*') == sorted(name for name in CLASSIFIERS if 'kanet' in name)
    assert 'resnet50_8xb32_in1k' in list_models('resnet50')
    assert not (set(MODELS_BY_NAME) - set(CLASSIFIERS)) & set(list_models())
    for name in CLASSIFIERS:
        info = ModelHub.get(name.upper())
        assert (info.name, info.weights) == (name, None)
        assert info.config.to_dict() == Config.fromfile(ROOT / MODELS_BY_NAME[name]['Config']).to_dict(), name
        assert info.full_model.metadata.flops == MODELS_BY_NAME[name]['Metadata']['FLOPs']


@pytest.mark.parametrize('name', ['kanet-kv_8xb64_in1k', 'qkformer_1xb64_cifar10'])
def test_classification_inferencer(registered, picture, name):
    """The scores equal those of the config's test pipeline, which reads the file by our transform."""
    inferencer = ImageClassificationInferencer(name, device='cpu')
    (result,) = inferencer(picture)
    steps = mmkron.get_config(name).test_dataloader.dataset.pipeline
    if not any(step.type.endswith('LoadImageFromFile') for step in steps):
        steps = [dict(type='mmkron.LoadImageFromFile'), *steps]
    with DefaultScope.overwrite_default_scope('mmpretrain'), torch.no_grad():
        pipeline = Compose([TRANSFORMS.build(step) for step in steps])
        (sample,) = inferencer.model.test_step(default_collate([pipeline(dict(img_path=picture))]))
    np.testing.assert_array_equal(result['pred_scores'], sample.pred_score.numpy())
    assert result['pred_class'] == inferencer.classes[int(sample.pred_score.argmax())]


DENSE = {
    'mmdet': 'mask-rcnn_lambda-r17-w16_fpn_1xb8-6e_scenes-128x128',
    'mmseg': 'deeplabv2-kao-kv_r18-w16-d8_1xb8-2k_scenes-128x128',
}


@pytest.mark.parametrize('host', DENSE)
def test_dense_inferencers(host, picture, tmp_path):
    """The inferencers of the hosts accept the configs, and predict as the model does with the test pipeline."""
    pytest.importorskip('mmcv._ext', reason='mmdet and mmseg need the compiled operators of mmcv')
    cfg = mmkron.get_config(DENSE[host])
    with DefaultScope.overwrite_default_scope(host):
        torch.manual_seed(0)
        model = MODELS.build(mmkron.get_config(DENSE[host]).model)
        model.init_weights()
        save_checkpoint(dict(state_dict=model.state_dict(), meta={}), str(tmp_path / 'a.pth'))
        pipeline = Compose([TRANSFORMS.build(step) for step in cfg.test_pipeline if 'Annotations' not in step.type])
        data = pseudo_collate([pipeline(dict(img_path=picture, img_id=0, reduce_zero_label=False, seg_fields=[]))])
        with torch.no_grad():
            (expected,) = model.eval().test_step(data)
        if host == 'mmdet':
            from mmdet.apis import DetInferencer

            inferencer = DetInferencer(cfg, str(tmp_path / 'a.pth'), device='cpu', show_progress=False)
            (result,) = inferencer(picture, return_datasamples=True)['predictions']
            assert len(result.pred_instances) > 0
            assert torch.equal(result.pred_instances.scores, expected.pred_instances.scores)
            assert torch.equal(result.pred_instances.bboxes, expected.pred_instances.bboxes)
        else:
            from mmseg.apis import MMSegInferencer

            inferencer = MMSegInferencer(cfg, str(tmp_path / 'a.pth'), device='cpu')
            result = inferencer(picture, show=False)['predictions']
            assert len(np.unique(result)) > 1
            np.testing.assert_array_equal(result, expected.pred_sem_seg.data[0].numpy())
    assert cfg.to_dict() == mmkron.get_config(DENSE[host]).to_dict()


def test_inferencers_one_after_another(registered, picture):
    """An inferencer leaves its host's default scope set, which does not change the results of the next ones."""
    pytest.importorskip('mmcv._ext', reason='mmdet and mmseg need the compiled operators of mmcv')
    from mmdet.apis import DetInferencer
    from mmseg.apis import MMSegInferencer

    def classify():
        torch.manual_seed(0)
        inferencer = ImageClassificationInferencer('kanet-kv_8xb64_in1k', pretrained=False, device='cpu')
        return inferencer(picture)[0]['pred_scores']

    def segment():
        torch.manual_seed(0)
        return MMSegInferencer(mmkron.get_config(DENSE['mmseg']), device='cpu')(picture, show=False)['predictions']

    scores, classes = classify(), segment()
    DetInferencer(mmkron.get_config(DENSE['mmdet']), device='cpu', show_progress=False)(picture)
    np.testing.assert_array_equal(segment(), classes)
    np.testing.assert_array_equal(classify(), scores)


def test_get_config():
    """Names, aliases and files of metafiles are accepted; each call returns a new config."""
    path = ROOT / 'configs/kanet/kanet_kv_imagenet.py'
    expected = Config.fromfile(path).to_dict()
    for name in ('kanet_kv_imagenet', 'kanet-kv_8xb64_in1k', 'KANet-KV_8xb64_in1k', 'kanet-kv'):
        assert mmkron.get_config(name).to_dict() == expected
    mmkron.get_config('kanet-kv').model.backbone.arch = 'changed'
    assert mmkron.get_config('kanet-kv').to_dict() == expected
    aliases = {model['Alias']: model for model in MODELS_BY_NAME.values() if 'Alias' in model}
    assert {'kanet-kv', 'kanet-qkv', 'qkformer-hst-10-384', 'lambda-mobilenet-v2'} <= set(aliases)
    files = {(ROOT / model['Config']).stem for model in MODELS_BY_NAME.values()}
    assert mmkron.list_configs() == sorted({*MODELS_BY_NAME, *aliases, *files})
    assert mmkron.list_configs('FPN_*') == sorted(name for name in files if name.startswith('fpn_'))
    assert mmkron.list_configs('fpn') == []


@pytest.mark.parametrize('name', ['kanet-kw', '0815', '../../secret'])
def test_unknown_names(name):
    with raises(ValueError, 'name', name) as error:
        mmkron.get_config(name)
    assert ('kanet-kv' in str(error.value)) == (name == 'kanet-kw')  # similar names are listed
    with raises(TypeError, 'name', None):
        mmkron.get_config(None)
    with raises(TypeError, 'pattern', None):
        mmkron.list_configs(None)


def test_names_of_two_configs(monkeypatch):
    models = [dict(Name='a', Config='configs/x/b.py'), dict(Name='c', Alias=['d', 'B'], Config='configs/x/c.py')]
    monkeypatch.setattr(model_zoo, 'load_metafiles', lambda: ([], models))
    with raises(ValueError, "'B'", 'configs/x/b.py'):
        model_zoo._config_paths.__wrapped__()


def test_missing_parts(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'mmpretrain.apis.model', None)
    with raises(ImportError, 'mmpretrain'):
        mmkron.register_models()
    monkeypatch.setattr(model_zoo, 'PACKAGE', tmp_path / 'mmkron')
    with raises(FileNotFoundError, 'model-index.yml'):
        model_zoo.index_root()
    (tmp_path / 'model-index.yml').touch()
    assert model_zoo.index_root() == tmp_path
