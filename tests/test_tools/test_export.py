"""tools/deployment/export.py: files of ONNX and torch.export give what the host's own test step gives."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch.nn.modules.batchnorm import _BatchNorm

from mmkron.engine import export
from mmkron.layers import LIF
from mmkron.models import KroneckerNeck, SpikeRateNeck

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location('mmkron_export_tool', ROOT / 'tools/deployment/export.py')
TOOL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TOOL)

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
    """Paths of a config file and of a checkpoint, and the model: its batch norms do something, its neurons fire."""
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
    """BGR images as a data pipeline hands them on."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def run_onnx(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return session.run(None, {'x': x.float().numpy()})[0]


def host_scores(model, x):
    """Probabilities by MMPretrain's own test step."""
    with torch.no_grad():
        return torch.stack([sample.pred_score for sample in model.test_step(dict(inputs=list(x)))])


def host_logits(model, x):
    """Logits by MMSegmentation's own test step."""
    from mmseg.structures import SegDataSample

    size = tuple(x.shape[2:])
    samples = [SegDataSample(metainfo=dict(ori_shape=size, img_shape=size)) for _ in x]
    with torch.no_grad():
        results = model.test_step(dict(inputs=list(x), data_samples=samples))
    return torch.stack([result.seg_logits.data for result in results])


def test_classifier(tmp_path, capsys):
    """Raw BGR images in, the host's probabilities out, at two sizes and batches; the file says what it takes."""
    path, weights, model = set_up(CLASSIFIER, tmp_path)
    out = tmp_path / 'new' / 'model.onnx'
    TOOL.main([str(path), str(weights), '--shape', '64', '64', '--dynamic', '--out', str(out)])
    printed = capsys.readouterr().out
    assert '1x3x64x64 ' in printed
    assert '2x3x97x81 ' in printed
    for shape in ((1, 3, 64, 64), (3, 3, 50, 70)):
        x = images(*shape)
        scores = torch.from_numpy(run_onnx(out, x)).softmax(1)
        torch.testing.assert_close(scores, host_scores(model, x), rtol=1e-4, atol=1e-6)
    proto = onnx.load(out)
    meta = {entry.key: entry.value for entry in proto.metadata_props}
    assert (
        meta['input']
        == 'BGR (turned to RGB in the graph), values from 0 to 255; the mean and the deviation are in the graph'
    )
    assert (meta['config'], meta['checkpoint'], meta['dynamic']) == ('config.py', 'weights.pth', 'all')
    assert meta['outputs'] == 'logits (1, 5)'
    assert proto.opset_import[0].version == 17
    assert meta['opset'] == '17'


def test_normalised_input(tmp_path):
    path, weights, model = set_up(CLASSIFIER, tmp_path)
    out = tmp_path / 'model.onnx'
    TOOL.main([str(path), str(weights), '--shape', '64', '64', '--normalised', '--out', str(out)])
    x = torch.randn(1, 3, 64, 64)
    np.testing.assert_allclose(run_onnx(out, x), model(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    meta = {entry.key: entry.value for entry in onnx.load(out).metadata_props}
    assert meta['input'] == 'channels and values as the network takes them; nothing is normalised in the graph'


@pytest.mark.parametrize(
    ('preprocessor', 'channels', 'text'),
    [
        (dict(to_rgb=True), 3, 'BGR (turned to RGB in the graph), values as the network takes them; nothing is'),
        (dict(to_rgb=True, mean=[9.0], std=[2.0]), 1, 'channels in the order of the data pipeline, values from 0 to'),
    ],
)
def test_what_the_graph_does_is_said(preprocessor, channels, text):
    """Order and normalisation are the host's, each with and without the other."""
    cfg = dict(CLASSIFIER['model'], data_preprocessor=preprocessor)
    cfg['backbone'] = dict(cfg['backbone'], in_channels=channels)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(cfg).eval()
    deployed, x = export.Deployed(model), images(2, channels, 32, 32)
    with torch.no_grad():
        expected = model(model.data_preprocessor(dict(inputs=x))['inputs'])
        torch.testing.assert_close(deployed(x.float())[0], expected)
    assert deployed.describe_input().startswith(text)


def test_torch_export(tmp_path):
    path, weights, model = set_up(CLASSIFIER, tmp_path)
    out = tmp_path / 'model.pt2'
    TOOL.main(
        [str(path), str(weights), '--shape', '64', '64', '--format', 'torch', '--dynamic', 'batch', '--out', str(out)]
    )
    extra = {'metadata.json': ''}
    program = torch.export.load(out, extra_files=extra).module()
    for batch in (2, 5):
        x = images(batch, 3, 64, 64)
        scores = program(x.float())[0].softmax(1)
        torch.testing.assert_close(scores, host_scores(model, x), rtol=1e-4, atol=1e-6)
    assert json.loads(extra['metadata.json'])['dynamic'] == 'batch'


@pytest.mark.parametrize(('cfg', 'dynamic', 'shape'), [(KAO, 'all', (3, 3, 65, 97)), (FPN, 'batch', (3, 3, 48, 96))])
def test_segmentor(cfg, dynamic, shape, tmp_path):
    """Logits of the input's size, those of the host; also at another size with the KAO head."""
    path, weights, model = set_up(cfg, tmp_path)
    out = tmp_path / 'model.onnx'
    TOOL.main([str(path), str(weights), '--shape', '48', '96', '--dynamic', dynamic, '--out', str(out)])
    for size in ((1, 3, 48, 96), shape):
        x = images(*size)
        expected = host_logits(model, x)
        assert expected.std() > 1e-3
        np.testing.assert_allclose(run_onnx(out, x), expected.numpy(), atol=1e-3)


def test_upernet(tmp_path, capfd):
    """At sizes that the head's pooling divides; else TorchScript's exporter refuses, and nothing is written."""
    path, weights, model = set_up(UPERNET, tmp_path)
    out = tmp_path / 'model.onnx'
    TOOL.main([str(path), str(weights), '--shape', '48', '96', '--out', str(out)])
    x = images(1, 3, 48, 96)
    np.testing.assert_allclose(run_onnx(out, x), host_logits(model, x).numpy(), rtol=1e-3, atol=1e-4)
    other = tmp_path / 'other.onnx'
    with pytest.raises(SystemExit, match='error: the torchscript exporter refuses the model: .*adaptive_avg_pool2d'):
        TOOL.main([str(path), str(weights), '--shape', '64', '96', '--out', str(other)])
    assert not other.exists()
    assert len(capfd.readouterr().out) < 2000  # and not the graph, which C++ would print


def test_fixed_sizes_are_found(tmp_path):
    """The host's FPNHead writes the export's sizes into the graph: the check sees it."""
    path, weights, _ = set_up(FPN, tmp_path)
    out = tmp_path / 'model.onnx'
    with pytest.raises(SystemExit, match=r'error: nothing is written: .*\(2, 3, 81, 113\)'):
        TOOL.main([str(path), str(weights), '--shape', '48', '96', '--dynamic', '--out', str(out)])
    assert not out.exists()


def test_event_backbone(tmp_path):
    """Frames of events (B, T, C, H, W): batch and size are free, T is the export's."""
    backbone = dict(SPIKING, in_channels=2, steps=3)
    cfg = dict(CLASSIFIER, data_preprocessor=dict(num_classes=5))
    cfg['model'] = dict(CLASSIFIER['model'], backbone=backbone, head=dict(CLASSIFIER['model']['head'], in_channels=16))
    path, weights, model = set_up(cfg, tmp_path)
    out = tmp_path / 'model.onnx'
    argv = [str(path), str(weights), '--shape', '32', '32', '--frames', '3', '--part', 'backbone', '--dynamic']
    TOOL.main([*argv, '--out', str(out)])
    session = onnxruntime.InferenceSession(str(out), providers=['CPUExecutionProvider'])
    for shape in ((1, 3, 2, 32, 32), (3, 3, 2, 33, 49)):
        x = torch.randn(*shape)
        with torch.no_grad():
            wanted = model.backbone(x)
        assert all(level.any() for level in wanted)
        for ours, theirs in zip(wanted, session.run(['map0', 'map1'], {'x': x.numpy()})):
            np.testing.assert_allclose(theirs, ours.numpy(), atol=1e-5)


class Refined(torch.nn.Module):
    """What stands behind a spiking backbone: rates of two steps, folded into the batch, and levels with attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = torch.nn.Conv2d(3, 8, 3, 4, 1), torch.nn.Conv2d(8, 16, 3, 2, 1)
        self.rate, self.refine = SpikeRateNeck(steps=2), KroneckerNeck([8, 16], mode='kv')
        for scale in self.refine.scales.values():
            torch.nn.init.constant_(scale, 0.5)

    def forward(self, x):
        low = self.low(x)
        levels = low, self.high(low)
        return self.refine(self.rate([torch.cat([level, 2 * level]) for level in levels]))


@pytest.mark.parametrize('exporter', ['onnx', 'torch'])
def test_necks(exporter, tmp_path):
    model, shapes = Refined().eval(), ((2, 3, 48, 96), (3, 3, 65, 97))
    x = torch.randn(*shapes[0])
    if exporter == 'onnx':
        axes = dict(x={0: 'batch', 2: 'height', 3: 'width'})
        torch.onnx.export(
            model, (x,), tmp_path / 'necks.onnx', input_names=['x'], dynamic_axes=axes, opset_version=17, dynamo=False
        )
        run = export.onnx_runtime((tmp_path / 'necks.onnx').read_bytes())
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
    """Steps of neurons whose inputs lie ``margin`` below the threshold."""

    def __init__(self, margin):
        super().__init__()
        self.norm, self.margin, self.neuron = False, margin, LIF(v_threshold=1.0)

    def forward(self, x):
        return (self.neuron(torch.stack([torch.full_like(x, 2 - self.margin)] * 2)).mean(0),)


def test_check_of_spikes(capsys):
    """A spike that rounding decides is no fault; one that it does not decide is."""
    # In float32 the input is 2 and the neuron fires, in float64 it does not.
    model, x = Neurons(1e-9), torch.zeros(1, 4)
    assert model(x)[0].eq(1).all()
    assert model.double()(x.double())[0].eq(0.5).all()
    with pytest.raises(export.LaunchError, match=r'nothing is written: at an input \(1, 4\)'):
        export.check(Neurons(0), Neurons(0.5), [x], 1e-3)
    export.check(Neurons(1e-9), lambda x: (torch.full_like(x, 0.5),), [x], 1e-3)
    assert 'from float64 the file is 0.0e+00 away, torch in float32 1.0e+00' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--out', 'a.pt'], r"--out must end in \.onnx for --format onnx, got 'a\.pt'"),
        (['--out', 'a.onnx', '--format', 'torch'], r'--out must end in \.pt2 for --format torch'),
        (['--out', 'a.onnx', '--batch', '0'], '--batch must be at least 1, got 0'),
        (['--out', 'a.onnx', '--frames', '-1'], '--frames must be at least 1, got -1'),
        (['--out', 'a.onnx', '--tolerance', '0'], '--tolerance must be above 0, got 0.0'),
        (['--out', 'a.onnx', '--shape', '0', '8'], r'--shape must be two numbers of at least 1, got \[0, 8\]'),
        (['--out', 'a.onnx', '--frames', '2'], r'the model takes no input \(1, 2, 3, 32, 32\): x must be a map'),
        (['--out', 'a.onnx', '--opset', '5', '--normalised'], 'the runtime refuses the model: .*INVALID_GRAPH'),
        (['lost.pth', '--out', 'a.onnx'], "checkpoint is not a file: 'lost.pth'"),
    ],
)
def test_bad_arguments(argv, message, tmp_path, monkeypatch):
    path, _, _ = set_up(CLASSIFIER, tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f'error: {message}'):
        TOOL.main([str(path), *argv, *([] if '--shape' in argv else ['--shape', '32', '32'])])
    assert not list(tmp_path.glob('*.onnx'))


def test_detectors_are_refused(tmp_path):
    config = ROOT / 'configs/lambda_resnet/mask-rcnn_lambda-r17-w16_fpn_1xb8-6e_scenes-128x128.py'
    with pytest.raises(SystemExit, match='error: MaskRCNN is a detector: .* MMDeploy .*--part backbone'):
        TOOL.main([str(config), '--shape', '64', '64', '--out', str(tmp_path / 'a.onnx')])


def test_a_pickle_is_refused(tmp_path):
    """A checkpoint that would make a file when it is read."""
    path, _, _ = set_up(CLASSIFIER, tmp_path)

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / 'sprung',)

    torch.save(dict(state_dict={}, meta=Trap()), tmp_path / 'trap.pth')
    with pytest.raises(SystemExit, match='error: .*trap.pth is refused'):
        TOOL.main([str(path), str(tmp_path / 'trap.pth'), '--shape', '32', '32', '--out', str(tmp_path / 'a.onnx')])
    assert not (tmp_path / 'sprung').exists()
