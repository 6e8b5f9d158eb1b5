"""LambdaResNet: parameters and outputs against other libraries, the block against plain PyTorch, placement."""

import copy
import pickle
from functools import cache, partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from mmcv.cnn.bricks import DropPath
from timm.layers import SEModule
from timm.models.resnet import Bottleneck, ResNet

from mmkron.layers import LambdaLayer
from mmkron.models import LambdaResNet
from mmkron.models.backbones.lambda_resnet import DEPTHS, LambdaBottleneck, place_lambdas
from support.errors import raises

SMALL = dict(base_channels=8, stage_blocks=(1, 1, 2, 1), lambda_cfg=dict(scope=5))
HEAD = 2048 * 1000 + 1000
# Arguments of timm's ResNet-RS; with squeeze-and-excitation it is the published network.
RS = dict(stem_width=32, stem_type='deep', replace_stem_pool=True, avg_down=True)


def count(**kwargs):
    """Return the parameters with a head of 1000 classes."""
    with torch.device('meta'):
        return HEAD + sum(p.numel() for p in LambdaResNet(**kwargs).parameters())


def replaced(width, k=16, h=4, u=1, r=23):
    """Return the parameters that a block gains when a lambda layer replaces its 3 x 3 convolution."""
    v = width // h
    return width * (h * k + u * k + u * v) + 2 * h * k + 2 * u * v + k * u * r * r - 9 * width * width


@cache
def timm_count(blocks, se=False):
    block_args = dict(attn_layer=partial(SEModule, rd_ratio=0.25)) if se else None
    model = ResNet(Bottleneck, blocks, block_args=block_args, device='meta', **RS)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ('letters', 'published'),
    [
        ('CCCC', 25.6),
        ('LCCC', 25.5),
        ('LLCC', 25.0),
        ('LLLC', 21.7),
        ('LLLL', 15.0),
        ('CLLL', 15.1),
        ('CCLL', None),  # published as 15.4, which no reading gives
        ('CCCL', 18.8),
    ],
)
def test_counts_of_hybrids(letters, published):
    """ResNet-50 with lambda layers in whole stages."""
    with torch.device('meta'):
        expected = sum(p.numel() for p in torchvision.models.resnet50().parameters())
    for index, (letter, blocks) in enumerate(zip(letters, (3, 4, 6, 3))):
        expected += (letter == 'L') * blocks * replaced(64 * 2**index)
    assert count(stage_layers=letters, skeleton='v1.5') == expected
    assert published is None or expected / 1e6 == pytest.approx(published, abs=0.08)


@pytest.mark.parametrize(
    ('lambda_cfg', 'symbols'),
    [
        (dict(scope=7, intra_depth=4), dict(r=7, u=4)),
        (dict(scope=7, dim_key=8, heads=8, intra_depth=8), dict(r=7, k=8, h=8, u=8)),
        (dict(dim_key=32), dict(k=32)),
    ],
)
def test_counts_of_other_lambdas(lambda_cfg, symbols):
    expected = count(stage_layers='CCCC') + sum(
        blocks * replaced(64 * 2**index, **symbols) for index, blocks in enumerate((3, 4, 6, 3))
    )
    assert count(stage_layers='LLLL', lambda_cfg=lambda_cfg) == expected


def test_counts_of_the_skeleton():
    """Without lambda layers the network is ResNet-RS-101."""
    blocks = DEPTHS[101][0]
    assert count(depth=101, stage_layers='CCCC') == timm_count(blocks) == pytest.approx(44.605e6, abs=500)
    assert count(depth=101, stage_layers='CCCC', se=True) == timm_count(blocks, se=True)
    assert timm_count(blocks, se=True) == pytest.approx(63.619e6, abs=500)


@pytest.mark.parametrize(('depth', 'family', 'last_two'), [(101, 36.2, 25.4), (152, 50.3, 33.9)])
def test_counts_of_the_family(depth, family, last_two):
    blocks, c4 = DEPTHS[depth]
    expected = timm_count(blocks) + len(c4) * replaced(256) + blocks[3] * replaced(512)
    assert count(depth=depth) == expected == pytest.approx(family * 1e6, abs=0.06e6)
    expected += (blocks[2] - len(c4)) * replaced(256)
    assert count(depth=depth, stage_layers='CCLL') == expected == pytest.approx(last_two * 1e6, abs=0.06e6)


def test_placement():
    """Lambda blocks are at equal steps in c4, everywhere in c5 and nowhere in c2 and c3."""
    for depth, number in zip((50, 101, 152, 200, 270, 350, 420), (1, 3, 6, 6, 6, 6, 8)):
        c2, c3, c4, c5 = place_lambdas(depth)
        assert (len(c2), len(c3), len(c4), len(c5)) == DEPTHS[depth][0]
        assert all(c5)
        assert not any(c2 + c3)
        indices = [i + 1 for i, is_lambda in enumerate(c4) if is_lambda]
        assert indices == [(i + 1) * indices[0] for i in range(number)]
    assert place_lambdas(50, stage_layers='CLCL') == [[False] * 3, [True] * 4, [False] * 6, [True] * 3]
    placed = place_lambdas(50, stage_blocks=(1, 1, 3, 2), lambda_blocks=((), [1], (3, 1), range(2, 3)))
    assert placed == [[False], [True], [True, False, True], [False, True]]
    model = LambdaResNet(**SMALL, lambda_blocks=((), (), (2,), (1,)))
    names = [name for name, m in model.named_modules() if isinstance(m, LambdaLayer)]
    assert names == ['stages.2.1.spatial.layer', 'stages.3.0.spatial.layer']


@pytest.mark.parametrize('se', [False, True])
def test_equals_timms_resnet_rs(se):
    """With the same weights, the maps equal those of timm's ResNet-RS."""
    torch.manual_seed(0)
    block_args = dict(attn_layer=partial(SEModule, rd_ratio=0.25)) if se else None
    channels = tuple(SMALL['base_channels'] * 2**i for i in range(4))
    theirs = ResNet(
        Bottleneck, SMALL['stage_blocks'], channels=channels, block_args=block_args, **dict(RS, stem_width=4)
    )
    disturb(theirs)
    ours = LambdaResNet(**SMALL, stage_layers='CCCC', se=se, out_indices=(0, 1, 2, 3)).double().eval()
    source = [v for k, v in theirs.state_dict().items() if not k.startswith('fc.')]
    target = ours.state_dict()
    assert [v.shape for v in source] == [v.shape for v in target.values()]
    ours.load_state_dict(dict(zip(target, source)))
    x = torch.randn(2, 3, 65, 97, dtype=torch.float64)
    for out, expected in zip(ours(x), theirs.forward_intermediates(x, indices=4, intermediates_only=True)):
        torch.testing.assert_close(out, expected)


def disturb(model):
    """Draw the weights and statistics of all batch norms, in float64 and evaluation mode."""
    model.double().eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.weight.data.uniform_(0.5, 1.5)
            m.bias.data.uniform_(-0.5, 0.5)
            m.running_mean.uniform_(-0.5, 0.5)
            m.running_var.uniform_(0.5, 1.5)
    return model


def norm(x, bn):
    return F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias)


@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('lambda_pool', [2, 3])
@pytest.mark.parametrize('avg_down', [False, True])
@pytest.mark.parametrize('act', ['ReLU', 'SiLU'])
def test_lambda_block(stride, lambda_pool, avg_down, act):
    torch.manual_seed(0)
    block = LambdaBottleneck(
        12,
        8,
        stride,
        dict(dim_key=3, heads=2, scope=3),
        lambda_pool,
        avg_down,
        se=True,
        drop_path_rate=0.5,
        zero_init_residual=False,
        norm_cfg=dict(type='BN'),
        act_cfg=dict(type=act),
    )
    disturb(block)
    act = getattr(F, act.lower())
    x = torch.randn(2, 12, 6, 8, dtype=torch.float64)
    path = act(norm(F.conv2d(x, block.reduce.conv.weight), block.reduce.bn))
    path = block.spatial.layer(path)
    if stride == 2 and lambda_pool == 2:
        path = path.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))
    elif stride == 2:
        path = F.pad(path, (1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2).mean((-1, -2))
    path = act(norm(path, block.spatial.norm))
    path = norm(F.conv2d(path, block.project.conv.weight), block.project.bn)
    short, conv = x, block.shortcut[1]
    if stride == 2:
        short = x.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2)) if avg_down else x[..., ::2, ::2]
    short = norm(F.conv2d(short, conv.conv.weight), conv.bn)
    torch.testing.assert_close(block(x), act(path + short))


def test_initialization():
    """Convolutions are Kaiming normal, lambda layers keep their own initialization, blocks start as their shortcut."""
    torch.manual_seed(0)
    model = LambdaResNet(stage_layers='CCLL', stage_blocks=(1, 1, 1, 1), out_indices=(0, 1, 2, 3))
    for name, m in model.named_modules():
        if isinstance(m, LambdaLayer):
            assert m.position_table.std().item() == pytest.approx(1, rel=0.05), name
        elif isinstance(m, nn.Conv2d) and not name.endswith('qkv_map'):
            fan_out = m.out_channels * m.kernel_size[0] * m.kernel_size[1]
            assert m.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1), name
        elif isinstance(m, nn.BatchNorm2d):
            assert (m.weight == (0 if 'project' in name else 1)).all(), name


def test_initialization_of_the_layers():
    """``init_cfg`` of ``lambda_cfg`` initializes the lambda layers."""
    layer = dict(scope=5, init_cfg=dict(type='Constant', layer='Conv2d', val=0.5))
    init_cfg = dict(type='Constant', layer='Conv2d', val=0.25)
    model = LambdaResNet(**dict(SMALL, lambda_cfg=layer), stage_layers='CCLL', init_cfg=init_cfg)
    model.init_weights()
    for name, m in model.named_modules():
        if isinstance(m, nn.Conv2d):
            assert (m.weight == (0.5 if name.endswith('qkv_map') else 0.25)).all(), name


def tables(model):
    return [m.position_table for m in model.modules() if isinstance(m, LambdaLayer)]


def test_share_embeddings():
    """A stage has a single table, also after copying, initialization and loading."""
    kwargs = dict(SMALL, stage_layers='CCLL', stage_blocks=(1, 1, 2, 3), zero_init_residual=False)
    plain, shared = (LambdaResNet(**kwargs, share_embeddings=share) for share in (False, True))
    numbers = [sum(p.numel() for p in model.parameters()) for model in (plain, shared)]
    assert numbers[0] - numbers[1] == (1 + 2) * 16 * 5 * 5
    assert len(set(tables(plain))) == 5
    shared.init_weights()
    other = LambdaResNet(**kwargs, share_embeddings=True)
    other.load_state_dict(shared.state_dict())
    loaded = LambdaResNet(**kwargs)
    loaded.load_state_dict(shared.state_dict())
    x = torch.randn(1, 3, 64, 64)
    expected = shared.eval()(x)[0]
    for model in (shared, other, copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        first, second, *rest = tables(model)
        assert first is second
        assert first is not rest[0]
        assert rest[0] is rest[1]
        assert rest[0] is rest[2]
        torch.testing.assert_close(model.eval()(x)[0], expected)
    shared(x)[0].sum().backward()
    loaded.eval()(x)[0].sum().backward()
    gradients = [table.grad for table in tables(loaded)]
    torch.testing.assert_close(tables(shared)[0].grad, sum(gradients[:2]), rtol=1e-3, atol=1e-5)


def test_global_scope():
    """Tables fit the map of each layer; the first layer of a stage sees the map of the previous stage."""
    model = LambdaResNet(
        stage_layers='CCLL',
        stage_blocks=(1, 1, 2, 3),
        base_channels=8,
        lambda_cfg=dict(scope=None),
        img_size=(97, 64),
        share_embeddings=True,
    )
    sizes = [(13, 8), (7, 4), (7, 4), (4, 2), (4, 2)]
    assert [tuple(t.shape[2:]) for t in tables(model)] == [(2 * h - 1, 2 * w - 1) for h, w in sizes]
    assert [t is tables(model)[2] for t in tables(model)] == [False, False, True, False, False]
    seen = []
    for m in model.modules():
        if isinstance(m, LambdaLayer):
            m.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape[2:])))
    model(torch.randn(2, 3, 97, 64))
    assert seen == sizes
    square = LambdaResNet(**dict(SMALL, lambda_cfg=dict(scope=None)), stage_layers='CCCL', img_size=224)
    assert tables(square)[0].shape[2:] == (27, 27)


def test_drop_path():
    model = LambdaResNet(**dict(SMALL, stage_blocks=(2, 1, 2, 1)), stage_layers='CCLL', drop_path_rate=0.3)
    rates = [m.drop_prob for m in model.modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0.06, 0.12, 0.18, 0.24, 0.3])
    assert not any(isinstance(m, DropPath) for m in LambdaResNet(**SMALL, stage_layers='CCLL').modules())
    part = LambdaResNet(**SMALL, stage_layers='CCLL', drop_path_rate=0.4, out_indices=1)
    assert [m.drop_prob for m in part.modules() if isinstance(m, DropPath)] == pytest.approx([0.1])


@pytest.mark.parametrize(
    ('argument', 'value', 'kwargs'),
    [
        ('stage_layers', 'CCLL', dict(stage_layers='CCLL', lambda_blocks=((),) * 4)),
        ('stage_blocks', (1, 1, 1, 1), dict(stage_blocks=(1, 1, 1, 1))),
        ('lambda_blocks', (7,), dict(lambda_blocks=((), (), (7,), ()))),
        ('lambda_cfg', dict(r=23), dict(lambda_cfg=dict(r=23))),
        ('heads', 5, dict(lambda_cfg=dict(heads=5))),
        ('c2', 18, dict(stage_layers='LLLL', base_channels=18)),
        ('img_size', 224, dict(img_size=224)),
        ('img_size', None, dict(lambda_cfg=dict(scope=None))),
        ('zero_init_residual', dict(type='IN'), dict(norm_cfg=dict(type='IN'))),
    ],
)
def test_bad_combinations(argument, value, kwargs):
    """tests/test_bad_values.py has single bad values."""
    with torch.device('meta'), raises(ValueError, argument, value):
        LambdaResNet(**kwargs)
