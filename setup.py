import os
import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MIM_ENTRIES = ('configs', 'tools', 'model-index.yml')


def read_version() -> str:
    text = (ROOT / 'mmkron' / 'version.py').read_text(encoding='utf-8')
    return re.search(r"^__version__ = '([^']+)'", text, re.M).group(1)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns('__pycache__', '*.py[cod]'))
    else:
        shutil.copy2(source, target)


def link(source: Path, target: Path) -> None:
    try:
        target.symlink_to(os.path.relpath(source, target.parent), target_is_directory=source.is_dir())
    except OSError:  # Windows without permission to create links
        copy(source, target)


class BuildPyWithMim(build_py):
    """Build command that adds configs, tools and the model index to ``mmkron/.mim``, where MIM expects them.

    A wheel contains copies. An editable install gets links into the source tree, so that edits take effect at once.
    """

    def run(self) -> None:
        package = ROOT / 'mmkron' if self.editable_mode else Path(self.build_lib) / 'mmkron'
        mim = package / '.mim'
        # Files left in the build folder by earlier builds would end up in the wheel.
        remove(mim if self.editable_mode else package)
        super().run()
        mim.mkdir(parents=True)
        for entry in MIM_ENTRIES:
            (link if self.editable_mode else copy)(ROOT / entry, mim / entry)


setup(
    name='mmkron',
    version=read_version(),
    description='Kronecker attention, lambda layers and spiking Q-K attention for MMPretrain, MMSegmentation and '
    'MMDetection',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    keywords='computer vision, attention, spiking neural networks, OpenMMLab',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3 :: Only',
        'Programming Language :: Python :: 3.11',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['mmkron', 'mmkron.*']),
    cmdclass={'build_py': BuildPyWithMim},
    python_requires='>=3.11',
    # No version, so that installing mmkron never replaces an installed torch. MMEngine is omitted on purpose: two
    # distributions, mmengine and onedl-mmengine, provide it; each has an extra.
    install_requires=['torch'],
    extras_require={
        'openmmlab': [
            'mmengine>=0.10.7',
            'mmcv>=2.0.0,<2.2.0',  # mmdet 3.3.0 and mmsegmentation 1.2.2 refuse 2.2.0
            'mmpretrain>=1.2.0',
            'mmdet>=3.3.0',
            'mmsegmentation>=1.2.2',
            'ftfy',  # mmsegmentation imports ftfy and regex without requiring them
            'regex',
            'setuptools>=77.0.3,<82',  # mmengine uses pkg_resources, which 82 removed
        ],
        'onedl': [
            'onedl-mmengine>=0.10.12',
            'onedl-mmcv>=2.3.6',
            'onedl-mmpretrain>=1.3.6',
            'onedl-mmdetection>=3.5.1',
            'onedl-mmsegmentation>=1.4.2',
        ],
        'test': [
            'pytest',
            'pytest-timeout',
            'pytest-xdist',
            'hypothesis',
            'scikit-learn',
            'onnx',
            'onnxscript',
            'onnxruntime',
        ],
        'dev': ['ruff', 'pre-commit'],
    },
    zip_safe=False,
)
