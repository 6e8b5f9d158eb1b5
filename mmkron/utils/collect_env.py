"""What the stack is made of, what in it is known not to work, and what to do about it.

Nothing is imported but torch, and a package that cannot be imported is a finding, not an error.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
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
_HELPERS = ('ftfy', 'regex', 'pkg_resources')  # modules that a part of the stack imports without requiring them


class Package(NamedTuple):
    """A module of the stack."""

    version: str = ''  # empty: not installed
    distributions: tuple[str, ...] = ()  # what provides it, as in 'onedl-mmcv 2.3.6'


class CompatReport(NamedTuple):
    """What :func:`compat_report` found; its string is for reading."""

    python: str
    packages: dict[str, Package]  # by module
    mmcv_ops: str  # empty if the compiled operators can be loaded, else why not
    gpu: str  # name of the first one, or empty
    helpers: frozenset[str]  # of _HELPERS those that are there
    problems: tuple[Problem, ...] = ()

    def has(self, module: str, bound: str = '') -> bool:
        """Return whether a module is installed, in the version ``bound`` or a later one."""
        version = self.packages[module].version
        return bool(version) and _numbers(version) >= _numbers(bound)

    def onedl(self, *modules: str) -> set[bool]:
        """Return whether the distributions of these modules are OneDL's; of a mixture {False, True}."""
        return {text.startswith('onedl-') for module in modules for text in self.packages[module].distributions}

    def __str__(self) -> str:
        lines = [f'{"mmkron":<11} {__version__}', f'{"python":<11} {self.python}']
        for module, package in self.packages.items():
            text = package.version or 'not installed'
            named = [part for part in package.distributions if part.split()[0] != module]
            if named or len(package.distributions) > 1:
                text += f' ({", ".join(package.distributions)})'
            lines.append(f'{module:<11} {text}')
        lines.append(f'{"mmcv.ops":<11} {"missing: " + self.mmcv_ops if self.mmcv_ops else "compiled"}')
        lines += [f'{"GPU":<11} {self.gpu or "none"}', '']
        lines.append('known problems of this environment:' if self.problems else 'no known problem of this environment')
        for problem in self.problems:
            lines += [f'- {problem.name}: {problem.symptom}', f'  remedy: {problem.remedy}']
        return '\n'.join(lines)


class Problem(NamedTuple):
    """Something that does not work, and what helps."""

    name: str
    symptom: str
    remedy: str
    applies: Callable[[CompatReport], bool]
    sign: str = r'(?!)'  # pattern of the error's text; this one is in none


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r'\d+', version.split('+')[0])[:3]]


def _original_mmengine(report: CompatReport) -> bool:
    return report.has('mmengine') and not report.has('mmengine', '0.10.8')


def _other_torch(report: CompatReport) -> bool:
    return 'undefined symbol' in report.mmcv_ops


_STACK = ('mmengine', 'mmcv', 'mmpretrain', 'mmseg', 'mmdet')
_COMPILE = (
    'CFLAGS="-g0 -O1 -w" MMCV_WITH_OPS=1 pip install --no-build-isolation --no-cache-dir --no-binary mmcv mmcv==2.1.0 '
    "(OneDL's is onedl-mmcv 2.3.6)"
)
# In the order in which an error is looked up.
_KNOWN = (
    Problem(
        'weights_only',
        'from PyTorch 2.6 on torch.load refuses what MMEngine 0.10.7 keeps in a checkpoint beside weights: '
        "'Weights only load failed ... HistoryBuffer' on resume, test and inference",
        'tools/train.py and tools/test.py of mmkron allow these records and nothing else; a script of your own '
        'calls mmkron.allow_checkpoint_globals() first',
        lambda report: _original_mmengine(report) and report.has('torch', '2.6'),
        r'Weights only load failed',
    ),
    Problem(
        'unchecked checkpoints',
        "OneDL's MMEngine reads a checkpoint that PyTorch refuses again without the check: code in it would run",
        'tools/train.py and tools/test.py of mmkron forbid it; around a script of your own set '
        'TORCH_FORCE_WEIGHTS_ONLY_LOAD=1 and call mmkron.allow_checkpoint_globals() first',
        lambda report: True in report.onedl('mmengine') and report.has('torch', '2.6'),
    ),
    Problem(
        'pkg_resources',
        "MMEngine 0.10.7 imports pkg_resources, which setuptools 82 removed: bases as 'mmdet::...' and mim fail",
        "pip install 'setuptools>=77.0.3,<82'",
        lambda report: _original_mmengine(report) and 'pkg_resources' not in report.helpers,
        r"No module named 'pkg_resources'",
    ),
    Problem(
        'mmcv ceiling',
        'mmdet up to 3.3.0 and mmsegmentation up to 1.2.2 refuse mmcv from 2.2.0 on when they are imported',
        "install 'mmcv>=2.0.0,<2.2.0', compiled for this PyTorch; or move to the OneDL packages, in an environment "
        'of their own, as docs/install.md says',
        lambda report: (
            report.has('mmcv', '2.2')
            and any(
                report.has(host) and not report.has(host, n) for host, n in (('mmdet', '3.3.1'), ('mmseg', '1.2.3'))
            )
        ),
        r'MMCV==\S+ is used but incompatible',
    ),
    Problem(
        'mmcv of another PyTorch',
        "mmcv's operators were compiled against another PyTorch: 'undefined symbol'",
        f'compile mmcv for this one: {_COMPILE}',
        _other_torch,
        r'undefined symbol',
    ),
    Problem(
        'mmcv-lite',
        'mmcv is here without its operators: MMPretrain works, models of mmdet and mmseg do not',
        'mmcv-lite has no compiled operators: remove it (pip uninstall mmcv-lite), then compile mmcv, with a C++17 '
        f'compiler: {_COMPILE}',
        lambda report: report.has('mmcv') and bool(report.mmcv_ops) and not _other_torch(report),
        r"mmcv\.(_ext|ops)|'mmcv' has no attribute 'ops'",
    ),
    Problem(
        'mmcv does not compile',
        "PyTorch from 2.14 on wants C++20 and mmcv's build asks for C++17: 'C++20 or later compatible compiler is "
        "required'",
        'compile and run mmcv with an earlier PyTorch; the tests run with torch 2.12.1 and torchvision 0.27.1',
        lambda report: bool(report.mmcv_ops) and report.has('torch', '2.14'),
        r'C\+\+20 or later compatible compiler',
    ),
    Problem(
        'ftfy',
        'mmsegmentation imports ftfy and regex without requiring them',
        'pip install ftfy regex',
        lambda report: report.has('mmseg') and not {'ftfy', 'regex'} <= report.helpers,
        r"No module named '(ftfy|regex)'",
    ),
    Problem(
        'two stacks',
        'packages of OpenMMLab and of OneDL, or two of mmcv, are installed; they write over each other',
        'make a new environment with one of them, as docs/install.md says; removing one takes files of the other',
        lambda report: len(report.onedl(*_STACK)) > 1 or len(report.packages['mmcv'].distributions) > 1,
    ),
)


def remedy_of(error: BaseException | str) -> str:
    """Return what helps against an error of the stack, or an empty string."""
    return next((known.remedy for known in _KNOWN if re.search(known.sign, str(error))), '')


def compat_report() -> CompatReport:
    """Return the versions of the stack, by module on both stacks, and its known problems.

    ``print(mmkron.compat_report())``, or ``python -m mmkron`` on the command line. Only torch is imported; the other
    versions are those of the installed distributions.
    """
    gpu = _gpu()  # first, since mmcv's operators need torch
    report = CompatReport(
        python=f'{platform.python_version()}, {platform.platform()}',
        packages={module: _package(module) for module in _DISTRIBUTIONS},
        mmcv_ops=_mmcv_ops(),
        gpu=gpu,
        helpers=frozenset(name for name in _HELPERS if _is_there(name)),
    )
    return report._replace(problems=tuple(known for known in _KNOWN if known.applies(report)))


def _find(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except (ImportError, ValueError):  # a module that was put in by hand has no spec
        return None


def _is_there(module: str) -> bool:
    return module in sys.modules or _find(module) is not None


def _package(module: str) -> Package:
    found = []
    for name in _DISTRIBUTIONS[module]:
        try:
            found.append((name, metadata.version(name) or 'unknown'))
        except metadata.PackageNotFoundError:
            continue
        except Exception:  # of several kinds: a removal that broke off leaves a folder without metadata
            found.append((name, 'unknown'))
    version = found[0][1] if found else 'unknown' if _is_there(module) else ''
    if module == 'torch':  # its module alone tells the build, as in '2.12.1+cpu'
        version = getattr(sys.modules.get(module), '__version__', version)
    return Package(version, tuple(f'{name} {number}' for name, number in found))


def _mmcv_ops() -> str:
    """Load mmcv's compiled operators without mmcv, after torch; return why that is not possible, or an empty string."""
    if 'mmcv._ext' in sys.modules:
        return ''
    mmcv = _find('mmcv')
    if mmcv is None:
        return "No module named 'mmcv'"
    spec = PathFinder.find_spec('mmcv._ext', mmcv.submodule_search_locations)
    if spec is None:
        return "No module named 'mmcv._ext'"
    try:
        module_from_spec(spec)
    except Exception as error:  # a library that is broken or does not fit
        return ' '.join(str(error).split())
    return ''


def _gpu() -> str:
    try:
        torch = import_module('torch')
        if torch.cuda.is_available():
            return f'{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}'
    except ModuleNotFoundError:
        return ''
    except Exception as error:  # a library of torch, or a driver, that does not fit
        return f'unusable: {" ".join(str(error).split())}'
    return ''
