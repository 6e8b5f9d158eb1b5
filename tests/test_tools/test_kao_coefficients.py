"""The tool that draws coefficients: its weights, its files, and its errors."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope
from PIL import Image

from mmkron.analysis import PositionWeights, position_weights
from mmkron.layers import KroneckerAttention2d
from support.tools import ROOT, load_tool

SEGMENTOR = """
default_scope = 'mmseg'
norm_cfg = dict(type='SyncBN')
head = dict(type='mmkron.KAOHead', in_channels=64, channels=16, mode='kv', num_classes=3, norm_cfg=norm_cfg)
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='SegDataPreProcessor', mean=[120.0] * 3, std=[60.0] * 3, bgr_to_rgb=True,
                           test_cfg=dict(size_divisor=32)),
    backbone=dict(type='ResNet', depth=18, base_channels=8, stem_channels=8, strides=(1, 2, 1, 1),
                  norm_cfg=norm_cfg),
    decode_head=dict(head, in_index=3),
    auxiliary_head=dict(head, in_index=3, mode='dense'),
    test_cfg=dict(mode='whole'))
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(100, 80), keep_ratio=True),
                 dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
visualizer = dict(type='SegLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
"""
DETECTOR = """
default_scope = 'mmdet'
model = dict(
    type='RetinaNet',
    data_preprocessor=dict(type='DetDataPreprocessor', mean=[120.0] * 3, std=[60.0] * 3, pad_size_divisor=32),
    backbone=dict(type='ResNet', depth=18, base_channels=8, stem_channels=8),
    neck=[dict(type='FPN', in_channels=[8, 16, 32, 64], out_channels=16, num_outs=5),
          dict(type='mmkron.KroneckerNeck', in_channels=[16] * 5, levels=[0, 2], mode='pooled')],
    bbox_head=dict(type='RetinaHead', num_classes=2, in_channels=16, feat_channels=16, stacked_convs=1,
                   anchor_generator=dict(type='AnchorGenerator', ratios=[1.0], scales=[4], strides=[4, 8, 16, 32, 64])))
pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(122, 122), keep_ratio=True),
            dict(type='LoadAnnotations', with_bbox=True), dict(type='PackDetInputs')]
test_dataloader = dict(dataset=dict(type='CocoDataset', pipeline=pipeline))
"""
IMAGE_SIZE = (45, 61)  # height and width


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tools/visualizations'))  # Python puts a script's folder there
    return load_tool('visualizations/kao_coefficients')


@pytest.fixture
def draws(tool, tmp_path, monkeypatch):
    """Run the tool in ``tmp_path`` and return the arguments of ``draw`` with the picture that it returned."""
    draw, calls = tool.draw, []

    def recording(*args):
        picture = draw(*args) if args[2].mode == 'kv' else np.zeros((4, 6, 3), np.uint8)  # to draw takes a second
        calls.append((*args, picture))
        return picture

    def run(*argv):
        calls.clear()
        tool.main([str(arg) for arg in argv])
        (call,) = calls
        return call

    monkeypatch.setattr(tool, 'draw', recording)
    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture
def image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (*IMAGE_SIZE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'photo.png')
    return tmp_path / 'photo.png'


@pytest.fixture
def segmentor(tmp_path):
    (tmp_path / 'seg.py').write_text(SEGMENTOR)
    return tmp_path / 'seg.py'


def save_weights(config, path, **options):
    """Save a checkpoint of the config's model, with an attention that is far from uniform."""
    cfg = Config.fromfile(config)
    cfg.merge_from_dict(options)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        import mmseg.models  # noqa: F401

        torch.manual_seed(1)
        model = MODELS.build(cfg.model)
        model.init_weights()
        model.decode_head.attention.query_map.weight.data *= 3
    torch.save(dict(state_dict=model.state_dict(), meta={}), path)
    return path


def host_input(config, checkpoint, image, **options):
    """Return the attention layer of the head and its input map in MMSegmentation's own inference."""
    from mmseg.apis import inference_model, init_model

    cfg = Config.fromfile(config)
    cfg.merge_from_dict(options)
    inputs = []
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = revert_sync_batchnorm(init_model(cfg, str(checkpoint), device='cpu'))
        layer = model.decode_head.attention
        layer.register_forward_pre_hook(lambda layer, args: inputs.append(args[0]))
        inference_model(model, str(image))
    return layer, inputs[0]


# 45 x 61 becomes 74 x 100 and is padded to 96 x 128: a map of 12 x 16, of which the image covers 9.25 x 12.5.
@pytest.mark.parametrize(
    ('mode', 'pixel', 'position'),
    [('kv', (60, 44), (9, 12)), ('qkv', (0, 0), (0, 0)), ('dense', (30, 10), (2, 6)), ('pooled', (22, 33), (6, 4))],
)
def test_segmentor(mode, pixel, position, segmentor, image, draws, tmp_path, capsys):
    options = {'model.decode_head.mode': mode}
    checkpoint = save_weights(segmentor, tmp_path / 'a.pth', **options)
    argv = ['--pixel', *pixel, '--out-dir', 'out', '--cfg-options', f'model.decode_head.mode={mode}']
    shown, at, view, picture = draws(segmentor, checkpoint, image, *argv)
    lines = capsys.readouterr().out.splitlines()
    np.testing.assert_array_equal(shown, np.asarray(Image.open(image)))
    assert at == pixel
    assert view[:4] == ('decode_head.attention', mode, (12, 16), position)
    assert view.extent == pytest.approx((61 * 128 / 100, 45 * 96 / 74))

    layer, x = host_input(segmentor, checkpoint, image, **options)
    expected = position_weights(layer.coefficients(x), mode, (12, 16), position)
    assert expected.positions.max() > 1.5 * expected.positions.mean()
    for got, wanted in zip(view.weights, expected):
        torch.testing.assert_close(got, wanted[0], rtol=1e-4, atol=1e-7)

    name = f'photo_decode_head.attention_x{pixel[0]}_y{pixel[1]}'
    written = [f'out/{name}.png', f'out/vis_data/vis_image/{name}_0.png']
    for path in written:
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / path)), picture)
    assert lines[-2:] == [f'  {path}' for path in written]
    best = int(expected.rows[0].sum(0).argmax())
    assert any(line.startswith(f'strongest rows of {len(expected.rows[0, 0])}: {best} (') for line in lines)


def test_classifier_on_a_gray_image(draws, tmp_path):
    """The pipeline of the config may load no images; the folder and backend have defaults."""
    Image.fromarray(np.arange(13 * 17, dtype=np.uint8).reshape(13, 17)).save(tmp_path / 'gray.png')
    config = ROOT / 'configs/kanet/kanet-kv_digits.py'
    shown, _, view, picture = draws(config, 'none', 'gray.png', '--pixel', 16, 12)
    assert shown.shape == (13, 17, 3)
    assert view.mode == 'kv'
    assert view.position == (view.size[0] - 1, view.size[1] - 1)
    assert view.extent == pytest.approx((17, 13))
    assert view.weights.positions.sum() == pytest.approx(1)
    name = f'gray_{view.layer}_x16_y12'
    for path in (f'{name}.png', f'vis_data/vis_image/{name}_0.png'):
        assert Image.open(tmp_path / 'work_dirs/kao_coefficients' / path).size == picture.shape[1::-1]


def test_detector(draws, image, tmp_path):
    """An image of 45 x 61 is resized to 90 x 122 and padded to 96 x 128; its map is 24 x 32, pooled to 12 x 16."""
    (tmp_path / 'det.py').write_text(DETECTOR)
    view = draws(tmp_path / 'det.py', 'none', image, '--pixel', 60, 44, '--layer', 'neck.1.attentions.0')[2]
    assert view[1:4] == ('pooled', (24, 32), (22, 30))
    assert view.extent == pytest.approx((64, 48))
    assert view.weights.positions.shape == (12, 16)
    assert draws(tmp_path / 'det.py', 'none', image, '--pixel', 60, 44)[2].layer == 'neck.1.attentions.2'


# A map has an eighth of the input's size.
@pytest.mark.parametrize(
    ('steps', 'divisor', 'extent', 'size', 'position'),
    [
        ("dict(type='Pad', size=(200, 200))", 32, (224, 224), (28, 28), (7, 12)),
        ("dict(type='Pad', size=(200, 200)), dict(type='Resize', scale=(400, 400))", 8, (200, 200), (50, 50), (14, 24)),
    ],
)
def test_padding_in_the_pipeline(steps, divisor, extent, size, position, draws, tmp_path):
    Image.fromarray(np.zeros((60, 100, 3), np.uint8)).save(tmp_path / 'zeros.png')
    config = SEGMENTOR.replace("dict(type='Resize', scale=(100, 80), keep_ratio=True)", steps)
    (tmp_path / 'pad.py').write_text(config)
    divisor = f'model.data_preprocessor.test_cfg.size_divisor={divisor}'
    view = draws(tmp_path / 'pad.py', 'none', 'zeros.png', '--pixel', 99, 59, '--cfg-options', divisor)[2]
    assert view.extent == pytest.approx(extent)
    assert view[2:4] == (size, position)


class KeywordModel(torch.nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.layer = KroneckerAttention2d(4, 'dense')
        self.cross = cross

    def forward(self, inputs, mode):
        context = inputs[:, :, 1:, ::2] * 3 if self.cross else None
        return self.layer(x=inputs) if context is None else self.layer(inputs, context=context)


@pytest.mark.parametrize('cross', [False, True])
def test_arguments_by_keyword(cross, tool):
    model = KeywordModel(cross).eval()
    x = torch.randn(1, 4, 5, 6)
    context = x[:, :, 1:, ::2] * 3 if cross else x
    view = tool.view_pixel(model, dict(inputs=x), (60.0, 50.0), (30, 20), None)
    assert view[:4] == ('layer', 'dense', (5, 6), (2, 3))
    expected = position_weights(model.layer.coefficients(x, context), 'dense', (5, 6), (2, 3), context.shape[2:])
    torch.testing.assert_close(view.weights.positions, expected.positions[0])


@pytest.mark.parametrize(('positions', 'shape'), [(torch.arange(-2.0, 4.0), (4, 90)), (torch.zeros(6), (1, 1))])
def test_draw_unusual(positions, shape, tool):
    """Images may be narrow; weights may have both signs, as from batch norm without softmax, or no contrast."""
    positions = positions.reshape(2, 3)
    weights = PositionWeights(positions.sum(1).expand(2, 2), positions.sum(0).expand(2, 3), positions)
    view = tool.View('layer', 'qkv', (2, 3), (1, 2), (float(shape[1]), float(shape[0])), weights)
    assert tool.draw(np.zeros((*shape, 3), np.uint8), (0, 0), view).std() > 10


def fails(draws, *argv):
    """Run the tool, which must stop with an error, and return its message."""
    with pytest.raises(SystemExit, match='^error: ') as stop:
        draws(*argv)
    return stop.value.code


@pytest.mark.parametrize(
    ('argv', 'named'),
    [
        ('--pixel 61 0', '--pixel 61 0'),
        ('--pixel 0 -1', '--pixel 0 -1'),
        ('--pixel 0 0 --layer backbone', "--layer 'backbone'"),
        ('--pixel 0 0 --layer auxiliary_head.attention', 'auxiliary_head.attention'),
        ('--pixel 0 0 --device nowhere', '--device nowhere'),
        ('--pixel 0 0 --cfg-options visualizer.vis_backends.0.type=WandbVisBackend', 'wandb'),
        ('--pixel 0 0 --cfg-options test_pipeline=[]', 'test_pipeline'),
        ('--pixel 0 0 --cfg-options model=None', 'model'),
    ],
)
def test_bad_arguments(argv, named, draws, segmentor, image, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)  # not installed
    message = fails(draws, segmentor, 'none', image, *argv.split())
    assert named in message
    if '--layer' in argv:  # the layers of the model are listed
        assert {'decode_head.attention', 'auxiliary_head.attention'} <= set(re.findall(r'\w+\.attention', message))


def test_bad_files(draws, segmentor, image, tmp_path, tiny_config):
    (tmp_path / 'cut.png').write_bytes(image.read_bytes()[:500])
    torch.save(dict(state_dict={'backbone.x': torch.zeros(1)}), tmp_path / 'other.pth')
    tta = "dict(type='TestTimeAug', transforms=[[dict(type='LoadAnnotations')], [dict(type='PackSegInputs')]])"
    (tmp_path / 'tta.py').write_text(SEGMENTOR.replace("dict(type='LoadAnnotations'), dict(type='PackSegInputs')", tta))
    for config, checkpoint, path, named in (
        ('gone.py', 'none', image, 'gone.py'),
        (segmentor, 'gone.pth', image, 'gone.pth'),
        (segmentor, 'none', 'gone.png', 'gone.png'),
        (segmentor, 'none', 'cut.png', 'cut.png'),
        (segmentor, 'other.pth', image, 'backbone.x'),
        (tiny_config, 'none', image, 'KroneckerAttention2d'),
        ('tta.py', 'none', image, 'TestTimeAug'),
    ):
        assert named in fails(draws, config, checkpoint, path, '--pixel', 0, 0)
    assert not Path('work_dirs').exists()


def test_pictures_that_cannot_be_written(tool, draws, segmentor, image, monkeypatch):
    name = 'photo_decode_head.attention_x0_y0.png'
    Path('out', name).mkdir(parents=True)
    Path('gone').symlink_to('nowhere')
    assert name in fails(draws, segmentor, 'none', image, '--pixel', 0, 0, '--out-dir', 'out')
    monkeypatch.setattr(tool, 'view_pixel', lambda *args: pytest.fail('the model ran'))
    for folder in ('photo.png', 'gone/x'):
        assert f"--out-dir '{folder}'" in fails(draws, segmentor, 'none', image, '--pixel', 0, 0, '--out-dir', folder)
