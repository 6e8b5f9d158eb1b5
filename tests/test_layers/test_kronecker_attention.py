"""KroneckerAttention2d against its operators: maps, statistics, coefficients and use in hosts."""

import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn import build_plugin_layer
from mmengine.registry import DefaultScope

from mmkron.layers import KroneckerAttention2d, LambdaLayer
from mmkron.ops import dense_attention, kronecker_attention_kv, kronecker_attention_qkv, pooled_attention
from support.errors import raises

OPERATORS = {
    'kv': kronecker_attention_kv,
    'qkv': kronecker_attention_qkv,
    'dense': dense_attention,
    'pooled': pooled_attention,
}


def build(*args, seed=0, **kwargs):
    torch.manual_seed(seed)
    layer = KroneckerAttention2d(*args, **kwargs)
    layer.init_weights()
    return layer.double()


def apply_map(conv, x):
    return x if not hasattr(conv, 'weight') else F.conv2d(x, conv.weight[..., None])


@pytest.mark.parametrize('mode', ['kv', 'qkv', 'dense'])
@pytest.mark.parametrize('maps', ['', 'v', 'qk', 'qkv'])
@pytest.mark.parametrize('norm', ['softmax', 'bn_softmax', 'bn'])
def test_maps_commute_with_the_means(mode, maps, norm):
    """A map on the columns equals the same map on every position, because means are linear."""
    layer = build(4, mode=mode, maps=maps, norm=norm, scale=0.5)
    x, context = torch.randn(2, 4, 5, 7).double(), torch.randn(2, 4, 3, 6).double()
    for source in (x, context):
        query, key, value = (
            apply_map(conv, y) for conv, y in ((layer.query_map, x), (layer.key_map, source), (layer.value_map, source))
        )
        expected = OPERATORS[mode](query, key, value, norm=norm, scale=0.5)
        out = layer(x) if source is x else layer(x, context)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_value_map_of_pooled_attention_follows_the_pooling():
    layer = build(3, mode='pooled')
    x = torch.randn(2, 3, 5, 6).double()
    pooled = F.max_pool2d(x, 2, ceil_mode=True)
    expected = dense_attention(x, pooled, apply_map(layer.value_map, pooled))
    torch.testing.assert_close(layer(x), expected)


def test_widths_and_context():
    layer = build(4, mode='qkv', maps='qkv', key_channels=6, out_channels=5, context_channels=3)
    x, context = torch.randn(2, 4, 5, 7).double(), torch.randn(2, 3, 4, 4).double()
    assert layer.query_map.weight.shape == (6, 4, 1)
    assert layer.key_map.weight.shape == (6, 3, 1)
    assert layer.value_map.weight.shape == (5, 3, 1)
    query, key, value = (
        apply_map(m, y) for m, y in zip((layer.query_map, layer.key_map, layer.value_map), (x, context, context))
    )
    torch.testing.assert_close(layer(x, context), kronecker_attention_qkv(query, key, value))


def test_residual():
    """The layer starts as the identity and adds its input."""
    x = torch.randn(2, 4, 5, 7).double()
    assert torch.equal(KroneckerAttention2d(4, residual=True).double()(x), x)
    with_residual, layer = build(4, maps='qkv', residual=True), build(4, maps='qkv')
    assert torch.equal(with_residual(x), x)
    assert with_residual.query_map.weight.abs().sum() > 0
    with_residual.load_state_dict(layer.state_dict())
    torch.testing.assert_close(with_residual(x), layer(x) + x)


def test_average_of_all_batches():
    """With momentum=None, as set by torch's update_bn, running statistics are the plain average."""
    for channels in (2, 8):
        layer = build(channels, norm='bn_softmax', maps='')
        batches = [torch.randn(2, channels, 5, 7).double() for _ in range(3)]
        coefficients = [torch.cat([x.mean(2), x.mean(3)], 2).mT @ x.flatten(2) for x in batches]
        torch.optim.swa_utils.update_bn(batches, layer)
        expected = torch.stack([c.var() for c in coefficients]).mean()
        torch.testing.assert_close(layer.coefficient_bn.running_var, expected.view(1))


def test_batch_norm_state():
    """Running statistics equal the statistics of nn.BatchNorm2d(1) on the coefficients; evaluation uses them."""
    layer = build(4, norm='bn_softmax', maps='')
    with torch.no_grad():
        layer.coefficient_bn.weight.fill_(1.5)
    reference = torch.nn.BatchNorm2d(1).double()
    reference.weight.data.fill_(1.5)
    for seed in range(3):
        x = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(seed)).double()
        means = torch.cat([x.mean(2), x.mean(3)], 2)
        layer.train(), reference.train()
        layer(x), reference((means.mT @ x.flatten(2))[:, None])
    torch.testing.assert_close(layer.coefficient_bn.running_var, reference.running_var)
    torch.testing.assert_close(layer.coefficient_bn.running_mean, reference.running_mean)
    assert layer.coefficient_bn.num_batches_tracked == reference.num_batches_tracked == 3
    layer.eval(), reference.eval()
    expected = means @ torch.softmax(reference((means.mT @ x.flatten(2))[:, None])[:, 0], 1)
    torch.testing.assert_close(layer(x), expected.view_as(x))
    alone = layer(x[:1])
    torch.testing.assert_close(alone, layer(x)[:1])


@pytest.mark.parametrize(
    ('kwargs', 'argument', 'value'),
    [
        (dict(key_channels=8), 'key_channels', 8),
        (dict(maps='q', key_channels=8), 'key_channels', 8),
        (dict(maps='q', out_channels=8), 'out_channels', 8),
        (dict(out_channels=8, residual=True), 'residual', 8),
        (dict(in_channels=4), 'in_channels', 4),
    ],
    ids=str,
)
def test_bad_combinations(kwargs, argument, value):
    with raises(ValueError, argument, value):
        KroneckerAttention2d(**{'channels': 4, **kwargs})


def test_build_as_plugin():
    name, layer = build_plugin_layer(dict(type='mmkron.KroneckerAttention2d', residual=True), in_channels=8, postfix=1)
    assert name == 'kronecker_attention1'
    assert layer.channels == 8


@pytest.mark.parametrize(('key_channels', 'folded'), [(4, True), (6, True), (3, False)])
@pytest.mark.parametrize('norm', ['softmax', 'bn_softmax', 'bn'])
def test_query_map_on_the_keys(key_channels, folded, norm):
    """KV's query map acts on the H + W keys if that is cheaper, with the same values and gradients."""
    layer = build(4, mode='kv', maps='qkv', key_channels=key_channels, norm=norm)
    assert layer.query_map_on_keys is folded
    x, context = torch.randn(2, 4, 5, 7).double(), torch.randn(2, 4, 3, 6).double()
    results = []
    for layer.query_map_on_keys in (False, True):
        inputs = [each.clone().requires_grad_() for each in (x, context)]
        out = layer(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), [*inputs, *layer.parameters()])))
    for plain, fast in zip(*results):
        torch.testing.assert_close(fast, plain, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize('mode', ['kv', 'qkv', 'dense', 'pooled'])
@pytest.mark.parametrize('norm', ['softmax', 'bn_softmax', 'bn'])
def test_coefficients_are_those_of_the_output(mode, norm):
    """Mapped values times coefficients are the output's columns; softmax coefficients sum to 1."""
    layer = build(4, mode=mode, maps='qkv', norm=norm, residual=False)
    layer.eval()
    if norm != 'softmax':
        layer.coefficient_bn.running_var.fill_(2.5)
        layer.coefficient_bn.running_mean.fill_(0.3)
    x, context = torch.randn(2, 4, 5, 7).double(), torch.randn(2, 4, 3, 6).double()
    for source, (height, width) in ((None, (5, 7)), (context, (3, 6))):
        coefficients = layer.coefficients(x, source)
        queries = 5 + 7 if mode == 'qkv' else 5 * 7
        keys = dict(dense=height * width, pooled=-(-height // 2) * -(-width // 2)).get(mode, height + width)
        assert coefficients.shape == (2, keys, queries)
        if norm != 'bn':
            torch.testing.assert_close(coefficients.sum(1), torch.ones(2, queries).double())
        seen = x if source is None else source
        if mode in ('kv', 'qkv'):
            values = torch.cat([seen.mean(2), seen.mean(3)], 2)
        else:
            values = (F.max_pool2d(seen, 2, ceil_mode=True) if mode == 'pooled' else seen).flatten(2)
        columns = layer.value_map.weight[:, :, 0] @ values @ coefficients
        outer = mode == 'qkv'
        expected = columns[:, :, None, :7] + columns[:, :, 7:, None] if outer else columns.view(2, 4, 5, 7)
        torch.testing.assert_close(layer(x, source), expected)


@pytest.mark.parametrize('norm', ['bn_softmax', 'bn'])
def test_looking_at_coefficients_changes_nothing(norm):
    """In training, coefficients use the batch statistics and leave the running statistics alone."""
    layer = build(4, mode='kv', norm=norm).train()
    x = torch.randn(2, 4, 5, 7).double()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    coefficients = layer.coefficients(x)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    columns = layer.value_map.weight[:, :, 0] @ torch.cat([x.mean(2), x.mean(3)], 2) @ coefficients
    torch.testing.assert_close(layer(x), columns.view(2, 4, 5, 7))


def test_query_map_that_has_to_be_called():
    """A query map is called if it is an adapter or if its call computes the weight."""
    layer = build(4, mode='kv', maps='qkv')
    x = torch.randn(2, 4, 5, 7).double()
    first, query_map = layer(x), layer.query_map
    layer.query_map = torch.nn.Sequential(query_map, torch.nn.Hardtanh(-1e9, 1e9))
    torch.testing.assert_close(layer(x), first)
    layer.query_map = torch.nn.utils.spectral_norm(query_map)
    layer(x).square().sum().backward()
    assert query_map.weight_orig.grad.abs().max() > 0
    for parametrized in (query_map, torch.nn.utils.parametrizations.spectral_norm(build(4, mode='kv').value_map)):
        layer.query_map = parametrized.train(False)
        query, key, value = (F.conv2d(x, m.weight[..., None]) for m in (parametrized, layer.key_map, layer.value_map))
        torch.testing.assert_close(layer(x), kronecker_attention_kv(query, key, value))


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('mode', list(OPERATORS))
@pytest.mark.parametrize('norm', ['softmax', 'bn'])
def test_no_map_in_the_batch(mode, norm, training):
    """An empty batch gives an empty output, zero gradients and unchanged statistics."""
    layer = build(4, mode=mode, maps='qkv', out_channels=6, context_channels=3, norm=norm).train(training)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x, context = (torch.zeros(0, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 5, 7), (3, 2, 9)))
    out = layer(x, context)
    assert (out.shape, out.dtype) == ((0, 6, 5, 7), torch.float64)
    out.sum().backward()
    assert (x.grad.shape, context.grad.shape) == (x.shape, context.shape)
    assert all(p.grad.count_nonzero() == 0 for p in layer.parameters())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert layer(torch.randn(1, 4, 5, 7).double(), torch.randn(1, 3, 2, 9).double()).isfinite().all()


def test_roi_head_without_regions():
    """In a bounding-box head of MMDetection, every parameter gets a gradient, also without regions."""
    heads = pytest.importorskip('mmdet.models.roi_heads.bbox_heads')

    class Refined(heads.Shared2FCBBoxHead):
        def __init__(self):
            super().__init__(in_channels=8, fc_out_channels=6, num_classes=3, roi_feat_size=5)
            self.refine = torch.nn.ModuleList([KroneckerAttention2d(8, norm='bn_softmax'), LambdaLayer(8, scope=3)])

        def forward(self, x):
            for layer in self.refine:
                x = layer(x)
            return super().forward(x)

    with DefaultScope.overwrite_default_scope('mmdet'):
        head = Refined().train()
    for count in (0, 4):
        head.zero_grad()
        scores, boxes = head(torch.randn(count, 8, 5, 5))
        assert (scores.shape, boxes.shape) == ((count, 4), (count, 12))
        (scores.sum() + boxes.sum()).backward()
        gradients = [p.grad for p in head.parameters()]
        assert all(g is not None and g.isfinite().all() for g in gradients)
        assert any(g.any() for g in gradients) == (count > 0)


@pytest.mark.parametrize('norm', ['bn_softmax', 'bn'])
@pytest.mark.parametrize('channels', [2, 8])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision(norm, channels, dtype):
    """The statistics of a layer in half precision are float32's, rounded once per step, and never infinite."""
    layer = build(channels, norm=norm).to(dtype)
    wide = build(channels, norm=norm).to(dtype).float()
    for seed in range(3):
        x = torch.randn(4, channels, 6, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)
        out, expected = layer(x), wide(x.float())
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    ours, theirs = layer.coefficient_bn, wide.coefficient_bn
    assert ours.running_var.dtype == dtype
    torch.testing.assert_close(ours.running_var.float(), theirs.running_var, rtol=0.02, atol=0)
    torch.testing.assert_close(ours.running_mean.float(), theirs.running_mean, rtol=0.02, atol=0.01)
    assert ours.num_batches_tracked == 3
    torch.testing.assert_close(layer.coefficients(x).float(), wide.coefficients(x.float()), rtol=0.05, atol=0.02)
    assert ours.num_batches_tracked == 3
    layer(1000 * x)
    assert ours.running_var.isfinite().all()
    assert layer.eval()(x).isfinite().all()


def test_synchronized_coefficients():
    """Synchronized batch norm gives the same output in evaluation mode."""
    layer, x = build(4, norm='bn'), torch.randn(2, 4, 5, 7).double()
    layer(x)
    expected = layer.eval()(x)
    converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(converted.coefficient_bn, torch.nn.SyncBatchNorm)
    torch.testing.assert_close(converted(x), expected)


def test_constructor_initializes():
    """The constructor draws Xavier uniform weights; the value map of a residual layer is zero."""
    torch.manual_seed(0)
    for residual in (False, True):
        layer = KroneckerAttention2d(96, maps='qkv', key_channels=48, residual=residual)
        for conv, bound in ((layer.query_map, (6 / 144) ** 0.5), (layer.value_map, (6 / 192) ** 0.5)):
            if residual and conv is layer.value_map:
                assert conv.weight.count_nonzero() == 0
            else:
                assert 0.99 * bound < conv.weight.abs().max() <= bound
                assert conv.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    layer = KroneckerAttention2d(8, init_cfg=dict(type='Constant', layer='Conv1d', val=0.25))
    assert (layer.value_map.weight == 0.25).all()
