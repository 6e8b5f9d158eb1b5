"""Report the versions of the stack, and the known problems of an environment with their remedies."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from mmkron.utils.errors import LaunchError
from mmkron.version import __version__

if TYPE_CHECKING:
    from mmengine.config import Config

# The same modules come from the distributions of OpenMMLab and of OneDL.
_OPENMMLAB = ('mmengine', 'mmengine-lite', 'mmcv', 'mmcv-lite', 'mmcv-full', 'mmpretrain', 'mmsegmentation', 'mmdet')
_ONEDL = ('onedl-mmengine', 'onedl-mmcv', 'onedl-mmpretrain', 'onedl-mmsegmentation', 'onedl-mmdetection')
_OTHERS = ('torch', 'numpy', 'setuptools', 'triton', 'ftfy', 'regex')
_COMPILE = (
    'CFLAGS="-g0 -O1 -w" MMCV_WITH_OPS=1 pip install --no-build-isolation --no-cache-dir --no-binary mmcv mmcv==2.1.0 '
    "(OneDL's is onedl-mmcv 2.3.6)"
)


class CompatReport(NamedTuple):
    """The versions of the stack and its known problems; ``str()`` makes a text of it."""

    environment: dict[str, str]  # Python, compilers and devices, as MMEngine collects them
    packages: dict[str, str]  # versions of the installed distributions
    mmcv_ops: str  # the reason why mmcv's compiled operators cannot be loaded, or an empty string
    problems: tuple[Problem, ...] = ()

    def has(self, bound: str, *names: str) -> bool:
        """Return whether one of some distributions is installed in version ``bound`` or later."""
        return any(name in self.packages and _numbers(self.packages[name]) >= _numbers(bound) for name in names)

    def is_older(self, name: str, bound: str) -> bool:
        """Return whether a distribution is installed in a version before ``bound``."""
        return name in self.packages and not self.has(bound, name)

    def __str__(self) -> str:
        others = dict.fromkeys(_OTHERS, 'not installed')
        rows = {
            'mmkron': __version__,
            **others,
            **self.packages,
            'mmcv.ops': self.mmcv_ops or 'compiled',
            **self.environment,
        }
        lines = [f'{name:<20} {text}' for name, text in rows.items()]
        lines += ['', 'known problems of this environment:' if self.problems else 'no known problem']
        return '\n'.join([*lines, *(f'- {problem.text}\n  remedy: {problem.remedy}' for problem in self.problems)])


class Problem(NamedTuple):
    """A known problem of an environment."""

    text: str
    remedy: str
    applies: Callable[[CompatReport], bool]
    sign: str = '(?!)'  # pattern of the error that it causes; by default it matches nothing


# An error gets the remedy of the first problem whose sign it has.
_PROBLEMS = (
    Problem(
        'torch.load refuses checkpoints of MMEngine 0.10.7 in scripts of your own: Weights only load failed',
        'call mmkron.allow_checkpoint_globals() first, as tools/train.py and tools/test.py do',
        lambda report: report.has('2.6', 'torch') and report.is_older('mmengine', '0.10.8'),
        'Weights only load failed',
    ),
    Problem(
        "OneDL's MMEngine reads a checkpoint that PyTorch refuses again without the check: code in it would run",
        'use tools/train.py and tools/test.py, which forbid it, or set TORCH_FORCE_WEIGHTS_ONLY_LOAD=1',
        lambda report: report.has('2.6', 'torch') and report.has('0', 'onedl-mmengine'),
    ),
    Problem(
        'MMEngine 0.10.7 imports pkg_resources, which setuptools 82 removed',
        "pip install 'setuptools>=77.0.3,<82'",
        lambda report: report.is_older('mmengine', '0.10.8') and find_spec('pkg_resources') is None,
        "No module named 'pkg_resources'",
    ),
    Problem(
        'mmdet 3.3.0 and mmsegmentation 1.2.2 refuse mmcv from 2.2.0 on',
        "install 'mmcv>=2.0.0,<2.2.0', or OneDL's stack in a new environment, as docs/install.md says",
        lambda report: (
            report.has('2.2', 'mmcv', 'mmcv-lite')
            and (report.is_older('mmdet', '3.3.1') or report.is_older('mmsegmentation', '1.2.3'))
        ),
        r'MMCV==\S+ is used but incompatible',
    ),
    Problem(
        "mmcv's operators were compiled for another PyTorch: undefined symbol",
        f'compile mmcv for this one: {_COMPILE}',
        lambda report: 'undefined symbol' in report.mmcv_ops,
        'undefined symbol',
    ),
    Problem(
        'mmcv has no compiled operators (mmcv-lite): MMPretrain works, mmdet and mmsegmentation do not',
        f'pip uninstall mmcv-lite, then compile mmcv, with a PyTorch before 2.14: {_COMPILE}',
        lambda report: "'mmcv._ext'" in report.mmcv_ops,
        r"mmcv\.(_ext|ops)|'mmcv' has no attribute 'ops'",
    ),
    Problem(
        'mmsegmentation imports ftfy and regex without requiring them',
        'pip install ftfy regex',
        lambda report: (
            report.has('0', 'mmsegmentation', 'onedl-mmsegmentation') and not {'ftfy', 'regex'} <= {*report.packages}
        ),
        r"No module named '(ftfy|regex)'",
    ),
    Problem(
        'packages of both OpenMMLab and OneDL are installed, or two of mmcv; they overwrite each other',
        'create a new environment with one of them, as docs/install.md says',
        lambda report: (
            (report.has('0', *_OPENMMLAB) and report.has('0', *_ONEDL))
            or sum('mmcv' in name for name in report.packages) > 1
        ),
    ),
)


def remedy_of(error: BaseException | str) -> str:
    """Return the remedy for an error that the stack is known for, or an empty string."""
    return next((problem.remedy for problem in _PROBLEMS if re.search(problem.sign, str(error))), '')


def compat_report() -> CompatReport:
    """Return the versions of the stack and its known problems, as ``python -m mmkron`` prints them.

    A package that is missing or cannot be imported is a part of the report, not an error. No host is imported.
    """
    installed = {name: _version(name) for name in (*_OTHERS, *_OPENMMLAB, *_ONEDL)}
    report = CompatReport(_environment(), {name: text for name, text in installed.items() if text}, _mmcv_ops())
    return report._replace(problems=tuple(problem for problem in _PROBLEMS if problem.applies(report)))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r'\d+', version)[:3]]


def _version(name: str) -> str:
    try:
        return metadata.version(name) or 'unknown'
    except metadata.PackageNotFoundError:
        return ''
    except Exception:  # a removal that was interrupted leaves a folder without metadata
        return 'unknown'


def _environment() -> dict[str, str]:
    try:
        from mmengine.utils.dl_utils import collect_env

        found = collect_env()
    except Exception as error:  # of a library or a driver that does not fit
        return {'environment': f'unknown: {type(error).__name__}: {" ".join(str(error).split())}'}
    keys = ('sys.platform', 'Python', 'CUDA available', 'CUDA_HOME', 'NVCC', 'GCC', 'PyTorch', 'TorchVision', 'OpenCV')
    return {key: str(value) for key, value in found.items() if key in keys or key.startswith('GPU')}


def _mmcv_ops() -> str:
    """Return the reason why mmcv's operators cannot be loaded, or an empty string."""
    try:
        import_module('mmcv._ext')
    except Exception as error:  # a library can fail in many ways
        return ' '.join(str(error).split()) or type(error).__name__
    return ''


def check_hosts(cfg: Config) -> None:
    """Import the host libraries that a config names by its default scope or in the prefix of a type.

    Raises:
        LaunchError: One of them cannot be imported.
    """
    named = {cfg.get('default_scope'), *re.findall(r"'type': '(\w+)\.", str(cfg.to_dict()))}
    for host in sorted(named.intersection(('mmpretrain', 'mmseg', 'mmdet'))):
        try:
            import_module(f'{host}.models')
        except (ImportError, AssertionError) as error:  # the hosts assert the versions that they work with
            hint = remedy_of(error) or 'docs/install.md says how to install it'
            raise LaunchError(
                f'this config needs {host}, which cannot be imported: {error}\n{hint} (python -m mmkron reports what '
                'is installed)'
            ) from error
