"""tools/deployment/export.py: files of ONNX and torch.export compute what the host's own test step computes."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch.nn.modules.batchnorm import _BatchNorm

from mmkron.layers import LIF
from mmkron.models import KroneckerNeck, SpikeRateNeck
from mmkron.utils.errors import LaunchError
from support.tools import ROOT, Touch, load_tool

TOOL = load_tool('deployment/export')

PREPROCESSOR = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
CLASSIFIER = dict(
    default_scope='mmpretrain',
    data_preprocessor=dict(num_classes=5, to_rgb=True, **PREPROCESSOR),
    model=dict(
        type='ImageClassifier',
        backbone=dict(type='mmkron.KANet', arch='kanet-kv', widen_factor=0.25, out_indices=3),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=5, in_channels=24, topk=(1,)),
    ),
)
SPIKING = dict(
    type='mmkron.QKFormer',
    arch=dict(
        dims=(8, 16),
        depths=(1, 1),
        heads=4,
        mlp_ratio=2,
        steps=2,
        attentions=('qkta', 'ssa'),
        stem=dict(widths=(4, 8), pools=(True, True), shortcut_from=1),
        pools=(True, False),
    ),
    out_indices=(0, 1),
    neuron_cfg=dict(v_threshold=0.2),
)
HEAD = dict(num_classes=4, channels=8, align_corners=False, norm_cfg=dict(type='BN'))


def segmentor(**parts):
    return dict(
        default_scope='mmseg',
        model=dict(
            type='EncoderDecoder',
            data_preprocessor=dict(type='SegDataPreProcessor', bgr_to_rgb=True, size=(1, 1), **PREPROCESSOR),
            train_cfg=dict(),
            test_cfg=dict(mode='whole'),
            **parts,
        ),
    )


KAO = segmentor(
    backbone=dict(type='mmkron.KANet', arch='kanet-kv', widen_factor=0.25, out_indices=(3,)),
    decode_head=dict(type='mmkron.KAOHead', in_channels=24, in_index=0, dropout_ratio=0.0, **HEAD),
)
FPN = segmentor(
    backbone=SPIKING,
    neck=dict(type='FPN', in_channels=[8, 16], out_channels=8, num_outs=2),
    decode_head=dict(type='FPNHead', in_channels=[8, 8], in_index=[0, 1], feature_strides=[4, 8], **HEAD),
)
UPERNET = segmentor(
    backbone=SPIKING,
    decode_head=dict(type='UPerHead', in_channels=[8, 16], in_index=[0, 1], pool_scales=(1, 2, 3), **HEAD),
)


def set_up(cfg, folder):
    """Write a config and a checkpoint; return their paths and the model, whose norms and neurons are not trivial."""
    path, weights = folder / 'config.py', folder / 'weights.pth'
    path.write_text('\n'.join(f'{key} = {value!r}' for key, value in cfg.items()))
    cfg = Config.fromfile(path)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        if cfg.get('data_preprocessor'):
            cfg.model.data_preprocessor = cfg.data_preprocessor
        model = MODELS.build(cfg.model)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, _BatchNorm) and part.bias is not None:
                part.weight.uniform_(0.5, 1.5)
                part.bias.uniform_(-0.2, 0.4)
    for name, weight in model.named_parameters():
        if name.endswith('value_map.weight'):
            torch.nn.init.normal_(weight, std=0.1)  # of a head that starts without attention
    torch.save(dict(state_dict=model.state_dict(), meta={}), weights)
    model.eval()
    return path, weights, model


def images(*shape):
    """Return random BGR images as a data pipeline does."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def run_onnx(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return [torch.from_numpy(out) for out in session.run(None, {'x': x.float().numpy()})]


def host_scores(model, x):
    """Return probabilities from MMPretrain's own test step."""
    with torch.no_grad():
        return torch.stack([sample.pred_score for sample in model.test_step(dict(inputs=list(x)))])


def host_logits(model, x):
    """Return logits from MMSegmentation's own test step."""
    from mmseg.structures import SegDataSample

    size = tuple(x.shape[2:])
    samples = [SegDataSample(metainfo=dict(ori_shape=size, img_shape=size)) for _ in x]
    with torch.no_grad():
        results = model.test_step(dict(inputs=list(x), data_samples=samples))
    return torch.stack([result.seg_logits.data for result in results])


def export(out, path, *argv):
    TOOL.main([str(path), *map(str, argv), '--out', str(out)])
    return out


def test_classifier(tmp_path):
    """A file takes BGR images of two sizes and batches, and its metadata describes the input."""
    path, weights, model = set_up(CLASSIFIER, tmp_path)
    out = export(tmp_path / 'new' / 'model.onnx', path, weights, '--shape', 64, 64, '--dynamic')
    for shape in ((1, 3, 64, 64), (3, 3, 50, 70)):
        x = images(*shape)
        torch.testing.assert_close(run_onnx(out, x)[0].softmax(1), host_scores(model, x), rtol=1e-4, atol=1e-6)
    proto = onnx.load(out)
    meta = {entry.key: entry.value for entry in proto.metadata_props}
    assert proto.opset_import[0].version == 17
    assert (meta['config'], meta['checkpoint'], meta['part']) == ('config.py', 'weights.pth', 'classifier')
    assert (meta['bgr_to_rgb'], meta['normalize']) == ('True', 'True')


def test_normalized_input(tmp_path):
    path, weights, model = set_up(CLASSIFIER, tmp_path)
    out = export(tmp_path / 'model.onnx', path, weights, '--shape', 32, 32, '--normalised')  # or --normalized
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(run_onnx(out, x)[0], model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('norm', [{}, dict(mean=[9.0], std=[2.0])])
def test_preprocessing(channels, norm):
    """The graph flips and normalizes channels as the host does, each with and without the other."""
    cfg = dict(CLASSIFIER['model'], data_preprocessor=dict(to_rgb=True, **norm))
    cfg['backbone'] = dict(cfg['backbone'], in_channels=channels)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(cfg).eval()
    x = images(2, channels, 32, 32)
    with torch.no_grad():
        expected = model(model.data_preprocessor(dict(inputs=x))['inputs'])
        torch.testing.assert_close(TOOL.Deployed(model)(x.float())[0], expected)


def test_torch_export(tmp_path):
    path, weights, model = set_up(CLASSIFIER, tmp_path)
    argv = ('--shape', 64, 64, '--format', 'torch', '--dynamic', 'batch')
    out = export(tmp_path / 'model.pt2', path, weights, *argv)
    extra = {'metadata.json': ''}
    program = torch.export.load(out, extra_files=extra).module()
    for batch in (2, 5):
        x = images(batch, 3, 64, 64)
        scores = program(x.float())[0].softmax(1)
        torch.testing.assert_close(scores, host_scores(model, x), rtol=1e-4, atol=1e-6)
    assert json.loads(extra['metadata.json'])['dynamic'] == 'batch'


@pytest.mark.parametrize(
    ('cfg', 'dynamic', 'shape'),
    [(KAO, 'all', (3, 3, 65, 97)), (FPN, 'batch', (3, 3, 48, 96)), (UPERNET, 'none', (1, 3, 48, 96))],
)
def test_segmentor(cfg, dynamic, shape, tmp_path):
    """A file returns the host's logits of the input's size."""
    path, weights, model = set_up(cfg, tmp_path)
    out = export(tmp_path / 'model.onnx', path, weights, '--shape', 48, 96, '--dynamic', dynamic)
    x = images(*shape)
    expected = host_logits(model, x)
    assert expected.std() > 1e-3
    torch.testing.assert_close(run_onnx(out, x)[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ('cfg', 'argv', 'message'),
    [
        (FPN, ['48', '96', '--dynamic'], r'nothing is written: at input \(2, 3, 81, 113\)'),
        (UPERNET, ['64', '96'], 'the torchscript exporter refuses the model: .*adaptive_avg_pool2d'),
    ],
    ids=['FPNHead', 'UPerHead'],
)
def test_fixed_sizes(cfg, argv, message, tmp_path):
    """Heads of the host that fix the size, or need one that their pooling divides, leave no file."""
    path, weights, _ = set_up(cfg, tmp_path)
    with pytest.raises(SystemExit, match=f'^error: {message}'):
        export(tmp_path / 'model.onnx', path, weights, '--shape', *argv)
    assert not (tmp_path / 'model.onnx').exists()


def test_event_backbone(tmp_path):
    """Batch and size of frames of events (B, T, C, H, W) are dynamic, T is fixed."""
    backbone = dict(SPIKING, in_channels=2, steps=3)
    cfg = dict(CLASSIFIER, data_preprocessor=dict(num_classes=5))
    cfg['model'] = dict(CLASSIFIER['model'], backbone=backbone, head=dict(CLASSIFIER['model']['head'], in_channels=16))
    path, weights, model = set_up(cfg, tmp_path)
    argv = ('--shape', 32, 32, '--frames', 3, '--part', 'backbone', '--dynamic')
    out = export(tmp_path / 'model.onnx', path, weights, *argv)
    x = torch.randn(3, 3, 2, 33, 49)
    with torch.no_grad():
        expected = model.backbone(x)
    assert all(level.any() for level in expected)
    torch.testing.assert_close(run_onnx(out, x), list(expected), rtol=0, atol=1e-5)


class Refined(torch.nn.Module):
    """Both necks on the steps of a spiking backbone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = torch.nn.Conv2d(3, 8, 3, 4, 1), torch.nn.Conv2d(8, 16, 3, 2, 1)
        self.rate, self.refine = SpikeRateNeck(steps=2), KroneckerNeck([8, 16], mode='kv')
        for scale in self.refine.scales.values():
            torch.nn.init.constant_(scale, 0.5)

    def forward(self, x):
        low = self.low(x)
        return self.refine(self.rate([torch.cat([level, 2 * level]) for level in (low, self.high(low))]))


@pytest.mark.parametrize('exporter', ['onnx', 'torch'])
def test_necks(exporter, tmp_path):
    model, shapes = Refined().eval(), ((2, 3, 48, 96), (3, 3, 65, 97))
    x = torch.randn(*shapes[0])
    if exporter == 'onnx':
        options = dict(dynamic_axes=dict(x={0: 'b', 2: 'h', 3: 'w'}), opset_version=17, dynamo=False)
        torch.onnx.export(model, (x,), tmp_path / 'necks.onnx', input_names=['x'], **options)
        run = TOOL.load_onnx((tmp_path / 'necks.onnx').read_bytes())
    else:
        run = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
        shapes = shapes[0], (3, *shapes[0][1:])
    for shape in shapes:
        x = torch.randn(*shape)
        with torch.no_grad():
            for ours, theirs in zip(model(x), run(x)):
                assert ours.any()
                torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


class Neurons(torch.nn.Module):
    """Two steps of neurons whose inputs are ``margin`` below the threshold."""

    def __init__(self, margin):
        super().__init__()
        self.margin, self.neuron = margin, LIF(v_threshold=1.0)

    def forward(self, x):
        return (self.neuron(torch.stack([torch.full_like(x, 2 - self.margin)] * 2)).mean(0),)


def test_check_of_spikes():
    """A spike that depends on rounding is not an error; one that does not is."""
    model, x = Neurons(1e-9), torch.zeros(1, 4)
    assert model(x)[0].eq(1).all()  # in float32 the input is 2 and the neuron fires
    assert model.double()(x.double())[0].eq(0.5).all()
    with pytest.raises(LaunchError, match=r'nothing is written: at input \(1, 4\)'):
        TOOL.check(Neurons(0), Neurons(0.5), [x], 1e-3)
    TOOL.check(Neurons(1e-9), lambda x: (torch.full_like(x, 0.5),), [x], 1e-3)
    model = Neurons(0)
    TOOL.check(model, lambda x: (model(x)[0] - (x == 0) / 2,), [x, x + 1], 1e-3)  # another input agrees


@pytest.mark.parametrize('got', [torch.zeros(1, 3), torch.full((1, 4), np.nan), torch.full((1, 4), 1.01)])
def test_check(got):
    model = torch.nn.Sequential()
    model.forward = lambda x: (x,)
    with pytest.raises(LaunchError, match='nothing is written'):
        TOOL.check(model, lambda x: (got,), [torch.ones(1, 4)], 1e-3)


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--out', 'a.pt'], "--out .*'a.pt'"),
        (['--out', 'a.onnx', '--format', 'torch'], "--out .*'a.onnx'"),
        (['--out', 'a.onnx', '--batch', '0'], '--batch .* 0'),
        (['--out', 'a.onnx', '--frames', '-1'], '--frames .* -1'),
        (['--out', 'a.onnx', '--tolerance', '0'], '--tolerance .* 0.0'),
        (['--out', 'a.onnx', '--shape', '0', '8'], r'--shape .* \[0, 8\]'),
        (['--out', 'a.onnx', '--frames', '2'], r'the model takes no input \(1, 2, 3, 32, 32\)'),
        (['--out', 'a.onnx', '--opset', '5', '--normalized'], 'the runtime refuses the model'),
        (['lost.pth', '--out', 'a.onnx'], "checkpoint .*'lost.pth'"),
        (['trap.pth', '--out', 'a.onnx'], '.*trap.pth'),
    ],
)
def test_bad_arguments(argv, message, tmp_path, monkeypatch):
    path, _, _ = set_up(CLASSIFIER, tmp_path)
    torch.save(dict(state_dict={}, meta=Touch(tmp_path / 'proof')), tmp_path / 'trap.pth')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f'^error: {message}'):
        TOOL.main([str(path), *argv, *([] if '--shape' in argv else ['--shape', '32', '32'])])
    assert not list(tmp_path.glob('*.onnx'))
    assert not (tmp_path / 'proof').exists()


def test_detector(tmp_path):
    config = ROOT / 'configs/lambda_resnet/mask-rcnn_lambda-r17-w16_fpn_1xb8-6e_scenes-128x128.py'
    with pytest.raises(SystemExit, match='error: MaskRCNN .*MMDeploy.*--part backbone'):
        export(tmp_path / 'a.onnx', config, '--shape', 64, 64)
