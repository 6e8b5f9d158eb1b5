"""What the stack is made of, what in it is known not to work, and what to do about it.

Imports nothing but the standard library, and never fails because a package cannot be imported: that is a finding.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import NamedTuple

from mmkron.version import __version__

# Distributions that provide a module. Both stacks have the same import names.
_DISTRIBUTIONS = {
    'torch': ('torch',),
    'numpy': ('numpy',),
    'mmengine': ('mmengine', 'mmengine-lite', 'onedl-mmengine'),
    'mmcv': ('mmcv', 'mmcv-lite', 'mmcv-full', 'onedl-mmcv'),
    'mmpretrain': ('mmpretrain', 'onedl-mmpretrain'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
    'mmdet': ('mmdet', 'onedl-mmdetection'),
    'setuptools': ('setuptools',),
    'triton': ('triton',),
}
_STACK = ('mmengine', 'mmcv', 'mmpretrain', 'mmseg', 'mmdet')
_HOSTS = ('mmpretrain', 'mmseg', 'mmdet')
_HELPERS = ('ftfy', 'regex', 'pkg_resources')  # modules that a part of the stack imports without requiring them


class Package(NamedTuple):
    """A module of the stack."""

    version: str = ''  # empty: not installed
    distributions: tuple[str, ...] = ()  # what provides it, as in 'onedl-mmcv 2.3.6'
    error: str = ''  # why it cannot be imported


class Problem(NamedTuple):
    """Something that does not work, and what helps."""

    name: str
    symptom: str
    remedy: str


class CompatReport(NamedTuple):
    """What :func:`compat_report` found; its string is for reading."""

    python: str
    packages: dict[str, Package]  # by module
    mmcv_ops: str  # empty if the compiled operators can be imported, else why not
    gpu: str  # name of the first one, or empty
    helpers: frozenset[str]  # of _HELPERS those that are there
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        lines = [f'{"mmkron":<11} {__version__}', f'{"python":<11} {self.python}']
        for module, package in self.packages.items():
            text = package.version or 'not installed'
            if package.distributions and package.distributions != (f'{module} {package.version}',):
                text += f' ({", ".join(package.distributions)})'
            lines.append(f'{module:<11} {text}')
            if package.error:
                lines.append(f'{"":<11} cannot be imported: {package.error}')
        lines.append(f'{"mmcv.ops":<11} {"missing: " + self.mmcv_ops if self.mmcv_ops else "compiled"}')
        lines.append(f'{"GPU":<11} {self.gpu or "none"}')
        lines.append('')
        lines.append('known problems of this environment:' if self.problems else 'no known problem of this environment')
        for problem in self.problems:
            lines += [f'- {problem.name}: {problem.symptom}', f'  remedy: {problem.remedy}']
        return '\n'.join(lines)


class _Known(NamedTuple):
    problem: Problem
    applies: Callable[[CompatReport], bool]
    sign: str  # pattern of the error's text


def _at_least(version: str, bound: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r'\d+', text.split('+')[0])[:3]]

    return bool(version) and numbers(version) >= numbers(bound)


def _version(report: CompatReport, module: str) -> str:
    return report.packages[module].version


def _original_mmengine(report: CompatReport) -> bool:
    version = _version(report, 'mmengine')
    return bool(version) and not _at_least(version, '0.10.8')


def _weights_only(report: CompatReport) -> bool:
    return _original_mmengine(report) and _at_least(_version(report, 'torch'), '2.6')


def _unchecked(report: CompatReport) -> bool:
    onedl = any(text.startswith('onedl-') for text in report.packages['mmengine'].distributions)
    return onedl and _at_least(_version(report, 'torch'), '2.6')


def _no_pkg_resources(report: CompatReport) -> bool:
    return _original_mmengine(report) and 'pkg_resources' not in report.helpers


def _over_ceiling(report: CompatReport) -> bool:
    hosts = (('mmdet', '3.3.1'), ('mmseg', '1.2.3'))
    old = [
        module for module, later in hosts if _version(report, module) and not _at_least(_version(report, module), later)
    ]
    return bool(old) and _at_least(_version(report, 'mmcv'), '2.2')


def _other_torch(report: CompatReport) -> bool:
    return 'undefined symbol' in report.mmcv_ops


def _no_ops(report: CompatReport) -> bool:
    return bool(_version(report, 'mmcv') and report.mmcv_ops) and not _other_torch(report)


def _torch_too_new(report: CompatReport) -> bool:
    return bool(report.mmcv_ops) and _at_least(_version(report, 'torch'), '2.14')


def _stacks(report: CompatReport) -> set[bool]:
    """Whether it is OneDL's, of every distribution of the stack."""
    return {text.startswith('onedl-') for module in _STACK for text in report.packages[module].distributions}


def _two_mmcv(report: CompatReport) -> bool:
    return len(report.packages['mmcv'].distributions) > 1 and len(_stacks(report)) < 2


def _no_tokenizer(report: CompatReport) -> bool:
    return bool(_version(report, 'mmseg')) and not {'ftfy', 'regex'} <= report.helpers


_COMPILE = (
    'CFLAGS="-g0 -O1 -w" MMCV_WITH_OPS=1 pip install --no-build-isolation --no-cache-dir --no-binary mmcv mmcv==2.1.0 '
    "(OneDL's is onedl-mmcv 2.3.6)"
)

_NEVER = r'(?!)'  # no error shows it

# In the order in which an error is looked up.
_KNOWN = (
    _Known(
        Problem(
            'weights_only',
            'from PyTorch 2.6 on torch.load refuses what MMEngine 0.10.7 keeps in a checkpoint beside weights: '
            "'Weights only load failed ... HistoryBuffer' on resume, test and inference",
            'tools/train.py and tools/test.py of mmkron allow these records and nothing else; a script of your own '
            'calls mmkron.allow_checkpoint_globals() first',
        ),
        _weights_only,
        r'Weights only load failed',
    ),
    _Known(
        Problem(
            'unchecked checkpoints',
            "OneDL's MMEngine reads a checkpoint that PyTorch refuses again without the check: code in it would run",
            'tools/train.py and tools/test.py of mmkron forbid it; around a script of your own set '
            'TORCH_FORCE_WEIGHTS_ONLY_LOAD=1 and call mmkron.allow_checkpoint_globals() first',
        ),
        _unchecked,
        _NEVER,
    ),
    _Known(
        Problem(
            'pkg_resources',
            "MMEngine 0.10.7 imports pkg_resources, which setuptools 82 removed: bases as 'mmdet::...' and mim fail",
            "pip install 'setuptools>=77.0.3,<82'",
        ),
        _no_pkg_resources,
        r"No module named 'pkg_resources'",
    ),
    _Known(
        Problem(
            'mmcv ceiling',
            'mmdet up to 3.3.0 and mmsegmentation up to 1.2.2 refuse mmcv from 2.2.0 on when they are imported',
            "install 'mmcv>=2.0.0,<2.2.0', compiled for this PyTorch; or move to the OneDL packages, in an environment "
            'of their own, as docs/install.md says',
        ),
        _over_ceiling,
        r'MMCV==\S+ is used but incompatible',
    ),
    _Known(
        Problem(
            'mmcv of another PyTorch',
            "mmcv's operators were compiled against another PyTorch: 'undefined symbol'",
            f'compile mmcv for this one: {_COMPILE}',
        ),
        _other_torch,
        r'undefined symbol',
    ),
    _Known(
        Problem(
            'mmcv-lite',
            'mmcv is here without its operators: MMPretrain works, models of mmdet and mmseg do not',
            'mmcv-lite has no compiled operators: remove it (pip uninstall mmcv-lite), then compile mmcv, with a C++17 '
            f'compiler: {_COMPILE}',
        ),
        _no_ops,
        r"mmcv\.(_ext|ops)|'mmcv' has no attribute 'ops'",
    ),
    _Known(
        Problem(
            'mmcv does not compile',
            "PyTorch from 2.14 on wants C++20 and mmcv's build asks for C++17: 'C++20 or later compatible compiler is "
            "required'",
            'compile and run mmcv with an earlier PyTorch; the tests run with torch 2.12.1 and torchvision 0.27.1',
        ),
        _torch_too_new,
        r'C\+\+20 or later compatible compiler',
    ),
    _Known(
        Problem(
            'ftfy',
            'mmsegmentation imports ftfy and regex without requiring them',
            'pip install ftfy regex',
        ),
        _no_tokenizer,
        r"No module named '(ftfy|regex)'",
    ),
    _Known(
        Problem(
            'two stacks',
            'packages of OpenMMLab and of OneDL are installed together; they write the same modules over each other',
            'make a new environment with one of them, as docs/install.md says; removing one takes files of the other',
        ),
        lambda report: len(_stacks(report)) > 1,
        _NEVER,
    ),
    _Known(
        Problem(
            'two mmcv',
            'more than one distribution of mmcv is installed; they write the same module over each other',
            f'pip uninstall mmcv mmcv-lite mmcv-full, then {_COMPILE}',
        ),
        _two_mmcv,
        _NEVER,
    ),
)


def remedy_of(error: BaseException) -> str:
    """What helps against an error of the stack, or an empty string."""
    return next((known.problem.remedy for known in _KNOWN if re.search(known.sign, str(error))), '')


def compat_report() -> CompatReport:
    """Versions of the stack, by module on both stacks, whether it can be imported, and its known problems.

    ``print(mmkron.compat_report())``, or ``python -m mmkron`` on the command line. The host libraries are imported,
    which takes some seconds.
    """
    packages = {module: _package(module) for module in _DISTRIBUTIONS}
    report = CompatReport(
        python=f'{platform.python_version()}, {platform.platform()}',
        packages=packages,
        mmcv_ops=_import('mmcv.ops')[1],
        gpu=_gpu(),
        helpers=frozenset(name for name in _HELPERS if _is_there(name)),
    )
    return report._replace(problems=tuple(known.problem for known in _KNOWN if known.applies(report)))


def _import(name: str) -> tuple[object, str]:
    """A module and an empty string, or None and the reason."""
    try:
        return import_module(name), ''
    except Exception as error:  # a package that is broken or does not fit raises anything
        return None, f'{type(error).__name__}: {" ".join(str(error).split())}'


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a module that was put in by hand has no spec
        return module in sys.modules


def _package(module: str) -> Package:
    found = []
    for name in _DISTRIBUTIONS[module]:
        try:
            number = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        except Exception:  # of several kinds: a removal that broke off leaves a folder without metadata
            number = None
        found.append((name, number or 'unknown'))
    if not found and not _is_there(module):
        return Package()
    # Of a host the models are what needs the rest of the stack.
    imported, error = _import(f'{module}.models' if module in _HOSTS else module)
    version = getattr(_import(module)[0], '__version__', '') if imported else ''
    if not version:
        version = found[0][1] if found else 'unknown'
    return Package(version, tuple(f'{name} {number}' for name, number in found), error)


def _gpu() -> str:
    torch = _import('torch')[0]
    try:
        if torch and torch.cuda.is_available():
            return f'{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}'
    except Exception as error:  # a driver that does not fit
        return f'unusable: {" ".join(str(error).split())}'
    return ''
