"""Spiking neurons against a plain loop and SpikingJelly: values, gradients, state, layouts, precision, graphs."""

import math
from importlib import import_module
from itertools import product

import pytest
import torch

from mmkron.ops import lif
from mmkron.ops.neurons import lif as module
from mmkron.ops.neurons.surrogate import SURROGATES
from support.errors import raises

# Functions with the derivatives of the surrogates.
SMOOTH = {
    'sigmoid': lambda u, alpha: torch.sigmoid(alpha * u),
    'atan': lambda u, alpha: torch.atan(math.pi / 2 * alpha * u) / math.pi,
    'rectangle': lambda u, alpha: (u / alpha).clamp(-0.5, 0.5),
    'triangle': lambda u, alpha: (u / alpha).clamp(-1, 1) * (1 - (u / alpha).clamp(-1, 1).abs() / 2),
}

SETTINGS = [
    dict(tau=tau, v_reset=v_reset, decay_input=decay_input, detach_reset=detach_reset, surrogate=surrogate)
    for tau, v_reset, decay_input, detach_reset, surrogate in product(
        (1.0, 2.0, 3.5, math.inf), (0.0, None, -0.3), (True, False), (True, False), SMOOTH
    )
    if not (tau == math.inf and decay_input)
]


def currents(*shape, seed=0, dtype=torch.float64):
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain(x, v0, tau, v_threshold, v_reset, decay_input, detach_reset, surrogate, alpha):
    """Compute the equations step by step; torch differentiates the smooth function instead of the step function."""
    rest = v_reset or 0.0
    v = torch.full_like(x[0], rest) if v0 is None else v0
    spikes = []
    for current in x:
        h = v + (current - (v - rest)) / tau if decay_input else v - (v - rest) / tau + current
        u = h - v_threshold
        soft = SMOOTH[surrogate](u, alpha)
        s = (u >= 0).to(x.dtype) + soft - soft.detach()
        spikes.append(s)
        s = s.detach() if detach_reset else s
        v = h - s * v_threshold if v_reset is None else (1 - s) * h + s * v_reset
    return torch.stack(spikes), v


def run(function, x, v0=None, tau=2.0, **kwargs):
    """Return spikes, last potentials and the gradients of x and, if given, of v0 and tau."""
    leaves = [x.detach().requires_grad_()]
    if v0 is not None:
        v0 = v0.detach().clone().requires_grad_()
        leaves.append(v0)
    if isinstance(tau, torch.Tensor):
        tau = tau.detach().clone().requires_grad_()
        leaves.append(tau)
    outs = function(leaves[0], v0, tau, **kwargs)
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, cotangents)]


def compare(x, v0=None, tau=2.0, rtol=1e-9, atol=1e-10, **kwargs):
    defaults = dict(sigmoid=4.0, atan=2.0, rectangle=1.0, triangle=1.0)
    alpha = kwargs.pop('alpha', defaults[kwargs.get('surrogate', 'sigmoid')])
    full = dict(v_threshold=1.0, v_reset=0.0, decay_input=True, detach_reset=True, surrogate='sigmoid', alpha=alpha)
    full.update(kwargs)
    ours = run(lambda *args, **rest: lif(*args, return_state=True, **rest), x, v0, tau, **full)
    for out, expected in zip(ours, run(plain, x, v0, tau, **full)):
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
    return ours


@pytest.fixture(params=[2**17, 7], ids=['one block', 'blocks of 7'])
def block(request, monkeypatch):
    monkeypatch.setattr(module, 'BLOCK', request.param)


class TestFeature:
    def test_every_surrogate_is_tested(self):
        assert set(SMOOTH) == set(SURROGATES)

    @pytest.mark.parametrize('settings', SETTINGS, ids=str)
    def test_settings(self, block, settings):
        spikes, *_ = compare(currents(5, 3, 4, 2), currents(3, 4, 2, seed=1), v_threshold=0.6, **settings)
        assert 0.05 < spikes.mean() < 0.95
        compare(currents(4, 20), v_threshold=0.6, alpha=1.3, **settings)

    @pytest.mark.parametrize('steps', [1, 2, 3, 16])
    def test_steps(self, block, steps):
        compare(currents(steps, 2, 9))

    @pytest.mark.parametrize('decay_input', [True, False])
    @pytest.mark.parametrize('v_reset', [0.0, None, -0.3])
    def test_learnable_tau(self, block, v_reset, decay_input):
        tau = torch.tensor(1.7, dtype=torch.float64)
        compare(currents(5, 3, 8), currents(3, 8, seed=1), tau, v_reset=v_reset, decay_input=decay_input)
        compare(currents(5, 3, 8), None, tau[None], v_reset=v_reset, decay_input=decay_input)

    def test_ties_fire(self):
        """A neuron at its threshold fires, also after decay and after a reset to another value."""
        x = torch.tensor([2.0, 1.0, 1.5, 0.0])[:, None]
        spikes, v = lif(x, return_state=True)
        assert spikes.flatten().tolist() == [1, 0, 1, 0]  # h: 1, 0.5, 1, 0
        assert v.item() == 0
        spikes, v = lif(x, v_reset=-1.0, return_state=True)
        assert spikes.flatten().tolist() == [0, 0, 0, 0]  # h: 0, 0, 0.25, -0.375
        assert v.item() == -0.375
        spikes, v = lif(x, v_reset=None, tau=math.inf, decay_input=False, return_state=True)
        assert spikes.flatten().tolist() == [1, 1, 1, 1]  # h: 2, 2, 2.5, 1.5
        assert v.item() == 0.5

    def test_spikes_alone(self):
        """Spikes and gradients are the same without the last potentials."""
        x = currents(4, 30).requires_grad_()
        expected, _ = lif(x, return_state=True)
        out = lif(x)
        assert torch.equal(out, expected)
        cotangent = currents(4, 30, seed=2)
        grads = [torch.autograd.grad(y, x, cotangent)[0] for y in (out, expected)]
        torch.testing.assert_close(*grads, rtol=0, atol=0)

    def test_state_alone(self):
        x = currents(3, 30).requires_grad_()
        _, v = lif(x, return_state=True)
        _, expected = plain(x, None, 2.0, 1.0, 0.0, True, True, 'sigmoid', 4.0)
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (v, expected)]
        torch.testing.assert_close(*grads)

    def test_reset_is_exact(self):
        _, v = lif(torch.tensor([[1e5]]), v_reset=0.1, return_state=True)
        assert torch.equal(v, torch.tensor([0.1]))


class TestState:
    def test_two_halves_make_a_whole(self):
        x = currents(6, 4, 5).requires_grad_()
        whole = lif(x)
        first, v = lif(x[:2], return_state=True)
        halves = torch.cat([first, lif(x[2:], v)])
        assert torch.equal(whole, halves)
        cotangent = currents(6, 4, 5, seed=3)
        grads = [torch.autograd.grad(y, x, cotangent)[0] for y in (whole, halves)]
        torch.testing.assert_close(*grads)


class TestLayouts:
    def test_any_strides(self, block):
        folded = currents(8, 3, 4, 5).to(memory_format=torch.channels_last)
        for x in (
            folded.unflatten(0, (2, 4)),
            currents(3, 4, 5).expand(4, 3, 4, 5),
            currents(5, 4, 3).transpose(0, 2),
            currents(6, 8)[::2, ::3],
            currents(4),
        ):
            compare(x)

    def test_memory_order_is_kept(self):
        x = currents(8, 3, 4, 5).to(memory_format=torch.channels_last)
        out = lif(x.unflatten(0, (2, 4))).flatten(0, 1)
        assert out.is_contiguous(memory_format=torch.channels_last)

    def test_only_the_input_is_kept_for_the_backward_pass(self):
        kept = []
        x = currents(4, 100).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            lif(x)
        assert [t.data_ptr() for t in kept] == [x.data_ptr()]


class TestPrecision:
    @pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
    def test_half(self, dtype):
        """Half precision is computed in float32 and rounded once."""
        x = currents(8, 300, dtype=torch.float32).to(dtype)
        v0 = currents(300, seed=1, dtype=torch.float32)
        spikes, v, grad, grad_v0 = run(lambda *args: lif(*args, return_state=True), x, v0)
        expected = run(lambda *args: lif(*args, return_state=True), x.float(), v0)
        assert [y.dtype for y in (spikes, v, grad, grad_v0)] == [dtype, torch.float32, dtype, torch.float32]
        assert torch.equal(spikes.float(), expected[0])
        assert torch.equal(v, expected[1])
        torch.testing.assert_close(grad.float(), expected[2], rtol=0.02, atol=0.02)

    def test_autocast(self):
        x = currents(8, 300, dtype=torch.float32)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            assert torch.equal(lif(x), lif(x.double()).float())


class TestSpikingJelly:
    """Spikes and gradients of SpikingJelly's neurons."""

    @pytest.mark.parametrize('v_reset', [0.0, None])
    @pytest.mark.parametrize('decay_input', [True, False])
    @pytest.mark.parametrize('detach_reset', [True, False])
    @pytest.mark.parametrize('surrogate', ['Sigmoid', 'ATan'])
    def test_lif(self, v_reset, decay_input, detach_reset, surrogate):
        neurons = pytest.importorskip('spikingjelly.activation_based.neuron', reason='needs the package spikingjelly')
        surrogates = import_module('spikingjelly.activation_based.surrogate')
        settings = dict(tau=2.0, v_threshold=1.0, v_reset=v_reset, decay_input=decay_input, detach_reset=detach_reset)
        theirs = neurons.LIFNode(surrogate_function=getattr(surrogates, surrogate)(), step_mode='m', **settings)
        self.compare(theirs, currents(6, 4, 50, dtype=torch.float32), surrogate=surrogate.lower(), **settings)

    def test_if(self):
        neurons = pytest.importorskip('spikingjelly.activation_based.neuron', reason='needs the package spikingjelly')
        theirs = neurons.IFNode(step_mode='m', detach_reset=True)
        self.compare(theirs, currents(6, 200, dtype=torch.float32), tau=math.inf, decay_input=False)

    def test_plif(self):
        neurons = pytest.importorskip('spikingjelly.activation_based.neuron', reason='needs the package spikingjelly')
        theirs = neurons.ParametricLIFNode(init_tau=2.5, step_mode='m', detach_reset=True)
        x = currents(6, 200, dtype=torch.float64)
        theirs = theirs.double()
        self.compare(theirs, x, tau=1 / theirs.w.detach().sigmoid())
        weight = theirs.w.detach().clone().requires_grad_()
        out = lif(x, tau=1 / weight.sigmoid())
        cotangent = currents(6, 200, seed=4)
        theirs.reset()
        grads = [torch.autograd.grad(*pair, cotangent)[0] for pair in ((out, weight), (theirs(x), theirs.w))]
        torch.testing.assert_close(*grads)

    @staticmethod
    def compare(theirs, x, **settings):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outs = [lif(leaves[0], **settings), theirs(leaves[1])]
        assert torch.equal(*outs)
        assert 0.05 < outs[0].mean() < 0.95
        cotangent = currents(*x.shape, seed=3, dtype=x.dtype)
        grads = [torch.autograd.grad(out, leaf, cotangent)[0] for out, leaf in zip(outs, leaves)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


class TestGraphs:
    @pytest.mark.parametrize('with_tau', [False, True])
    def test_dynamo(self, with_tau):
        x, tau = currents(4, 30), torch.tensor(1.7, dtype=torch.float64)
        arguments = dict(tau=tau[None, None].requires_grad_()) if with_tau else {}
        compiled = torch.compile(lif, backend='aot_eager', fullgraph=True)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outs = [compiled(leaves[0], **arguments), lif(leaves[1], **arguments)]
        assert torch.equal(*outs)
        wanted = [[leaf, *arguments.values()] for leaf in leaves]
        grads = [torch.autograd.grad(out, of, currents(4, 30, seed=3)) for out, of in zip(outs, wanted)]
        for ours, theirs in zip(*grads):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ('argument', 'bad', 'value'),
    [
        ('tau', torch.tensor(0.25), 0.25),
        ('v_reset', 1.0, 1.0),
        ('v0', torch.zeros(3, device='meta'), 'meta'),  # a kernel would read from its address
    ],
)
def test_bad_values(argument, bad, value):
    """tests/test_bad_values.py has the others."""
    with raises(ValueError, argument, value):
        lif(torch.zeros(2, 3), **{argument: bad})
