"""The report on the environment, for faked environments, and the remedies of known errors."""

import runpy
import subprocess
import sys
from importlib import metadata

import mmengine
import pytest
import torch
from mmengine.config import Config
from mmengine.utils import dl_utils

import mmkron
from mmkron.utils import collect_env
from mmkron.utils.errors import LaunchError
from support.errors import raises

OPENMMLAB = dict(torch='2.5.1', mmengine='0.10.7', mmcv='2.1.0', mmpretrain='1.2.0', mmsegmentation='1.2.2')
OPENMMLAB |= dict(mmdet='3.3.0', setuptools='81.0.0', ftfy='6', regex='2026.1')
ONEDL = {'torch': '2.12.1', 'ftfy': '6', 'regex': '2026.1'}
ONEDL |= {'onedl-mmengine': '0.10.12', 'onedl-mmcv': '2.3.6', 'onedl-mmsegmentation': '1.4.2'}
CEILING = 'MMCV==2.2.0 is used but incompatible. Please install mmcv>=2.0.0rc4, <2.2.0.'
SYMBOL = '/lib/mmcv/_ext.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE'
LITE = "No module named 'mmcv._ext'"


@pytest.fixture
def report_on(monkeypatch):
    """Return a function that reports on distributions and the error of loading MMCV's operators."""

    def report(distributions, ops='', pkg_resources=True):
        monkeypatch.setattr(collect_env, '_version', lambda name: distributions.get(name) or '')
        monkeypatch.setattr(collect_env, '_mmcv_ops', lambda: ops)
        monkeypatch.setattr(collect_env, '_environment', lambda: {'Python': '3.11'})
        monkeypatch.setattr(collect_env, 'find_spec', lambda name: pkg_resources or None)
        return mmkron.compat_report()

    return report


@pytest.mark.parametrize(
    ('distributions', 'arguments', 'remedies'),
    [
        ({**OPENMMLAB, 'torch': '2.12.1'}, {}, ['allow_checkpoint_globals']),
        (OPENMMLAB, {}, []),
        (OPENMMLAB, dict(pkg_resources=False), ['setuptools']),
        ({**OPENMMLAB, 'mmcv': '2.2.0'}, {}, ['<2.2.0']),
        ({**OPENMMLAB, 'mmcv': '2.2.0', 'mmdet': '3.3.1', 'mmsegmentation': None}, {}, []),
        (OPENMMLAB, dict(ops=SYMBOL), ['--no-cache-dir']),
        ({**OPENMMLAB, 'mmcv': None, 'mmcv-lite': '2.1.0'}, dict(ops=LITE), ['mmcv-lite']),
        ({**OPENMMLAB, 'ftfy': None}, {}, ['ftfy regex']),
        ({**OPENMMLAB, 'onedl-mmdetection': '3.5.1'}, {}, ['new environment']),
        ({**OPENMMLAB, 'mmcv-lite': '2.1.0'}, {}, ['new environment']),
        (ONEDL, dict(pkg_resources=False), ['TORCH_FORCE_WEIGHTS_ONLY_LOAD']),
        ({}, dict(ops="No module named 'mmcv'", pkg_resources=False), []),
    ],
)
def test_problems(report_on, distributions, arguments, remedies):
    report = report_on(distributions, **arguments)
    assert len(report.problems) == len(remedies)
    for problem, remedy in zip(report.problems, remedies):
        assert remedy in problem.remedy
        assert problem.remedy in str(report)
    for name, version in report.packages.items():
        assert f'{name:<20} {version}' in str(report).splitlines()


def test_broken_packages(monkeypatch, tmp_path):
    """Broken packages are part of the report, not an error."""
    (tmp_path / 'onedl_mmdetection-3.3.0.dist-info').mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    def no_driver():
        raise RuntimeError('driver\ntoo old')

    monkeypatch.setattr(dl_utils, 'collect_env', no_driver)
    monkeypatch.setitem(sys.modules, 'mmcv._ext', None)
    report = mmkron.compat_report()
    assert report.packages['onedl-mmdetection'] == 'unknown'
    assert 'driver too old' in report.environment['environment']
    assert 'mmcv._ext' in report.mmcv_ops


def test_import_is_light():
    """The module does not import torch; this needs a new process."""
    code = 'import sys, mmkron.utils.collect_env; assert not {"torch", "mmengine"} & {*sys.modules}'
    subprocess.run([sys.executable, '-c', code], check=True)


def test_this_environment(capsys):
    """``python -m mmkron`` prints the versions that the modules have."""
    runpy.run_module('mmkron', run_name='__main__')
    report = mmkron.compat_report()
    assert capsys.readouterr().out == f'{report}\n'
    assert report.mmcv_ops == ''
    assert report.environment['PyTorch'] == torch.__version__
    assert mmengine.__version__ in (report.packages.get('mmengine'), report.packages.get('onedl-mmengine'))
    assert report.packages['setuptools'] == metadata.version('setuptools')
    assert len(report.problems) == 1


@pytest.mark.parametrize(
    ('error', 'remedy'),
    [
        (RuntimeError('Weights only load failed'), 'allow_checkpoint_globals()'),
        (ModuleNotFoundError("No module named 'pkg_resources'"), 'setuptools'),
        (AssertionError(CEILING), 'mmcv>=2.0.0,<2.2.0'),
        (ImportError(SYMBOL), '--no-cache-dir'),
        (ModuleNotFoundError(LITE), 'mmcv-lite'),
        (AttributeError("module 'mmcv' has no attribute 'ops'"), 'mmcv-lite'),
        (ModuleNotFoundError("No module named 'ftfy'"), 'ftfy'),
    ],
)
def test_remedies(error, remedy):
    assert remedy in collect_env.remedy_of(error)
    assert collect_env.remedy_of(ImportError('something else')) == ''


def test_missing_hosts(monkeypatch):
    """The default scope and prefixes name them; a known error gets its remedy."""

    def no_module(name):
        imported.append(name)
        if name.startswith('mmdet'):
            raise ModuleNotFoundError(reason)

    monkeypatch.setattr(collect_env, 'import_module', no_module)
    cfg = Config(dict(default_scope='mmseg', model=dict(backbone=dict(type='mmdet.ResNet'), neck=[dict(type='FPN')])))
    for reason, remedy in (("No module named 'mmdet'", 'install.md'), ("No module named 'mmcv._ext'", 'mmcv-lite')):
        imported = []
        with raises(LaunchError, 'mmdet', reason) as caught:
            collect_env.check_hosts(cfg)
        assert remedy in str(caught.value)
    imported = []
    collect_env.check_hosts(Config(dict(default_scope='mmseg', model=dict(type='mmkron.KANet'))))
    assert imported == ['mmseg.models']
