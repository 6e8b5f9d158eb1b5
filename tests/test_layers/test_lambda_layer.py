"""LambdaLayer against its definition and against public layers; weights, precision and misuse."""

import numpy as np
import pytest
import torch
import torch.nn as nn
from lambda_networks import LambdaLayer as LucidrainsLayer
from mmcv.cnn import build_plugin_layer
from timm.layers.lambda_layer import LambdaLayer as TimmLayer

from mmkron.layers import LambdaLayer
from support.errors import raises


def maps(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randomize(layer, seed=0):
    """Draw all weights and statistics of a layer, in float64 and evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    layer.double().eval()
    for name, tensor in layer.state_dict().items():
        if tensor.is_floating_point():
            tensor.normal_(generator=generator)
            if name.endswith('running_var'):
                tensor.abs_().add_(0.5)
    return layer


def numpy_layer(layer, x, mask=None):
    """Compute the layer in evaluation mode, one query at a time."""
    state = {name: value.numpy() for name, value in layer.state_dict().items()}
    x = x.numpy()
    batch, _, height, width = x.shape
    positions = [(i, j) for i in range(height) for j in range(width)]
    heads, intra, depth = layer.heads, layer.intra_depth, layer.dim_key
    value_depth = layer.dim_out // heads
    table = state['position_table']
    radius = np.array(table.shape[2:]) // 2

    def normalize(y, name):
        mean, var, weight, bias = (state[f'{name}.{s}'] for s in ('running_mean', 'running_var', 'weight', 'bias'))
        return (y - mean) / np.sqrt(var + 1e-5) * weight + bias

    columns = np.stack([x[:, :, i, j] for i, j in positions], 1)  # (B, n, d)
    maps = columns @ state['qkv_map.weight'][:, :, 0, 0].T
    queries, keys, values = np.split(maps, [heads * depth, (heads + intra) * depth], 2)
    queries = normalize(queries, 'query_norm').reshape(batch, -1, heads, depth)
    values = normalize(values, 'value_norm').reshape(batch, -1, intra, value_depth)
    weights = np.exp(keys.reshape(batch, -1, intra, depth))
    if mask is not None:
        weights = weights * mask.numpy().reshape(batch, -1, 1, 1)
    weights /= weights.sum(1, keepdims=True)
    content = np.einsum('bmuk,bmuv->bkv', weights, values)
    out = np.empty((batch, heads, value_depth, height, width))
    for n, (i, j) in enumerate(positions):
        embeddings = np.zeros((len(positions), intra, depth))
        for m, position in enumerate(positions):
            offset = np.array(position) - (i, j)
            entry = offset // layer.dilation + radius
            if not (offset % layer.dilation).any() and (entry >= 0).all() and (entry < table.shape[2:]).all():
                embeddings[m] = table[:, :, entry[0], entry[1]]
        matrix = content + np.einsum('muk,bmuv->bkv', embeddings, values)
        if layer.position_bias is not None:
            matrix = matrix + state['position_bias'][:, None]
        out[:, :, :, i, j] = np.einsum('bhk,bkv->bhv', queries[:, n], matrix)
    out = torch.from_numpy(out.reshape(batch, layer.dim_out, height, width))
    return out + torch.from_numpy(x) if layer.residual else out


def close(out, expected, tolerance=1e-10):
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


class TestValues:
    @pytest.mark.parametrize(
        'kwargs',
        [
            dict(heads=1, intra_depth=4),
            dict(heads=8),
            dict(scope=None, feat_size=(6, 7)),
            dict(scope=None, feat_size=(4, 9), intra_depth=4),
            dict(dim_out=12),
            dict(dim_out=4, heads=1, intra_depth=4),
            dict(dilation=3, intra_depth=2),
            dict(position_bias=True),
            dict(residual=True),
            dict(residual=True, position_bias=True, dilation=2, intra_depth=2),
        ],
        ids=str,
    )
    def test_feature(self, kwargs):
        layer = randomize(LambdaLayer(**{**dict(dim=8, dim_key=3, scope=5), **kwargs}))
        for size in ((6, 7), (1, 1), (1, 9)):
            x = maps(2, 8, *size)
            close(layer(x), numpy_layer(layer, x))

    @pytest.mark.parametrize('kwargs', [dict(), dict(residual=True, position_bias=True, intra_depth=2)], ids=str)
    def test_mask(self, kwargs):
        """The mask affects the content lambda but not the position lambda."""
        layer = randomize(LambdaLayer(8, dim_key=3, scope=3, **kwargs))
        x, mask = maps(2, 8, 5, 7), torch.ones(2, 5, 7, dtype=torch.bool)
        close(layer(x, mask), layer(x))
        mask[0, 3:] = mask[1, :, 5:] = False
        out = layer(x, mask)
        close(out, numpy_layer(layer, x, mask))
        assert not torch.allclose(out, layer(x))

    @pytest.mark.parametrize(
        ('dim', 'dim_out', 'key', 'heads', 'intra', 'scope'),
        [(64, 64, 16, 4, 1, 23), (32, 48, 8, 8, 4, 7)],
    )
    def test_parameter_count(self, dim, dim_out, key, heads, intra, scope):
        """The count is d (hk + uk + uv) + 2hk + 2uv + ku r^2; a learned bias adds k."""
        width = dim_out // heads
        expected = dim * (heads * key + intra * key + intra * width)
        expected += 2 * heads * key + 2 * intra * width + key * intra * scope**2
        for position_bias in (False, True):
            layer = LambdaLayer(dim, dim_out, key, heads, intra, scope, position_bias=position_bias)
            assert sum(p.numel() for p in layer.parameters()) == expected + position_bias * key
        assert dim == 32 or sum(p.numel() for p in LambdaLayer(dim).parameters()) == expected == 14_768  # the defaults

    def test_gradcheck(self):
        layer = randomize(LambdaLayer(4, dim_key=2, heads=2, scope=3, residual=True)).train()
        assert torch.autograd.gradcheck(layer, maps(2, 4, 3, 4).requires_grad_())


def equal_to(layer, other, x):
    """Compare outputs in both modes, gradients of the input, and the statistics after training."""
    layer.query_norm.load_state_dict(other.norm_q.state_dict())
    layer.value_norm.load_state_dict(other.norm_v.state_dict())
    for training in (False, True):
        results = []
        for each in (layer, other):
            leaf = x.clone().requires_grad_()
            out = each.train(training)(leaf)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
        for ours, theirs in zip(*results):
            close(ours / theirs.abs().max(), theirs / theirs.abs().max())
    for name in ('running_mean', 'running_var', 'num_batches_tracked'):
        close(getattr(layer.query_norm, name), getattr(other.norm_q, name))
        close(getattr(layer.value_norm, name), getattr(other.norm_v, name))


class TestPublicLayers:
    @pytest.mark.parametrize(('dim_out', 'heads', 'intra'), [(12, 4, 4), (16, 8, 1), (4, 1, 1)])
    @pytest.mark.parametrize('scope', [5, None], ids=['local', 'global'])
    def test_lambda_networks(self, dim_out, heads, intra, scope):
        sizes = dict(r=scope) if scope else dict(n=6)
        other = randomize(LucidrainsLayer(8, dim_k=3, heads=heads, dim_out=dim_out, dim_u=intra, **sizes))
        size = None if scope else 6
        layer = LambdaLayer(8, dim_out, 3, heads, intra, scope, size, position_bias=size is None).double()
        with torch.no_grad():
            layer.qkv_map.weight.copy_(torch.cat([m.weight for m in (other.to_q, other.to_k, other.to_v)]))
            if scope:
                layer.position_table.copy_(other.pos_conv.weight[:, :, 0].transpose(0, 1))
                layer.position_bias.copy_(other.pos_conv.bias)
            else:
                layer.position_table.copy_(other.rel_pos_emb.permute(3, 2, 0, 1))
        equal_to(layer, other, maps(3, 8, *((5, 9) if scope else (6, 6))))

    @pytest.mark.parametrize('heads', [1, 4, 8])
    @pytest.mark.parametrize('scope', [5, None], ids=['local', 'global'])
    def test_timm(self, heads, scope):
        size = None if scope else (5, 9)
        other = randomize(TimmLayer(8, num_heads=heads, dim_head=3, r=scope, feat_size=size))
        layer = LambdaLayer(8, None, 3, heads, 1, scope, size, position_bias=size is None).double()
        with torch.no_grad():
            layer.qkv_map.weight.copy_(other.qkv.weight)
            if scope:
                layer.position_table.copy_(other.conv_lambda.weight[..., 0].transpose(0, 1))
                layer.position_bias.copy_(other.conv_lambda.bias)
            else:
                layer.position_table.copy_(other.pos_emb.permute(2, 0, 1)[None])
        equal_to(layer, other, maps(3, 8, 5, 9))


class TestGlobalTable:
    def pair(self, sizes, **kwargs):
        """Return two global layers of these sizes; the second has the weights of the first, with its table resized."""
        layers = [randomize(LambdaLayer(8, dim_key=3, scope=None, feat_size=size, **kwargs)) for size in sizes]
        first, second = (layer.position_table.data for layer in layers)
        second.zero_()
        center = [side // 2 for side in second.shape[2:]]
        for i in range(second.shape[2]):
            for j in range(second.shape[3]):
                row, column = i - center[0] + first.shape[2] // 2, j - center[1] + first.shape[3] // 2
                if 0 <= row < first.shape[2] and 0 <= column < first.shape[3]:
                    second[:, :, i, j] = first[:, :, row, column]
        state = {**layers[0].state_dict(), 'position_table': second.clone()}
        layers[1].load_state_dict(state)
        return layers

    @pytest.mark.parametrize('own', [(7, 9), (3, 12), (1, 1)])
    def test_other_sizes(self, own):
        """On a map of another size the table is cropped or padded with zeros."""
        layer, fitted = self.pair((own, (5, 7)), intra_depth=2)
        x = maps(2, 8, 5, 7)
        close(layer(x), fitted(x))
        close(layer(x), numpy_layer(layer, x))

    @pytest.mark.parametrize('own', [(7, 9), (4, 6), (3, 12), (5, 5)])
    def test_loads_other_sizes(self, own):
        layer, fitted = self.pair((own, (5, 5)))
        state = layer.state_dict()
        before = {name: value.clone() for name, value in state.items()}
        loaded = LambdaLayer(8, dim_key=3, scope=None, feat_size=5).double().eval()
        loaded.load_state_dict(state)
        assert torch.equal(loaded.position_table, fitted.position_table)
        assert all(torch.equal(value, before[name]) for name, value in state.items())  # the caller's
        nested = nn.Sequential(nn.Identity(), loaded)
        nn.init.zeros_(loaded.position_table)
        nested.load_state_dict(nn.Sequential(nn.Identity(), layer).state_dict())
        assert torch.equal(loaded.position_table, fitted.position_table)

    def test_scope_of_another_layer(self):
        nested = nn.Sequential(nn.Identity(), LambdaLayer(8, scope=7))
        for other in (LambdaLayer(8, scope=5), LambdaLayer(8, scope=None, feat_size=3)):
            with raises(ValueError, '1.position_table', (5, 5)):
                nested.load_state_dict(nn.Sequential(nn.Identity(), other).state_dict())
        nested.load_state_dict(nn.Sequential(nn.Identity(), LambdaLayer(8, scope=None, feat_size=4)).state_dict())


class TestInitialization:
    def test_statistics(self):
        """Weights are normal: (k d)^-1/2 for queries, d^-1/2 for keys and values, 1 for the table."""
        torch.manual_seed(0)
        layer = LambdaLayer(512, 1024, dim_key=32, heads=8, intra_depth=2, position_bias=True)
        queries, keys, values = layer.qkv_map.weight.split([8 * 32, 2 * 32, 2 * 128])
        for weight, std in ((queries, (32 * 512) ** -0.5), (keys, 512**-0.5), (values, 512**-0.5)):
            assert weight.std().item() == pytest.approx(std, rel=0.03)
            assert abs(weight.mean().item()) < 0.03 * std
            assert weight.abs().max() > 3 * std  # normal, not uniform
        assert layer.position_table.std().item() == pytest.approx(1, rel=0.03)
        assert layer.position_table.abs().max() > 3
        assert layer.position_bias.count_nonzero() == 0
        assert layer.qkv_map.bias is None

    def test_init_cfg(self):
        """init_cfg applies after the paper's initialization, also in the constructor."""
        layer = LambdaLayer(8, scope=5, init_cfg=dict(type='Constant', layer='Conv2d', val=0.25))
        assert (layer.qkv_map.weight == 0.25).all()
        assert 0.8 < layer.position_table.std() < 1.2
        layer.init_weights()
        assert (layer.qkv_map.weight == 0.25).all()
        assert 0.8 < layer.position_table.std() < 1.2

    @pytest.mark.parametrize('norm_cfg', [None, dict(type='GN', num_groups=2), dict(type='SyncBN')], ids=str)
    def test_residual(self, norm_cfg):
        """The layer starts as the identity, and its gain gets a gradient."""
        layer = LambdaLayer(8, dim_key=4, scope=5, residual=True, norm_cfg=norm_cfg)
        x = maps(2, 8, 5, 7, dtype=torch.float32)
        if norm_cfg and norm_cfg['type'] == 'SyncBN':
            layer.eval()  # its training is for a GPU
        assert torch.equal(layer(x), x)
        layer.init_weights()
        out = layer(x)
        assert torch.equal(out, x)
        (out * maps(2, 8, 5, 7, seed=1, dtype=torch.float32)).sum().backward()
        assert layer.value_norm.weight.grad.count_nonzero() == len(layer.value_norm.weight)
        assert layer.qkv_map.weight.count_nonzero() == layer.qkv_map.weight.numel()
        with torch.no_grad():
            layer.value_norm.weight -= layer.value_norm.weight.grad
        assert not torch.equal(layer(x), x)


class TestPrecision:
    @pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
    def test_autocast(self, dtype):
        """At initialization, sums over 23 x 23 embeddings come close to the limit of float16."""
        torch.manual_seed(0)
        layer = LambdaLayer(32)
        x = maps(1, 32, 40, 40, dtype=torch.float32)
        results = []
        for enabled in (False, True):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            with torch.autocast('cpu', dtype, enabled=enabled):
                out = layer(leaf)
            assert out.dtype == (dtype if enabled else torch.float32)
            # The cotangent of a mean times a loss scale that float16 training starts with.
            (out.float() * maps(*out.shape, seed=1, dtype=torch.float32)).mean().mul(2**16).backward()
            results.append([out.detach().float(), leaf.grad, *(p.grad for p in layer.parameters())])
        assert 20 < results[0][0].std() < 200
        for plain, half in zip(*results):
            assert half.isfinite().all()
            assert (half - plain).norm() < (0.005 if dtype == torch.float16 else 0.05) * plain.norm()


def test_build_as_plugin():
    cfg = dict(type='mmkron.LambdaLayer', heads=2, scope=5, residual=True)
    name, layer = build_plugin_layer(cfg, postfix='_after', in_channels=8)
    assert name == 'lambda_layer_after'
    assert (layer.dim, layer.dim_out, layer.heads, layer.scope) == (8, 8, 2, 5)


@pytest.mark.parametrize(
    ('argument', 'value', 'kwargs'),
    [
        ('in_channels', None, dict()),
        ('in_channels', 4, dict(dim=8, in_channels=4)),
        ('heads', 4, dict(dim=10)),
        ('heads', 4, dict(dim=8, dim_out=6)),
        ('residual', 4, dict(dim=8, dim_out=4, residual=True)),
        ('residual', dict(type='BN', affine=False), dict(dim=8, residual=True, norm_cfg=dict(type='BN', affine=False))),
        ('feat_size', 7, dict(dim=8, feat_size=7)),
        ('feat_size', None, dict(dim=8, scope=None)),
    ],
)
def test_bad_combinations(argument, value, kwargs):
    """Arguments that exclude each other are refused; tests/test_bad_values.py has single bad values."""
    with raises(ValueError, argument, value):
        LambdaLayer(**kwargs)


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('kwargs', [dict(), dict(dim_out=12), dict(residual=True), dict(position_bias=True)], ids=str)
def test_no_map_in_the_batch(kwargs, training):
    """An empty batch gives an empty output, zero gradients and unchanged statistics."""
    layer = LambdaLayer(8, dim_key=4, scope=5, **kwargs).train(training)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.zeros(0, 8, 5, 7, requires_grad=True)
    out = layer(x, torch.ones(0, 5, 7, dtype=torch.bool))
    assert (out.shape, out.dtype) == ((0, layer.dim_out, 5, 7), torch.float32)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad.count_nonzero() == 0 for p in layer.parameters())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert layer(torch.randn(2, 8, 5, 7)).isfinite().all()
