"""The contract that every registered backbone keeps. A new backbone joins by one line in CASES."""

import copy
import functools
import inspect
import io
import itertools
import math
import pickle
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import OptimWrapper
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parameters_to_vector

from mmkron.layers import LambdaLayer
from mmkron.models import backbones
from mmkron.models.backbones import KANet, LambdaMobileNetV2, LambdaResNet, QKFormer
from mmkron.models.backbones.kanet import ARCHS
from mmkron.registry import MODELS


class Case(NamedTuple):
    """A small instance of a backbone: class, arguments, channels and strides of its stages, part of the test's name."""

    cls: type
    kwargs: dict[str, Any]
    channels: tuple[int, ...]
    strides: tuple[int, ...]
    name: str = ''


# Odd, and such that the map of stride 32 has two positions per axis: coefficients need two keys that differ.
SIZE = (33, 41)

# Without the zeros of zero_init_residual, which hide what a block does.
SMALL_LAMBDA = dict(base_channels=8, stage_blocks=(1, 1, 2, 1), lambda_cfg=dict(scope=5), zero_init_residual=False)
SMALL_LAMBDA_OUTPUTS = ((32, 64, 128, 256), (4, 8, 16, 32))


def shallow(arch):
    """Return the settings of ``arch`` with one block per row, less the rows that repeat the one before."""
    layout = [row for index, row in enumerate(ARCHS[arch]['layout']) if index not in (6, 8)]
    return dict(ARCHS[arch], layout=[(module, 3, width, 1, stride) for module, _, width, _, stride in layout])


CASES = [
    Case(KANet, dict(arch=shallow(arch), widen_factor=0.25), (8, 8, 8, 16, 80, 1280), (2, 4, 8, 16, 32, 32), arch)
    for arch in ARCHS
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
# A stage more than the paper's networks have, as the others.
SMALL_SPIKING = dict(
    dims=(8, 16, 32, 64),
    depths=(1, 1, 1, 1),
    heads=4,
    mlp_ratio=2,
    steps=3,
    attentions=('qkta', 'qkta', 'qkca', 'ssa'),
    stem=dict(widths=(8, 8, 8), pools=(True, True, False), shortcut_from=1),
    pools=(True, False),
)
# Thresholds that random currents reach.
ACTIVE = dict(arch=SMALL_SPIKING, neuron_cfg=dict(v_threshold=0.2))
CASES += [Case(QKFormer, ACTIVE, (8, 16, 32, 64), (4, 8, 16, 32))]


def identify(case):
    chosen = (case.kwargs.get(key, '') for key in ('stage_layers', 'skeleton'))
    return '-'.join(part for part in (case.cls.__name__, case.name, *chosen) if part)


@pytest.fixture(params=CASES, ids=identify)
def case(request):
    return request.param


def build(case, seed=0, **kwargs):
    torch.manual_seed(seed)
    model = case.cls(**case.kwargs, **kwargs)
    model.init_weights()
    return model


def image(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def settle(model):
    """Give batch norm the statistics of real passes, so that evaluation is not a trivial map."""
    model.train()
    with torch.no_grad():
        for seed in range(3):
            model(image(4, model.in_channels, *SIZE, seed=seed))
    return model.eval()


@functools.cache
def weights(name):
    """Return the settled weights of a case's whole network, which are computed once."""
    case = next(case for case in CASES if identify(case) == name)
    return settle(build(case, out_indices=tuple(range(len(case.channels))))).state_dict()


def settled(case, **kwargs):
    """Return a new network in evaluation with settled weights."""
    model = case.cls(**case.kwargs, **kwargs)
    model.load_state_dict(weights(identify(case)))
    return model.eval()


def test_every_registered_backbone_is_covered():
    registered = {cls for cls in MODELS.module_dict.values() if issubclass(cls, backbones.Backbone)}
    assert {case.cls for case in CASES} == registered


def test_outputs(case, device, dtype):
    """Channels and strides are published and true, on sizes that no stride divides."""
    stages = range(len(case.channels))
    model = settled(case, out_indices=tuple(stages)).to(device, dtype)
    assert model.out_channels == case.channels
    assert model.out_strides == case.strides
    for height, width in ((65, 97), (32, 32), (127, 40)):
        outs = model(image(2, 3, height, width).to(device, dtype))
        assert isinstance(outs, tuple)
        assert all(out.dtype == dtype and out.isfinite().all() for out in outs)
        assert [tuple(o.shape) for o in outs] == [
            (2, c, math.ceil(height / s), math.ceil(width / s)) for c, s in zip(case.channels, case.strides)
        ]


@pytest.mark.parametrize('out_indices', [-1, 0, 2, [1, -1], (3, 1)])
def test_out_indices(case, out_indices, device, dtype):
    """A subset returns the same maps as the whole, always in a tuple, and leaves the caller's list alone."""
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


@pytest.mark.parametrize('out_indices', [-1, 1, (0, 2)])
def test_every_parameter_gets_a_gradient(case, out_indices):
    """No parameter without a use, whatever outputs are requested (else DDP needs find_unused_parameters)."""
    model = build(case, out_indices=out_indices).double().train()
    sum(o.pow(2).sum() for o in model(image(2, 3, 64, 80, dtype=torch.float64))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ('kwargs', 'error', 'message'),
    [
        (dict(out_indices=9), ValueError, r'out_indices must be in \[-\d, \d\], got 9'),
        (dict(out_indices=(0, -9)), ValueError, r'out_indices must be in .* got \(0, -9\)'),
        (dict(out_indices=()), ValueError, r'out_indices must name at least one, .*\(\)'),
        (dict(out_indices=(0, 0)), ValueError, r'each once; got \(0, 0\)'),
        (dict(out_indices='0'), TypeError, "out_indices must be an int or a sequence of ints, got '0'"),
        (dict(out_indices=1.0), TypeError, 'out_indices must be an int or a sequence of ints, got 1.0'),
        (dict(frozen_stages=9), ValueError, r'frozen_stages must be -1 \(none\).*got 9'),
        (dict(frozen_stages=-2), ValueError, 'frozen_stages must be at least -1, got -2'),
        (dict(frozen_stages=True), TypeError, 'frozen_stages must be an int, got True'),
        (dict(in_channels=0), ValueError, 'in_channels must be at least 1, got 0'),
        (dict(out_indices=0, frozen_stages=2), ValueError, r'up to 1 .*got 2'),
    ],
)
def test_bad_arguments(case, kwargs, error, message):
    with pytest.raises(error, match=message):
        case.cls(**{**case.kwargs, **kwargs})


def setting(cls):
    """The argument that takes a name or a dict of settings, where there is one."""
    return next((name for name in ('arch', 'skeleton') if name in inspect.signature(cls).parameters), None)


@pytest.mark.parametrize('case', [c for c in CASES if setting(c.cls)], ids=identify)
@pytest.mark.parametrize(
    ('value', 'error', 'message'),
    [
        ('kanet', ValueError, "{} must be a dict or one of .*, got 'kanet'"),
        (3, TypeError, '{} must be a name or a dict, got 3'),
        (dict(depth=3), ValueError, r'{} must have the keys .*, got .*depth'),
    ],
)
def test_bad_settings(case, value, error, message):
    name = setting(case.cls)
    with pytest.raises(error, match=message.format(name)):
        case.cls(**{**case.kwargs, name: value})


def test_bad_input(case):
    model = build(case)
    with pytest.raises(ValueError, match=r'x must have 3 channels, got shape \(1, 4, 32, 32\)'):
        model(image(1, 4, 32, 32))
    with pytest.raises(ValueError, match=r'x must be a map .*got shape \(3, 32, 32\)'):
        model(image(3, 32, 32))
    with pytest.raises(ValueError, match=r'no empty dimension, got shape \(1, 3, 0, 32\)'):
        model(image(1, 3, 0, 32))
    with pytest.raises(TypeError, match='x must be a floating-point tensor, got torch.uint8'):
        model(image(1, 3, 32, 32).byte())


def test_frozen_stages(case, device, dtype):
    """Frozen from the start, still after train(), and unchanged by an optimizer step with weight decay."""
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


def test_norm_eval(case, device, dtype):
    model = build(case, norm_eval=True).to(device, dtype).train()
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    assert norms
    assert not any(m.training for m in norms)
    before = copy.deepcopy(model.state_dict())
    model(image(2, 3, *SIZE).to(device, dtype))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert any(m.training for m in model.modules())


def test_norm_cfg(case):
    """norm_cfg reaches every norm of the path: with GroupNorm only the coefficients keep batch norm."""
    model = build(case, norm_cfg=dict(type='GN', num_groups=1))
    left = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    assert all(name.endswith('coefficient_bn') for name in left)
    assert any(isinstance(m, torch.nn.GroupNorm) for m in model.modules())


def test_with_cp(case):
    """Equal outputs and gradients, though every block runs a second time in the backward pass."""
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
    """MMEngine lets a direct child that knows its own initialisation undo the backbone's; lambda layers keep theirs."""
    model = build(case, init_cfg=dict(type='Constant', layer=['Conv1d', 'Conv2d', 'Linear'], val=0.25))
    own = {p for m in model.modules() if isinstance(m, LambdaLayer) for p in m.parameters()}
    weights = {name: p for name, p in model.named_parameters() if p.dim() > 1 and p not in own}
    assert weights
    for name, weight in weights.items():
        assert (weight == 0.25).all(), name


def test_constructing_initializes(case):
    """Without init_weights the parameters have the values that it gives: the same constants, as wide a spread."""
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
    """A training step in half precision without autocast: output, gradient and statistics are near float32's."""
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
    """Two equal calls give equal outputs, another batch size in between included; a sample does not see its batch."""
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


def test_float64_agrees_with_float32(case):
    model = settled(case)
    x = image(2, 3, *SIZE)
    single = model(x)[0]
    double = model.double()(x.double())[0]
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4)


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
    """A loss that no batch norm makes constant."""
    return (out * image(*out.shape, seed=9, dtype=out.dtype)).mean()


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16], ids=str)
def test_autocast(case, half):
    """Finite, and close to float32: outputs, and gradients with blocks that are computed twice."""
    # A neuron near its threshold fires or not, and so do those behind it: only the first stage of spikes stays close.
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
    model = settled(case)
    model.train()
    with torch.autocast('cpu', dtype=half):
        loss = model(x)[0].float().pow(2).mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_channels_last(case):
    """The same outputs and gradients in the other memory format."""
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = settled(case).double().to(memory_format=memory_format)
        out = model(image(2, 3, *SIZE, dtype=torch.float64).to(memory_format=memory_format))[0]
        project(out.contiguous()).backward()
        results.append((out, gradient(model)))
    for plain, last in zip(*results):
        torch.testing.assert_close(last, plain)


def test_compile(case):
    """One graph without a break, with the same outputs and gradients."""
    model = settled(case, out_indices=3)
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


def test_gradient_accumulation(case):
    """MMEngine's accumulation over two halves of a batch makes the whole batch's step, batch norm in evaluation."""
    x = image(4, 3, *SIZE, dtype=torch.float64)
    steps = []
    for counts in (1, 2):
        model = settled(case, with_cp=counts == 2).double()
        wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=counts)
        wrapper.initialize_count_status(model, 0, counts)
        before = parameters_to_vector(model.parameters()).detach().clone()
        for part in x.chunk(counts):
            with wrapper.optim_context(model):
                loss = model(part)[0].pow(2).mean()
            wrapper.update_params(loss)
        steps.append(parameters_to_vector(model.parameters()).detach() - before)
    assert steps[0].abs().max() > 0
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-6, atol=1e-9 * float(steps[0].abs().max()))


@pytest.mark.parametrize('update_buffers', [False, True])
def test_moving_average(case, update_buffers):
    """MMEngine's average is the formula's, of parameters and, where it is asked for, of batch norm's statistics."""
    model = settled(case).train()
    average = ExponentialMovingAverage(model, momentum=0.25, update_buffers=update_buffers)
    average.update_parameters(model)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # With buffers MMEngine averages a parameter that layers share once for each of its names.
    names = Counter(value.data_ptr() for value in model.state_dict().values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (1, 2):
        optimizer.zero_grad()
        project(model(image(2, 3, *SIZE, seed=seed))[0]).backward()
        optimizer.step()
        average.update_parameters(model)
        for key, value in model.state_dict().items():
            if key in trained or update_buffers and value.is_floating_point():
                for _ in range(names[value.data_ptr()] if update_buffers else 1):
                    expected[key] += 0.25 * (value - expected[key])
            elif not update_buffers:
                expected[key] = value.clone()
    averaged = average.module.state_dict()
    assert averaged.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(averaged[key], value, msg=key)
    x = image(2, 3, *SIZE)
    other = build(case, seed=1)
    other.load_state_dict(expected)
    torch.testing.assert_close(average.eval()(x)[0], other.eval()(x)[0], rtol=1e-3, atol=1e-4)
    assert not torch.equal(average(x)[0], model.eval()(x)[0])


def test_export(case):
    """One program for every batch. docs/export.md says what torch.export makes of free map sizes."""
    model = settled(case)
    program = torch.export.export(model, (image(2, 3, 33, 64),), dynamic_shapes=({0: torch.export.Dim('batch')},))
    for batch in (2, 5):
        x = image(batch, 3, 33, 64)
        torch.testing.assert_close(program.module()(x)[0], model(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_onnx(case):
    """One graph for every batch and map size, the same values in onnxruntime."""
    model = settled(case, out_indices=(2, -1))
    buffer = io.BytesIO()
    axes = {name: {0: 'batch', 2: 'height', 3: 'width'} for name in ('x', 'a', 'b')}
    torch.onnx.export(
        model,
        (image(2, 3, *SIZE),),
        buffer,
        input_names=['x'],
        output_names=['a', 'b'],
        dynamic_axes=axes,
        dynamo=False,
    )
    session = onnxruntime.InferenceSession(buffer.getvalue(), providers=['CPUExecutionProvider'])
    for shape in ((2, 3, *SIZE), (1, 3, 64, 97), (3, 3, 32, 48)):
        x = image(*shape)
        for ours, theirs in zip(model(x), session.run(None, {'x': x.numpy()})):
            np.testing.assert_allclose(theirs, ours.detach().numpy(), rtol=1e-3, atol=1e-4)


def test_layer_depth(case):
    """Depths rise from the stem to the last block without a gap; what is not of the backbone comes last."""
    model = build(case)
    depths = [model.get_layer_depth(f'backbone.{name}', 'backbone.') for name, _ in model.named_parameters()]
    blocks = sum(len(stage) for stage in model.stages)
    assert [d for d, _ in depths] == sorted(d for d, _ in depths)
    assert {d for d, _ in depths} == set(range(blocks + 1))
    assert {n for _, n in depths} == {blocks + 2}
    assert model.get_layer_depth('head.fc.weight', 'backbone.') == (blocks + 1, blocks + 2)
