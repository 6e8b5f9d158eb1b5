"""KAOHead and ASPPV2Head: values against independent forms, initialization, losses and errors."""

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

import mmkron.registry
from mmkron.models import ASPPV2Head, KAOHead, decode_heads
from mmkron.ops import dense_attention, kronecker_attention_kv, kronecker_attention_qkv, pooled_attention
from mmkron.registry import MODELS
from support.docs import read_blocks
from support.errors import raises
from support.tools import ROOT

OPERATORS = {
    'kv': kronecker_attention_kv,
    'qkv': kronecker_attention_qkv,
    'dense': dense_attention,
    'pooled': pooled_attention,
}


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope('mmseg'):
        yield


def build(cls, *args, random=True, **kwargs):
    """Return the head in float64 and evaluation mode, with random weights if ``random``."""
    torch.manual_seed(0)
    head = cls(*args, **kwargs)
    head.init_weights()
    if random:
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    head.eval()
    return head.double()


def features(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sample(labels, **metainfo):
    return SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo=dict(img_shape=labels.shape[-2:], **metainfo))


@pytest.mark.parametrize('mode', OPERATORS)
@pytest.mark.parametrize(('maps', 'kernel_size'), [('qkv', 3), ('v', 1)])
def test_kao_head_is_reduce_attend_add_classify(mode, maps, kernel_size):
    """The head equals its operator on maps that are computed at every position."""
    head = build(
        KAOHead, 6, 4, num_classes=3, mode=mode, maps=maps, use_scale=True, kernel_size=kernel_size, in_index=1
    )
    x = features(2, 6, 5, 7)
    conv, attention = head.reduce.conv, head.attention
    reduced = F.relu(F.conv2d(x, conv.weight, conv.bias, padding=kernel_size // 2))
    query, key, value = (
        F.conv2d(reduced, getattr(attention, f'{name}_map').weight[..., None]) if letter in maps else reduced
        for letter, name in (('q', 'query'), ('k', 'key'), ('v', 'value'))
    )
    if mode == 'pooled':  # pooling comes before the maps
        pooled = F.max_pool2d(reduced, 2, ceil_mode=True)
        key = F.conv2d(pooled, attention.key_map.weight[..., None]) if 'k' in maps else pooled
        value = F.conv2d(pooled, attention.value_map.weight[..., None])
        attended = dense_attention(query, key, value, scale=0.5)
    else:
        attended = OPERATORS[mode](query, key, value, scale=0.5)
    expected = F.conv2d(reduced + attended, head.conv_seg.weight, head.conv_seg.bias)
    torch.testing.assert_close(head([None, x]), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('mode', OPERATORS)
def test_kao_head_starts_as_a_convolutional_head(mode):
    """The value map starts at zero, and both it and the classifier get a gradient."""
    head = build(KAOHead, 6, 4, num_classes=3, mode=mode, random=False, norm_cfg=dict(type='BN'))
    x = features(2, 6, 9, 5)
    expected = F.conv2d(head.reduce(x), head.conv_seg.weight, head.conv_seg.bias)
    torch.testing.assert_close(head([x]), expected, rtol=0, atol=0)
    assert 0 < head.conv_seg.weight.std() < 0.03
    head([x]).square().sum().backward()
    assert all(p.grad is not None for p in head.parameters())
    assert head.attention.value_map.weight.grad.abs().min() > 0


def test_aspp_v2_head_sums_its_taps():
    """The head equals the sum of the taps of its convolutions."""
    dilations = (1, 2, 5)
    head = build(ASPPV2Head, 3, num_classes=4, dilations=dilations)
    height, width = 6, 7
    x = features(2, 3, height, width)
    padded = F.pad(x, [5] * 4)
    expected = sum(conv.bias for conv in head.convs)[:, None, None].expand(2, 4, height, width).clone()
    for conv, d in zip(head.convs, dilations):
        for i in range(3):
            for j in range(3):
                top, left = 5 + (i - 1) * d, 5 + (j - 1) * d
                shifted = padded[:, :, top : top + height, left : left + width]
                expected += torch.einsum('oc,bchw->bohw', conv.weight[:, :, i, j], shifted)
    torch.testing.assert_close(head([x]), expected, rtol=1e-10, atol=1e-10)


def test_aspp_v2_head_is_that_of_deeplab_v2():
    """Four convolutions from 2048 channels to 21 classes have 1,548,372 parameters."""
    head = ASPPV2Head(2048, num_classes=21)
    assert sum(p.numel() for p in head.parameters()) == 4 * (2048 * 21 * 9 + 21) == 1_548_372
    assert [conv.dilation for conv in head.convs] == [(d, d) for d in (6, 12, 18, 24)]
    for _ in range(2):  # after the constructor and after init_weights
        assert all(0.009 < conv.weight.std() < 0.011 for conv in head.convs)
        assert all(conv.bias.count_nonzero() == 0 for conv in head.convs)
        head.init_weights()


def test_dropout_acts_in_training_only():
    head = build(ASPPV2Head, 4, num_classes=3, dropout_ratio=0.5)
    x = features(1, 4, 5, 5)
    expected = sum(conv(x) for conv in head.convs)
    torch.testing.assert_close(head([x]), expected)
    assert not torch.allclose(head.train()([x]), expected)


@pytest.mark.parametrize('cls', [KAOHead, ASPPV2Head])
def test_resize_concat(cls):
    """Several levels are resized and concatenated, as in MMSegmentation's heads."""
    kwargs = dict(num_classes=3, in_index=(0, 2), input_transform='resize_concat')
    head = build(cls, [2, 3], 4, **kwargs)
    single = build(cls, 5, 4, num_classes=3)
    single.load_state_dict(head.state_dict())
    low, high = features(1, 3, 4, 3), features(1, 2, 8, 6)
    whole = torch.cat([high, F.interpolate(low, size=(8, 6), mode='bilinear', align_corners=False)], 1)
    torch.testing.assert_close(head([high, None, low]), single([whole]))


@pytest.mark.parametrize('cls', [KAOHead, ASPPV2Head])
def test_loss(cls):
    """The loss is the cross entropy at the size of the labels and ignores 255."""
    head = build(cls, 6, 4, num_classes=3)
    x = features(2, 6, 4, 5)
    labels = torch.randint(0, 3, (2, 1, 9, 11), generator=torch.Generator().manual_seed(2))
    labels[0, 0, :4] = 255
    losses = head.loss_by_feat(head([x]), [sample(each) for each in labels])
    logits = F.interpolate(head([x]), size=(9, 11), mode='bilinear', align_corners=False)
    each = F.cross_entropy(logits, labels[:, 0], ignore_index=255, reduction='none')
    torch.testing.assert_close(losses['loss_ce'], each.mean())


@pytest.mark.parametrize('cls', [KAOHead, ASPPV2Head])
@pytest.mark.parametrize(('value', 'ignore_index'), [(3, 255), (254, 255), (-1, 255), (255, None), (255, 9)])
def test_label_outside_the_classes(cls, value, ignore_index):
    head = build(cls, 6, 4, num_classes=3, ignore_index=ignore_index)
    labels = torch.zeros(1, 8, 8, dtype=torch.long)
    labels[0, 3, 4] = value
    samples = [sample(torch.zeros_like(labels)), sample(labels, seg_map_path='masks/7.png')]
    with raises(ValueError, 'label', value) as info:
        head.loss_by_feat(features(2, 3, 4, 4), samples)
    assert 'masks/7.png' in str(info.value)


@pytest.mark.parametrize('cls', [KAOHead, ASPPV2Head])
@pytest.mark.parametrize('num_classes', [1, 2])
def test_binary_labels(cls, num_classes):
    """A binary head has one logit and the labels 0 and 1, as in MMSegmentation."""
    loss = dict(type='CrossEntropyLoss', use_sigmoid=True)
    head = build(cls, 6, 4, num_classes=num_classes, out_channels=1, loss_decode=loss)
    labels = torch.randint(0, 2, (1, 4, 4), generator=torch.Generator().manual_seed(2))
    logits = features(1, 1, 4, 4)
    expected = F.binary_cross_entropy_with_logits(logits[0], labels.double())
    loss = head.loss_by_feat(logits, [sample(labels)])['loss_ce']  # in float32, the host's choice
    torch.testing.assert_close(loss, expected.float())
    with raises(ValueError, 'label', 2):
        head.loss_by_feat(logits, [sample(torch.full((1, 4, 4), 2))])


def test_parts_of_the_host_reach_the_head():
    """Convolution, activation, dropout and initialization follow the arguments."""
    head = build(
        KAOHead, 6, 4, num_classes=3, conv_cfg=dict(type='Conv2dAdaptivePadding'), act_cfg=None, dropout_ratio=0.5
    )
    assert type(head.reduce.conv).__name__ == 'Conv2dAdaptivePadding'
    assert not head.reduce.with_activation
    x = features(1, 6, 5, 5)
    expected = head.conv_seg(head.attention(head.reduce(x)))
    torch.testing.assert_close(head([x]), expected)
    head.train()
    assert not torch.allclose(head([x]), expected)
    head = build(ASPPV2Head, 6, num_classes=3, random=False, init_cfg=dict(type='Constant', layer='Conv2d', val=0.5))
    assert all((conv.weight == 0.5).all() for conv in head.convs)


@pytest.mark.parametrize('cls', [KAOHead, ASPPV2Head])
def test_channels_that_do_not_fit_the_backbone(cls):
    head = build(cls, 6, 4, num_classes=3)
    with raises(ValueError, 'in_channels', 5):
        head([features(1, 6, 4, 4), features(1, 5, 4, 4)])


@pytest.mark.parametrize(
    ('kwargs', 'error', 'argument', 'value'),
    [
        (dict(kernel_size=2), ValueError, 'kernel_size', 2),
        (dict(key_channels=2, maps='v'), ValueError, 'key_channels', 2),
        (dict(key_channels=0, use_scale=True), ValueError, 'key_channels', 0),
        (dict(in_channels=[6, 3]), TypeError, 'in_channels', [6, 3]),
        (dict(input_transform='multiple_select'), ValueError, 'input_transform', 'multiple_select'),
    ],
    ids=str,
)
def test_bad_combinations(kwargs, error, argument, value):
    """tests/test_bad_values.py has single bad values."""
    with raises(error, argument, value):
        KAOHead(**{**dict(in_channels=6, channels=4, num_classes=3), **kwargs})


def test_page(tmp_path, monkeypatch):
    """The head of docs/add_a_head.md needs nothing but its file."""
    file, use = (block for block in read_blocks(ROOT / 'docs/add_a_head.md', 'python') if block.key == 'head')
    folder = tmp_path / 'models/decode_heads'
    folder.mkdir(parents=True)
    (folder / 'pooled_context_head.py').write_text(file.text)
    monkeypatch.setattr(mmkron.registry, 'ROOT', tmp_path)
    monkeypatch.setattr(MODELS, 'HOSTS', {'models/decode_heads': 'mmseg'})
    monkeypatch.setattr(decode_heads, '__path__', [*decode_heads.__path__, str(folder)])
    monkeypatch.setattr(MODELS, '_module_dict', dict(MODELS.module_dict))
    monkeypatch.setitem(vars(MODELS), 'NEEDS_HOST', type(MODELS).NEEDS_HOST.func(MODELS))
    scope = {}
    exec(use.text, scope)
    assert type(scope['head']).__module__ == 'mmkron.models.decode_heads.pooled_context_head'
