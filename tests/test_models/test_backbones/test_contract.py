"""The contract that every registered backbone keeps. A new backbone joins by one line in CASES."""

import copy
import functools
import io
import itertools
import math
import pickle
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parameters_to_vector

from mmkron.layers import LambdaLayer
from mmkron.models import backbones
from mmkron.models.backbones import KANet, LambdaMobileNetV2, LambdaResNet, QKFormer
from mmkron.models.backbones.kanet import ARCHS
from mmkron.registry import MODELS
from support.errors import raises


class Case(NamedTuple):
    """A small instance of a backbone, with the channels and strides of its stages and a part of the test's name."""

    cls: type
    kwargs: dict[str, Any]
    channels: tuple[int, ...]
    strides: tuple[int, ...]
    name: str = ''


# Odd, and such that the map of stride 32 has two positions per axis: coefficients need two keys that differ.
SIZE = (33, 41)

# zero_init_residual would hide what a block does.
SMALL_LAMBDA = dict(base_channels=8, stage_blocks=(1, 1, 2, 1), lambda_cfg=dict(scope=5), zero_init_residual=False)
SMALL_LAMBDA_OUTPUTS = ((32, 64, 128, 256), (4, 8, 16, 32))


def shallow(arch):
    """Return the settings of ``arch`` with one block per row and without the rows that repeat the previous one."""
    layout = [row for index, row in enumerate(ARCHS[arch]['layout']) if index not in (6, 8)]
    return dict(ARCHS[arch], layout=[(module, 3, width, 1, stride) for module, _, width, _, stride in layout])


CASES = [
    Case(KANet, dict(arch=shallow(arch), widen_factor=0.25), (8, 8, 8, 16, 80, 1280), (2, 4, 8, 16, 32, 32), arch)
    for arch in ('kanet-kv', 'kanet-qkv', 'attnnet', 'attnnet-pool')
]
CASES += [
    Case(LambdaResNet, {**SMALL_LAMBDA, **kwargs}, *SMALL_LAMBDA_OUTPUTS)
    for kwargs in (
        dict(lambda_blocks=((), (1,), (2,), (1,)), se=True),
        dict(stage_layers='CCLL', skeleton='v1.5', share_embeddings=True, lambda_cfg=dict(scope=5, intra_depth=2)),
        dict(stage_layers='CCLL', skeleton='timm', lambda_cfg=dict(scope=None, position_bias=True), img_size=64),
    )
]
CASES += [Case(LambdaMobileNetV2, dict(widen_factor=0.25), (8, 8, 8, 24, 80, 1280), (2, 4, 8, 16, 32, 32))]
SMALL_SPIKING = dict(
    dims=(8, 16, 32),
    depths=(1, 1, 1),
    heads=4,
    mlp_ratio=2,
    steps=3,
    attentions=('qkta', 'qkca', 'ssa'),
    stem=dict(widths=(8, 8, 8), pools=(True, True, False), shortcut_from=1),
    pools=(True, False),
)
# Random currents must reach the threshold.
CASES += [Case(QKFormer, dict(arch=SMALL_SPIKING, neuron_cfg=dict(v_threshold=0.2)), (8, 16, 32), (4, 8, 16))]


def identify(case):
    chosen = (case.kwargs.get(key, '') for key in ('stage_layers', 'skeleton'))
    return '-'.join(part for part in (case.cls.__name__, case.name, *chosen) if part)


# Compiling and exporting take seconds: tests/test_ops has the other operators.
TRACED = [c for c in CASES if c.name not in ('kanet-qkv', 'attnnet') and 'share_embeddings' not in c.kwargs]


@pytest.fixture(params=CASES, ids=identify)
def case(request):
    return request.param


def test_every_registered_backbone_has_a_case():
    registered = {cls for cls in MODELS.module_dict.values() if issubclass(cls, backbones.Backbone)}
    assert {case.cls for case in CASES} == registered


def build(case, seed=0, **kwargs):
    torch.manual_seed(seed)
    model = case.cls(**case.kwargs, **kwargs)
    model.init_weights()
    return model


def image(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def settle(model):
    """Run a few batches so that the statistics of batch norm fit the weights."""
    model.train()
    with torch.no_grad():
        for seed in range(3):
            model(image(4, model.in_channels, *SIZE, seed=seed))
    return model.eval()


@functools.cache
def weights(name):
    """Return the settled weights of the whole network of a case; compute them once."""
    case = next(case for case in CASES if identify(case) == name)
    return settle(build(case, out_indices=tuple(range(len(case.channels))))).state_dict()


def settled(case, **kwargs):
    """Build a network in evaluation mode with settled weights."""
    model = case.cls(**case.kwargs, **kwargs)
    model.load_state_dict(weights(identify(case)))
    return model.eval()


def test_outputs(case, device, dtype):
    """The published channels and strides are the actual ones, also for sizes that no stride divides."""
    stages = range(len(case.channels))
    model = settled(case, out_indices=tuple(stages)).to(device, dtype)
    assert (model.out_channels, model.out_strides) == (case.channels, case.strides)
    for height, width in ((65, 97), (32, 32), (127, 40)):
        outs = model(image(2, 3, height, width).to(device, dtype))
        assert isinstance(outs, tuple)
        assert all(out.dtype == dtype and out.isfinite().all() for out in outs)
        assert [tuple(o.shape) for o in outs] == [
            (2, c, math.ceil(height / s), math.ceil(width / s)) for c, s in zip(case.channels, case.strides)
        ]


@pytest.mark.parametrize('out_indices', [0, [-1, 1]])
def test_out_indices(case, out_indices, device, dtype):
    """A subset gives the same maps as the whole, and the caller's list stays as it is."""
    given = copy.copy(out_indices)
    whole = settled(case, out_indices=tuple(range(len(case.channels)))).to(device, dtype)
    part = build(case, out_indices=out_indices)
    assert out_indices == given
    missing, unexpected = part.load_state_dict(whole.state_dict(), strict=False)
    assert (missing, unexpected) == ([], [])
    part.eval().to(device, dtype)
    x = image(2, 3, *SIZE).to(device, dtype)
    wanted = sorted(i % len(case.channels) for i in ([given] if isinstance(given, int) else given))
    expected = whole(x)
    outs = part(x)
    assert part.out_channels == tuple(case.channels[i] for i in wanted)
    assert part.out_strides == tuple(case.strides[i] for i in wanted)
    assert len(outs) == len(wanted)
    for out, index in zip(outs, wanted):
        torch.testing.assert_close(out, expected[index])


@pytest.mark.parametrize('out_indices', [-1, (0, 1)])
def test_every_parameter_gets_a_gradient(case, out_indices):
    """No parameter is unused, so that DDP works without find_unused_parameters."""
    model = build(case, out_indices=out_indices).double().train()
    sum(o.pow(2).sum() for o in model(image(2, 3, 64, 80, dtype=torch.float64))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_frozen_stages(case, device, dtype):
    """Frozen parts stay in evaluation and are unchanged by an optimizer step with weight decay."""
    model = build(case, frozen_stages=2).to(device, dtype)
    frozen = [model.stem, *model.stages[:2]]
    assert not any(p.requires_grad for part in frozen for p in part.parameters())
    assert all(p.requires_grad for part in model.stages[2:] for p in part.parameters())
    model.train()
    assert not any(m.training for part in frozen for m in part.modules())
    assert all(m.training for part in model.stages[2:] for m in part.modules())
    before = copy.deepcopy(torch.nn.ModuleList(frozen).state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    model(image(2, 3, *SIZE).to(device, dtype))[-1].sum().backward()
    optimizer.step()
    after = torch.nn.ModuleList(frozen).state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not any(p.requires_grad for p in build(case, frozen_stages=0).stem.parameters())
    assert all(p.requires_grad for p in build(case).parameters())


def test_frozen_stages_must_exist(case):
    with raises(ValueError, 'frozen_stages', 2):
        case.cls(**{**case.kwargs, 'out_indices': 0, 'frozen_stages': 2})


def test_norm_eval(case, device, dtype):
    model = build(case, norm_eval=True).to(device, dtype).train()
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    assert norms
    assert not any(m.training for m in norms)
    before = copy.deepcopy(model.state_dict())
    model(image(2, 3, *SIZE).to(device, dtype))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_norm_cfg(case):
    """norm_cfg reaches every norm but the batch norm of the coefficients."""
    model = build(case, norm_cfg=dict(type='GN', num_groups=1))
    left = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    assert all(name.endswith('coefficient_bn') for name in left)
    assert any(isinstance(m, torch.nn.GroupNorm) for m in model.modules())


def test_with_cp(case):
    """Outputs and gradients are unchanged, and every block runs twice."""
    results = []
    for with_cp in (False, True):
        model = build(case, with_cp=with_cp, out_indices=(1, -1), frozen_stages=0).double().train()
        runs = []
        for block in itertools.chain(*model.stages):
            block.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        outs = model(image(2, 3, *SIZE, dtype=torch.float64))
        blocks = len(runs)
        sum(o.pow(2).sum() for o in outs).backward()
        assert len(runs) == blocks * (1 + with_cp)
        results.append([*outs, *(p.grad for p in model.parameters() if p.requires_grad)])
    for plain, checkpointed in zip(*results):
        torch.testing.assert_close(checkpointed, plain)


def test_init_cfg_reaches_every_weight(case):
    """init_cfg wins over the initialization of direct children; lambda layers keep their own."""
    model = build(case, init_cfg=dict(type='Constant', layer=['Conv1d', 'Conv2d', 'Linear'], val=0.25))
    own = {p for m in model.modules() if isinstance(m, LambdaLayer) for p in m.parameters()}
    weights = [p for p in model.parameters() if p.dim() > 1 and p not in own]
    assert weights
    assert all((weight == 0.25).all() for weight in weights)


def test_constructing_initializes(case):
    """The constructor initializes as init_weights does: the same constants and the same spread."""
    torch.manual_seed(0)
    model = case.cls(**case.kwargs)
    constructed = copy.deepcopy(model.state_dict())
    model.init_weights()
    drawn = 0
    for name, _ in model.named_parameters():
        value, expected = constructed[name], model.state_dict()[name]
        if expected.unique().numel() == 1:
            assert torch.equal(value, expected), name
        elif expected.numel() > 30:
            drawn += not torch.equal(value, expected)
            assert abs(math.log(value.std() / expected.std())) < 6 / expected.numel() ** 0.5, name
            assert value.abs().max() < 2 * expected.abs().max(), name
    assert drawn or model.init_cfg is None


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(case, half):
    """Outputs, gradients and statistics of a training step without autocast are close to float32's."""
    spiking = case.cls is QKFormer  # as in test_autocast
    results = []
    for cast in (half, torch.float32):
        model = build(case, out_indices=0 if spiking else 2).to(half).to(cast).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        out = model(image(4, 3, 64, 64).to(half).to(cast))[0]
        assert out.dtype == cast
        project(out.float()).backward()
        before = parameters_to_vector(model.parameters()).detach().clone()
        step = gradient(model).float()
        optimizer.step()
        assert not torch.equal(parameters_to_vector(model.parameters()), before)
        buffers = [b.float() for name, b in model.named_buffers() if 'running' in name]
        results.append((out.detach().float(), step, torch.cat(buffers)))
    (out, step, buffers), (wide_out, wide_step, wide_buffers) = results
    narrow = half == torch.bfloat16
    assert (out - wide_out).norm() < (0.1 if narrow else 0.03) * (3 if spiking else 1) * wide_out.norm()
    assert torch.cosine_similarity(step, wide_step, dim=0) > (0.85 if narrow else 0.95)
    assert (buffers - wide_buffers).norm() < (0.05 if narrow else 0.01) * wide_buffers.norm()


def test_no_state_between_calls(case):
    """A call depends neither on the calls before it nor on the other samples of its batch."""
    model = settled(case)
    x = image(4, 3, *SIZE)
    with torch.no_grad():
        first = model(x)[0]
        other = model(x[:3])[0]
        torch.testing.assert_close(model(x)[0], first, rtol=0, atol=0)
    torch.testing.assert_close(other, first[:3], rtol=1e-4, atol=1e-5)
    model.train()
    for batch in (4, 3):
        model(x[:batch])[0].sum().backward()


def test_copies(case):
    model = settled(case)
    x = image(2, 3, *SIZE)
    expected = model(x)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x)[0], expected)
    other = build(case, seed=1)
    other.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(other.eval()(x)[0], expected)


def project(out):
    """Return a loss that no batch norm makes constant."""
    return (out * image(*out.shape, seed=9, dtype=out.dtype)).mean()


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16], ids=str)
def test_autocast(case, half):
    """Outputs and gradients, with checkpointing, are finite and close to float32's."""
    # A neuron near its threshold may flip, and the next ones with it: only the first stage of spikes stays close.
    spiking = case.cls is QKFormer
    x, outs, gradients = image(2, 3, 64, 64), [], []
    for low in (False, True):
        model = settled(case, out_indices=0 if spiking else -1, with_cp=low)
        with torch.autocast('cpu', dtype=half, enabled=low):
            out = model(x)[0].float()
        project(out).backward()
        outs.append(out)
        gradients.append(gradient(model))
    relative = (outs[1] - outs[0]).norm() / outs[0].norm()
    assert relative < (0.05 if half == torch.bfloat16 else 0.01) * (5 if spiking else 1)
    assert torch.cosine_similarity(*gradients, dim=0) > (0.95 if half == torch.bfloat16 else 0.99)


def test_channels_last(case):
    """Both memory formats give the same outputs and gradients."""
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = settled(case).double().to(memory_format=memory_format)
        out = model(image(2, 3, *SIZE, dtype=torch.float64).to(memory_format=memory_format))[0]
        project(out.contiguous()).backward()
        results.append((out, gradient(model)))
    for plain, last in zip(*results):
        torch.testing.assert_close(last, plain)


@pytest.mark.parametrize('case', TRACED, ids=identify)
def test_compile(case):
    """The graph has no break and gives the same outputs and gradients."""
    model = settled(case, out_indices=0 if case.cls is QKFormer else 3)  # test_export traces all its stages
    x = image(2, 3, *SIZE)
    torch._dynamo.reset()
    results = []
    for forward in (model, torch.compile(model, backend='aot_eager', fullgraph=True)):
        model.zero_grad()
        out = forward(x)[0]
        project(out).backward()
        results.append((out, gradient(model)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=1e-5)
    assert (results[1][1] - results[0][1]).norm() < 1e-4 * results[0][1].norm()


@pytest.mark.parametrize('case', TRACED, ids=identify)
def test_export(case):
    """One program serves every batch size; docs/export.md covers map sizes."""
    model = settled(case)
    program = torch.export.export(model, (image(2, 3, 33, 64),), dynamic_shapes=({0: torch.export.Dim('batch')},))
    for batch in (2, 5):
        x = image(batch, 3, 33, 64)
        torch.testing.assert_close(program.module()(x)[0], model(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_onnx(case):
    """One graph serves every batch and map size and gives the same values in onnxruntime."""
    model = settled(case, out_indices=(1, -1))
    buffer = io.BytesIO()
    names = dict(input_names=['x'], output_names=['a', 'b'])
    axes = {name: {0: 'batch', 2: 'height', 3: 'width'} for name in ('x', 'a', 'b')}
    torch.onnx.export(model, (image(2, 3, *SIZE),), buffer, **names, dynamic_axes=axes, dynamo=False)
    session = onnxruntime.InferenceSession(buffer.getvalue(), providers=['CPUExecutionProvider'])
    for shape in ((2, 3, *SIZE), (1, 3, 64, 97), (3, 3, 32, 48)):
        x = image(*shape)
        for ours, theirs in zip(model(x), session.run(None, {'x': x.numpy()})):
            np.testing.assert_allclose(theirs, ours.detach().numpy(), rtol=1e-3, atol=1e-4)


def test_layer_depth(case):
    """Depths rise without a gap from the stem to the last block; the head comes last."""
    model = build(case)
    depths = [model.get_layer_depth(f'backbone.{name}', 'backbone.') for name, _ in model.named_parameters()]
    blocks = sum(len(stage) for stage in model.stages)
    assert [d for d, _ in depths] == sorted(d for d, _ in depths)
    assert {d for d, _ in depths} == set(range(blocks + 1))
    assert {n for _, n in depths} == {blocks + 2}
    assert model.get_layer_depth('head.fc.weight', 'backbone.') == (blocks + 1, blocks + 2)
