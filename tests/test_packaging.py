"""The contents of an installed mmkron: a wheel from the source distribution, and an editable install."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MIM_ENTRIES = ('configs', 'tools', 'model-index.yml')


def list_files(folder: Path) -> set[str]:
    """Return the files of a folder that a wheel should hold, relative to the folder."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob('*')
        if path.is_file() and '__pycache__' not in path.parts
    }


def call(*command: str, cwd: Path) -> str:
    env = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def call_backend(hook: str, tree: Path, out: Path) -> Path:
    """Run a build hook of setuptools in ``tree``, as pip does, and return the path of the result."""
    out.mkdir(exist_ok=True)
    code = f'import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))'
    return out / call('-c', code, str(out), cwd=tree).split()[-1]


@pytest.fixture(scope='session')
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the working tree."""
    target = tmp_path_factory.mktemp('packaging') / 'tree'
    ignored = shutil.ignore_patterns('.*', 'build', 'dist', 'data', 'work_dirs', '*.egg-info', '__pycache__')
    shutil.copytree(ROOT, target, ignore=ignored)
    return target


@pytest.fixture(scope='session')
def editable_mim(tree: Path) -> Path:
    for _ in range(2):  # the second install finds the links of the first
        call_backend('build_editable', tree, tree.parent / 'editable')
    return tree / 'mmkron' / '.mim'


@pytest.fixture(scope='session')
def wheel(tree: Path, editable_mim: Path) -> zipfile.ZipFile:
    """Build a wheel from the source distribution of a tree with an editable install, over an earlier build."""
    shutil.unpack_archive(call_backend('build_sdist', tree, tree.parent / 'sdist'), tree.parent / 'unpacked')
    (source,) = (tree.parent / 'unpacked').iterdir()
    stale = source / 'build' / 'lib' / 'mmkron' / '.mim' / 'configs'
    stale.mkdir(parents=True)
    for folder in (stale, stale.parents[1]):
        (folder / 'removed_long_ago.py').touch()
    with zipfile.ZipFile(call_backend('build_wheel', source, tree.parent / 'wheel')) as file:
        yield file


def test_wheel_holds_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = [name for name in wheel.namelist() if '.dist-info/' not in name]
    modules = {f'mmkron/{name}' for name in list_files(ROOT / 'mmkron') if not name.startswith('.mim/')}
    assert {name for name in names if '/.mim/' not in name} == modules
    prefix = 'mmkron/.mim/'
    found = {name[len(prefix) :] for name in names if name.startswith(prefix)}
    expected = {f'{entry}/{name}' for entry in ('configs', 'tools') for name in list_files(ROOT / entry)}
    assert found == expected | {'model-index.yml'}
    for name in found:
        assert wheel.read(prefix + name) == (ROOT / name).read_bytes(), name


def test_wheel_requires_torch_of_any_version(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith('.dist-info/METADATA')]
    requirements = Parser().parsestr(wheel.read(name).decode()).get_all('Requires-Dist')
    assert [text for text in requirements if 'extra ==' not in text] == ['torch']


def test_wheel_works(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The unpacked wheel has its configs, and MIM finds its tools."""
    wheel.extractall(tmp_path / 'site')
    code = (
        'import sys; sys.path.insert(0, sys.argv[1])\n'
        'import mmkron; print(mmkron.get_config("kanet-kv").filename)\n'
        'from mmengine.utils import get_installed_path; print(get_installed_path("mmkron"))'
    )
    config, package = call('-W', 'ignore', '-c', code, str(tmp_path / 'site'), cwd=tmp_path).splitlines()
    mim = tmp_path / 'site' / 'mmkron' / '.mim'
    assert Path(config) == mim / 'configs/kanet/kanet_kv_imagenet.py'
    assert Path(package) == mim.parent
    assert {'train.py', 'test.py'} <= set(os.listdir(mim / 'tools'))


def test_editable_install_links_mim(editable_mim: Path, tree: Path) -> None:
    assert {path.name for path in editable_mim.iterdir()} == set(MIM_ENTRIES)
    for entry in MIM_ENTRIES:
        assert (editable_mim / entry).resolve() == (tree / entry).resolve()
