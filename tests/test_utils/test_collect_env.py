"""The report on the stack, for stacks that are faked package by package, and what the tools say about their errors."""

import importlib
import os
import runpy
import subprocess
import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType, SimpleNamespace

import mmcv
import mmengine
import pytest
import torch
from mmengine.config import Config
from mmengine.utils import package_utils

import mmkron
from mmkron.engine import runner as launch
from mmkron.utils import collect_env as compat
from support.tools import ROOT

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
    """Makes ``compat`` see distributions, modules that nothing requires, and what becomes of mmcv's operators: the
    error with which they load, empty if they do, None if they are not there."""

    def install(distributions, helpers=('ftfy', 'regex', 'pkg_resources'), gpu=None, ops='', broken_torch=None):
        versions = {MODULES.get(name, name): version for name, version in distributions.items()}
        modules = {}  # in the place of sys.modules

        def version(name):
            if name not in distributions:
                raise metadata.PackageNotFoundError(name)
            return distributions[name]

        def import_module(name):
            assert name == 'torch', f'{name} is imported'
            if broken_torch is not None:
                raise broken_torch
            if name not in versions:
                raise ModuleNotFoundError(f'No module named {name!r}')
            cuda = SimpleNamespace(is_available=lambda: gpu is not None, get_device_name=lambda index: gpu)
            module = SimpleNamespace(__version__=versions[name], cuda=cuda, version=SimpleNamespace(cuda='13.0'))
            modules[name] = module
            return module

        def find_spec(name):
            there = name in versions or name in helpers
            return SimpleNamespace(submodule_search_locations=[name]) if there else None

        def load(spec):
            if ops:
                raise ImportError(ops)

        finder = SimpleNamespace(find_spec=lambda name, path: None if ops is None else (name, path))
        found = SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError)
        monkeypatch.setattr(compat, 'metadata', found)
        monkeypatch.setattr(compat, 'import_module', import_module)
        monkeypatch.setattr(compat, 'find_spec', find_spec)
        monkeypatch.setattr(compat, 'PathFinder', finder)
        monkeypatch.setattr(compat, 'module_from_spec', load)
        monkeypatch.setattr(compat, 'sys', SimpleNamespace(modules=modules))
        return compat.compat_report()

    return install


def names(report):
    return [problem.name for problem in report.problems]


def test_original_stack(fake):
    report = fake(OPENMMLAB, gpu='NVIDIA H200')
    assert {module: package.version for module, package in report.packages.items()} == {
        MODULES.get(name, name): version for name, version in OPENMMLAB.items()
    }
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
        ({}, dict(ops=SYMBOL), ['weights_only', 'mmcv of another PyTorch']),
        (
            {'mmcv': None, 'mmcv-lite': '2.1.0'},
            dict(ops=None),
            ['weights_only', 'mmcv-lite'],
        ),
        (
            {'torch': '2.14.1', 'mmcv': None, 'mmcv-lite': '2.1.0'},
            dict(ops=None),
            ['weights_only', 'mmcv-lite', 'mmcv does not compile'],
        ),
        (dict(torch='2.14.1'), {}, ['weights_only']),
        ({}, dict(helpers=('regex', 'pkg_resources')), ['weights_only', 'ftfy']),
        (dict(mmsegmentation=None), dict(helpers=('pkg_resources',)), ['weights_only']),
        ({'onedl-mmdetection': '3.5.1'}, {}, ['weights_only', 'two stacks']),
        ({'mmcv-lite': '2.1.0'}, {}, ['weights_only', 'two stacks']),
    ],
)
def test_problems(fake, changes, arguments, expected):
    distributions = {name: version for name, version in {**OPENMMLAB, **changes}.items() if version}
    assert names(fake(distributions, **arguments)) == expected


def test_nothing_but_python(fake):
    report = fake({}, helpers=())
    assert set(report.packages.values()) == {compat.Package()}
    assert (report.mmcv_ops, report.gpu, report.problems) == ("No module named 'mmcv'", '', ())


def test_torch_that_cannot_be_imported(fake):
    reason = 'libcudart.so.13: cannot open shared object file'
    report = fake(OPENMMLAB, broken_torch=OSError(reason))
    assert report.packages['torch'].version == '2.12.1'
    assert report.gpu == f'unusable: {reason}'


def test_odd_packages(monkeypatch, tmp_path):
    """Modules that were put in by hand, and what a removal that broke off leaves of a distribution."""
    (tmp_path / 'mmdet-3.3.0.dist-info').mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ('ftfy', 'mmdet', 'mmseg'):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(compat, '_DISTRIBUTIONS', {**compat._DISTRIBUTIONS, 'mmseg': ()})
    report = mmkron.compat_report()
    assert 'ftfy' in report.helpers
    assert report.packages['mmdet'].version == 'unknown'
    assert report.packages['mmseg'] == compat.Package('unknown')


@pytest.mark.parametrize(
    ('library', 'problem'),
    [(None, "No module named 'mmcv._ext'"), (b'', 'file too short'), (b'\0' * 4096, 'invalid ELF')],
)
def test_operators_are_loaded_without_mmcv(monkeypatch, tmp_path, library, problem):
    """A package without the library, and libraries that cannot be loaded; its own code does not run."""
    package = tmp_path / 'mmcv'
    package.mkdir()
    (package / '__init__.py').write_text('raise RuntimeError')
    if library is not None:
        (package / f'_ext{EXTENSION_SUFFIXES[0]}').write_bytes(library)
    for name in ('mmcv', 'mmcv._ext'):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert problem in mmkron.compat_report().mmcv_ops


def test_no_host_is_imported():
    """A process of its own, since this one has imported all."""
    code = 'import sys, mmkron; mmkron.compat_report(); print(*sorted({name.split(".")[0] for name in sys.modules}))'
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True)
    assert {'torch', 'mmkron'} <= set(done.stdout.split())
    assert not {'mmengine', 'mmpretrain', 'mmseg', 'mmdet', 'cv2'} & set(done.stdout.split())


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
    assert report.mmcv_ops == ''
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
