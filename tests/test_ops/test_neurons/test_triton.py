"""The Triton kernels of the neurons, run by Triton's interpreter on the CPU, against the form for CPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

# In a process of its own: Triton reads the variable on import.
PROGRAM = """
from itertools import combinations, product

import torch

from mmkron.ops.neurons import lif, triton
from mmkron.ops.neurons.neuron import resolve_neuron
from mmkron.ops.neurons.surrogate import SURROGATES

torch.manual_seed(0)
compared = 0
# A greedy choice: each combination has the most pairs of values that no chosen one has, until every pair is in one.
values = (
    (1, 4), (2.0, 3.0), (0.0, None, -0.25), (True, False), (True, False), SURROGATES, (False, True), (False, True),
    (torch.float32, torch.bfloat16),
)
pairs = lambda chosen: set(combinations(enumerate(chosen), 2))
candidates = list(product(*values))
missing, chosen = set().union(*map(pairs, candidates)), []
while missing:
    chosen.append(max(candidates, key=lambda each: len(pairs(each) & missing)))
    missing -= pairs(chosen[-1])
for steps, tau, reset, decay, detach, surrogate, state, learns, dtype in chosen:
    count = 1025  # one more than a program takes
    neuron = resolve_neuron(tau, 0.6, reset, decay, detach, surrogate)._replace(learns_leak=learns)
    rows = (1.5 * torch.randn(steps, count + 1)).to(dtype)[:, 1:]
    # Neither is contiguous: every other potential, and the gradient of a sum.
    start, end = (torch.randn(2 * count)[::2], torch.randn(1).expand(count)) if state else (None, None)
    grads = torch.randn(count, steps).to(dtype).t()
    results = []
    for form in (triton, lif):
        spikes, grad_rows = (torch.empty(steps, count, dtype=dtype) for _ in range(2))
        v = form.forward_block(rows, start, neuron, spikes, True)
        carry, change = form.backward_block(rows, start, grads, end, neuron, grad_rows)
        results.append((spikes, v, grad_rows, carry, torch.zeros(()) if change is None else change))
    # The kernels round differently, so that a neuron at its threshold may fire in one form only.
    equal = (results[0][0] == results[1][0]).all(0)
    assert equal.float().mean() > 0.999, equal.float().mean()
    tolerance = dict(rtol=1e-2, atol=1e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(results[0][1:4], results[1][1:4]):
        torch.testing.assert_close(ours[..., equal], theirs[..., equal], **tolerance)
    if equal.all():
        torch.testing.assert_close(results[0][4], results[1][4].float(), rtol=1e-3, atol=1e-1)
    assert 0.02 < results[0][0].float().mean() < 0.98
    compared += 1
print(compared)
"""


def test_kernels():
    if find_spec('triton') is None:
        pytest.skip('needs the package triton, which torch for CUDA brings')
    env = dict(os.environ, TRITON_INTERPRET='1')
    done = subprocess.run([sys.executable, '-c', PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12
