"""The examples in docstrings run, and every public operator, layer and network has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import mmkron.analysis
import mmkron.layers
import mmkron.models
import mmkron.ops

PACKAGES = (mmkron.ops, mmkron.layers, mmkron.models, mmkron.analysis)
MODULES = sorted(
    name for package in PACKAGES for _, name, _ in pkgutil.walk_packages(package.__path__, f'{package.__name__}.')
)
WITH_EXAMPLES = {
    mmkron.ops: (
        'channel_qk_attention',
        'content_lambda',
        'dense_attention',
        'kronecker_attention_kv',
        'kronecker_attention_qkv',
        'lif',
        'pooled_attention',
        'position_lambda',
        'spiking_self_attention',
        'token_qk_attention',
    ),
    mmkron.layers: tuple(name for name in mmkron.layers.__all__ if name != 'SpikingConv'),
    mmkron.models: ('KANet', 'KAOHead', 'KroneckerNeck', 'LambdaMobileNetV2', 'LambdaResNet', 'QKFormer'),
}


@pytest.mark.parametrize('name', MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize(
    ('package', 'name'), [(package, name) for package, names in WITH_EXAMPLES.items() for name in names]
)
def test_public_names_have_examples(package, name):
    docstring = inspect.getdoc(getattr(package, name))
    assert doctest.DocTestParser().get_examples(docstring)
