"""Every public signature answers each of some dozens of bad values per argument with one clear error.

:func:`support.bad_values.faults` has the property. The tables in :mod:`support.signatures` say what each argument may
be; a public name, or an argument, that is missing there fails here.
"""

import inspect

import pytest
import torch

import mmkron.analysis
import mmkron.converters
import mmkron.datasets
import mmkron.engine.hooks
import mmkron.layers
import mmkron.models
import mmkron.ops
from mmkron.registry import HOOKS, MODELS, TRANSFORMS
from support.bad_values import Bad, Signature, fault_of, faults, integer
from support.signatures import NO_ARGUMENTS, SIGNATURES
from support.signatures_of_models import SETTINGS  # noqa: F401, which adds more

SIGNATURE_NAMES = sorted(SIGNATURES)


def public_names():
    """Names such as ``ops.lif`` and ``KANet`` of everything that is public or registered."""
    for module in (mmkron.ops, mmkron.layers, mmkron.analysis, mmkron.converters, mmkron.datasets, mmkron.engine.hooks):
        yield from module.__all__
    yield from MODELS.NEEDS_HOST
    for registry in (MODELS, TRANSFORMS, HOOKS):
        yield from (name for name, cls in registry.module_dict.items() if cls.__module__.startswith('mmkron.'))


def test_every_public_name_has_a_signature():
    known = {name.split('.')[0] for name in SIGNATURES} | set(NO_ARGUMENTS)
    assert not set(public_names()) - known
    assert not known - set(public_names())


@pytest.mark.parametrize('name', NO_ARGUMENTS)
def test_a_name_without_a_signature_is_a_result_or_the_hosts_constructor(name):
    cls = next(
        getattr(m, name)
        for m in (mmkron.analysis, mmkron.converters, mmkron.datasets, mmkron.engine.hooks)
        if hasattr(m, name)
    )
    parameters = [*inspect.signature(cls.__init__).parameters.values()][1:]
    own = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    assert issubclass(cls, tuple) or not own or not cls.__init__.__module__.startswith('mmkron')


@pytest.mark.parametrize('name', SIGNATURE_NAMES)
def test_every_argument_has_a_kind(name):
    signature = SIGNATURES[name]()
    signature.call(**signature.good)  # which works
    parameters = inspect.signature(signature.call).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    assert named <= set(signature.kinds), name
    assert set(signature.good) <= set(signature.kinds), name


@pytest.mark.parametrize('name', SIGNATURE_NAMES)
def test_bad_values(name):
    with torch.random.fork_rng():
        found = faults(SIGNATURES[name]())
    assert not found, '\n'.join([f'{len(found)} of {name}:', *found])


class TestFaultOf:
    """The judge itself: what it must not let pass."""

    @pytest.mark.parametrize(
        ('call', 'fault'),
        [
            (lambda n: n, 'accepted'),
            (lambda n: torch.ones(2).view(n), 'not raised by mmkron'),
            (lambda n: {}[n], 'of another type'),
            (lambda n: mmkron.ops.checks.check_int('other', n), 'the argument is not named'),
            (lambda n: mmkron.ops.checks.check_int('n', -5), 'the value is not shown'),
            (lambda n: mmkron.ops.checks.check_int('n', n), None),
        ],
    )
    def test_faults(self, call, fault):
        found = fault_of(Signature(call, {}, {'n': integer()}), 'n', Bad('x', ("'x'",)))
        assert found == fault if fault in (None, 'accepted') else found.startswith(fault)
