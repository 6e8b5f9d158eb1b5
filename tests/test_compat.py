"""The report on the stack, for stacks that are faked package by package, and what the tools say about their errors."""

import importlib
import runpy
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import mmcv
import mmengine
import pytest
import torch
from mmengine.config import Config
from mmengine.utils import package_utils

import mmkron
from mmkron.engine import compat, launch

OPENMMLAB = {
    'torch': '2.12.1',
    'numpy': '2.4.6',
    'mmengine': '0.10.7',
    'mmcv': '2.1.0',
    'mmpretrain': '1.2.0',
    'mmsegmentation': '1.2.2',
    'mmdet': '3.3.0',
    'setuptools': '81.0.0',
    'triton': '3.7.1',
}
ONEDL = {
    'torch': '2.12.1',
    'numpy': '2.4.6',
    'onedl-mmengine': '0.10.12',
    'onedl-mmcv': '2.3.6',
    'onedl-mmpretrain': '1.3.6',
    'onedl-mmsegmentation': '1.4.2',
    'onedl-mmdetection': '3.5.1',
    'setuptools': '84.0.0',
}
MODULES = {
    'mmcv-lite': 'mmcv',
    'mmsegmentation': 'mmseg',
    'onedl-mmengine': 'mmengine',
    'onedl-mmcv': 'mmcv',
    'onedl-mmpretrain': 'mmpretrain',
    'onedl-mmsegmentation': 'mmseg',
    'onedl-mmdetection': 'mmdet',
}
CEILING = 'MMCV==2.2.0 is used but incompatible. Please install mmcv>=2.0.0rc4, <2.2.0.'
SYMBOL = '/lib/mmcv/_ext.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE'


@pytest.fixture
def fake(monkeypatch):
    """Makes ``compat`` see distributions, errors on the import of modules, and modules that nothing requires."""

    def install(distributions, errors=None, helpers=('ftfy', 'regex', 'pkg_resources'), gpu=None):
        errors = errors or {}
        versions = {MODULES.get(name, name): version for name, version in distributions.items()}

        def version(name):
            if name not in distributions:
                raise metadata.PackageNotFoundError(name)
            return distributions[name]

        def import_module(name):
            top = name.split('.')[0]
            if name in errors or top in errors:
                raise errors.get(name) or errors[top]
            if top not in versions:
                raise ModuleNotFoundError(f'No module named {top!r}')
            cuda = SimpleNamespace(is_available=lambda: gpu is not None, get_device_name=lambda index: gpu)
            return SimpleNamespace(
                __version__=versions[top], cuda=cuda, version=SimpleNamespace(cuda='13.0' if gpu else None)
            )

        found = SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError)
        monkeypatch.setattr(compat, 'metadata', found)
        monkeypatch.setattr(compat, 'import_module', import_module)
        monkeypatch.setattr(compat, 'find_spec', lambda name: name in versions or name in helpers or None)
        return compat.compat_report()

    return install


def names(report):
    return [problem.name for problem in report.problems]


def test_original_stack(fake):
    report = fake(OPENMMLAB, gpu='NVIDIA H200')
    assert {module: package.version for module, package in report.packages.items()} == {
        MODULES.get(name, name): version for name, version in OPENMMLAB.items()
    }
    assert not any(package.error for package in report.packages.values())
    assert (report.mmcv_ops, report.gpu) == ('', 'NVIDIA H200, CUDA 13.0')
    assert names(report) == ['weights_only']
    lines = str(report).splitlines()
    assert lines[0] == f'mmkron      {mmkron.__version__}'
    for line in (
        'mmengine    0.10.7',
        'mmseg       1.2.2 (mmsegmentation 1.2.2)',
        'mmcv.ops    compiled',
        'GPU         NVIDIA H200, CUDA 13.0',
    ):
        assert line in lines
    assert lines[-1].startswith('  remedy: tools/train.py and tools/test.py of mmkron allow')


def test_onedl_stack(fake):
    report = fake(ONEDL, helpers=('ftfy', 'regex'))
    assert report.packages['mmdet'] == compat.Package('3.5.1', ('onedl-mmdetection 3.5.1',))
    assert report.packages['triton'] == compat.Package()
    assert names(report) == ['unchecked checkpoints']
    assert {'triton      not installed', 'GPU         none'} <= set(str(report).splitlines())
    assert 'no known problem of this environment' in str(fake({**ONEDL, 'torch': '2.5.1'}))


@pytest.mark.parametrize(
    ('changes', 'arguments', 'expected'),
    [
        (dict(torch='2.5.1'), {}, []),
        (dict(torch='2.6.0+cpu'), {}, ['weights_only']),
        (dict(setuptools='84.0.0'), dict(helpers=('ftfy', 'regex')), ['weights_only', 'pkg_resources']),
        (dict(mmcv='2.2.0'), {}, ['weights_only', 'mmcv ceiling']),
        (dict(mmcv='2.2.0', mmdet='3.3.1', mmsegmentation='1.2.3'), {}, ['weights_only']),
        (dict(mmcv='2.2.0', mmdet=None, mmsegmentation=None), {}, ['weights_only']),
        ({}, dict(errors={'mmcv.ops': ImportError(SYMBOL)}), ['weights_only', 'mmcv of another PyTorch']),
        (
            {'mmcv': None, 'mmcv-lite': '2.1.0'},
            dict(errors={'mmcv.ops': ModuleNotFoundError("No module named 'mmcv._ext'")}),
            ['weights_only', 'mmcv-lite'],
        ),
        (
            {'torch': '2.14.1', 'mmcv': None, 'mmcv-lite': '2.1.0'},
            dict(errors={'mmcv.ops': ModuleNotFoundError("No module named 'mmcv.ops'")}),
            ['weights_only', 'mmcv-lite', 'mmcv does not compile'],
        ),
        (dict(torch='2.14.1'), {}, ['weights_only']),
        ({}, dict(helpers=('regex', 'pkg_resources')), ['weights_only', 'ftfy']),
        (dict(mmsegmentation=None), dict(helpers=('pkg_resources',)), ['weights_only']),
        ({'onedl-mmdetection': '3.5.1'}, {}, ['weights_only', 'two stacks']),
        ({'mmcv-lite': '2.1.0'}, {}, ['weights_only', 'two mmcv']),
    ],
)
def test_problems(fake, changes, arguments, expected):
    distributions = {name: version for name, version in {**OPENMMLAB, **changes}.items() if version}
    assert names(fake(distributions, **arguments)) == expected


def test_hosts_that_cannot_be_imported(fake):
    """Their versions are those of their distributions, and every error is in the report."""
    errors = {'mmdet': AssertionError(CEILING), 'mmseg.models': AttributeError('no\nsuch thing')}
    report = fake({**OPENMMLAB, 'mmcv': '2.2.0'}, errors)
    assert report.packages['mmdet'] == compat.Package('3.3.0', ('mmdet 3.3.0',), f'AssertionError: {CEILING}')
    assert report.packages['mmseg'] == compat.Package(
        '1.2.2', ('mmsegmentation 1.2.2',), 'AttributeError: no such thing'
    )
    assert '            cannot be imported: AttributeError: no such thing' in str(report).splitlines()
    assert 'mmcv ceiling' in names(report)


def test_nothing_but_python(fake):
    report = fake({}, helpers=())
    assert set(report.packages.values()) == {compat.Package()}
    assert (report.mmcv_ops, report.gpu) == ("ModuleNotFoundError: No module named 'mmcv'", '')
    assert report.problems == ()
    broken = fake(dict(torch='2.12.1'), {'torch': OSError('libcudart.so.13: cannot open shared object file')})
    assert broken.packages['torch'].error == 'OSError: libcudart.so.13: cannot open shared object file'
    assert (broken.packages['torch'].version, broken.gpu) == ('2.12.1', '')


def test_odd_packages(monkeypatch, tmp_path):
    """Modules that were put in by hand, and what a removal that broke off leaves of a distribution."""
    (tmp_path / 'mmdet-3.3.0.dist-info').mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ('ftfy', 'mmdet'):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(compat, '_DISTRIBUTIONS', {**compat._DISTRIBUTIONS, 'mmseg': ()})
    monkeypatch.setitem(sys.modules, 'mmseg', ModuleType('mmseg'))
    monkeypatch.delitem(sys.modules, 'mmdet.models', raising=False)
    report = mmkron.compat_report()
    assert 'ftfy' in report.helpers
    assert report.packages['mmdet'].version == 'unknown'
    assert report.packages['mmdet'].error.startswith('ModuleNotFoundError: ')
    assert report.packages['mmseg'].version == 'unknown'


def test_driver_that_does_not_fit(monkeypatch):
    def no_driver():
        raise RuntimeError('driver\ntoo old')

    monkeypatch.setattr(torch.cuda, 'is_available', no_driver)
    assert compat._gpu() == 'unusable: driver too old'


def test_this_environment(capsys):
    """``python -m mmkron`` prints what the modules themselves say."""
    runpy.run_module('mmkron', run_name='__main__')
    report = mmkron.compat_report()
    printed = capsys.readouterr().out
    assert printed == f'{report}\n'
    for module in ('torch', 'numpy', 'mmengine', 'mmcv', 'mmpretrain', 'mmseg', 'mmdet'):
        assert report.packages[module].version == importlib.import_module(module).__version__, module
        assert not report.packages[module].error
    assert report.packages['setuptools'].version == metadata.version('setuptools')
    onedl = hasattr(mmengine.runner.checkpoint, '_safe_torch_load')
    assert names(report) == ['unchecked checkpoints' if onedl else 'weights_only']


@pytest.mark.parametrize(
    ('error', 'remedy'),
    [
        (RuntimeError('Weights only load failed. In PyTorch 2.6, we changed'), 'allow_checkpoint_globals()'),
        (ModuleNotFoundError("No module named 'pkg_resources'"), "pip install 'setuptools>=77.0.3,<82'"),
        (AssertionError(CEILING), "'mmcv>=2.0.0,<2.2.0'"),
        (
            AssertionError('MMCV==2.2.0 is used but incompatible. Please install mmcv>=2.0.0rc4.'),
            "'mmcv>=2.0.0,<2.2.0'",
        ),
        (ImportError(SYMBOL), '--no-cache-dir'),
        (ModuleNotFoundError("No module named 'mmcv._ext'"), 'pip uninstall mmcv-lite'),
        (AttributeError("module 'mmcv' has no attribute 'ops'"), 'pip uninstall mmcv-lite'),
        (ModuleNotFoundError("No module named 'ftfy'"), 'pip install ftfy regex'),
        (RuntimeError('You need C++20 or later compatible compiler'), ''),
        (RuntimeError('C++20 or later compatible compiler is required to use ATen.'), 'torch 2.12.1'),
        (ImportError('something else'), ''),
    ],
)
def test_remedies(error, remedy):
    assert remedy in compat.remedy_of(error)
    assert bool(compat.remedy_of(error)) == bool(remedy or 'C++20' in str(error))


def test_ceiling_is_explained(monkeypatch):
    """By the tools, on the host's own assertion."""
    import mmdet

    monkeypatch.setattr(mmcv, '__version__', '2.2.0')
    if not hasattr(mmdet, 'mmcv_maximum_version'):
        pytest.skip('this mmdet takes any mmcv')
    monkeypatch.setattr(launch, 'import_module', lambda name: importlib.reload(mmdet))
    with pytest.raises(launch.LaunchError) as caught:
        launch.check_hosts(Config(dict(default_scope='mmdet')))
    first, second = str(caught.value).split('\n')
    assert first.startswith('this config needs mmdet, which cannot be imported: MMCV==2.2.0 is used but incompatible')
    assert second.startswith("install 'mmcv>=2.0.0,<2.2.0', compiled for this PyTorch; or move to the OneDL packages")
    assert 'python -m mmkron' in second


def test_pkg_resources_is_explained(monkeypatch, tmp_path):
    """By the tools, on MMEngine's own look-up of a host's config."""
    if 'pkg_resources' not in package_utils.get_installed_path.__code__.co_names:
        pytest.skip('this MMEngine does without pkg_resources')

    class Blocker:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == 'pkg_resources':
                raise ModuleNotFoundError(f'No module named {name!r}', name=name)

    monkeypatch.delitem(sys.modules, 'pkg_resources', raising=False)
    monkeypatch.setattr(sys, 'meta_path', [Blocker, *sys.meta_path])
    (tmp_path / 'a.py').write_text("_base_ = 'mmdet::_base_/default_runtime.py'")
    with pytest.raises(launch.LaunchError) as caught:
        launch.load_config(str(tmp_path / 'a.py'))
    first, second = str(caught.value).split('\n')
    assert first.endswith("cannot be read: No module named 'pkg_resources'")
    assert second == "pip install 'setuptools>=77.0.3,<82'"
