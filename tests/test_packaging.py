"""What an installed mmkron holds: a wheel from the source distribution, and an editable install."""

import importlib.metadata
import json
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


def test_wheel_installs_mmkron_only(wheel: zipfile.ZipFile) -> None:
    version = {}
    exec((ROOT / 'mmkron' / 'version.py').read_text(), version)
    assert {name.split('/')[0] for name in wheel.namelist()} == {
        'mmkron',
        f'mmkron-{version["__version__"]}.dist-info',
    }
    assert not [name for name in wheel.namelist() if 'tests' in name.split('/') or '/test_' in name]


def test_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    modules = {f'mmkron/{name}' for name in list_files(ROOT / 'mmkron') if not name.startswith('.mim/')}
    assert {name for name in wheel.namelist() if name.startswith('mmkron/') and '/.mim/' not in name} == modules


def test_wheel_holds_mim_files(wheel: zipfile.ZipFile) -> None:
    prefix = 'mmkron/.mim/'
    found = {name[len(prefix) :] for name in wheel.namelist() if name.startswith(prefix)}
    expected = {f'{entry}/{name}' for entry in ('configs', 'tools') for name in list_files(ROOT / entry)}
    assert found == expected | {'model-index.yml'}
    for name in found:
        assert wheel.read(prefix + name) == (ROOT / name).read_bytes(), name


def test_wheel_requires_torch_of_any_version(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith('.dist-info/METADATA')]
    metadata = Parser().parsestr(wheel.read(name).decode())
    requirements = metadata.get_all('Requires-Dist')
    assert [text for text in requirements if 'extra ==' not in text] == ['torch']
    assert set(metadata.get_all('Provides-Extra')) == {'openmmlab', 'onedl', 'test', 'dev'}
    assert not [text for text in requirements if '==' in text.split(';')[0]], 'exact pins belong in requirements/'


def test_wheel_works(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The unpacked wheel gives its configs, MMPretrain's index its models, and MIM finds its tools."""
    wheel.extractall(tmp_path / 'site')
    code = (
        'import sys; sys.path.insert(0, sys.argv[1])\n'
        'import mmkron; print(mmkron.get_config("kanet-kv").filename)\n'
        'names = mmkron.register_models()\n'
        'from mmpretrain.apis.model import ModelHub; print(ModelHub.get(names[0]).config.filename)\n'
        'from mmengine.utils import get_installed_path; print(get_installed_path("mmkron"))'
    )
    by_name, registered, package = call('-W', 'ignore', '-c', code, str(tmp_path / 'site'), cwd=tmp_path).splitlines()
    mim = tmp_path / 'site' / 'mmkron' / '.mim'
    assert Path(by_name) == mim / 'configs/kanet/kanet_kv_imagenet.py'
    assert Path(registered) == mim / 'configs/kanet/kanet_kv_imagenet.py'
    assert Path(package) == mim.parent
    assert {'train.py', 'test.py'} <= set(os.listdir(mim / 'tools'))


def test_editable_install_links_mim(editable_mim: Path, tree: Path) -> None:
    assert {path.name for path in editable_mim.iterdir()} == set(MIM_ENTRIES)
    for entry in MIM_ENTRIES:
        assert (editable_mim / entry).resolve() == (tree / entry).resolve()


def test_running_editable_install(tmp_path: Path) -> None:
    try:
        text = importlib.metadata.distribution('mmkron').read_text('direct_url.json')
    except importlib.metadata.PackageNotFoundError:
        pytest.skip('mmkron is not installed')
    info = json.loads(text or '{}')
    if not info.get('dir_info', {}).get('editable') or info['url'] != ROOT.as_uri():
        pytest.skip('mmkron is not an editable install of this checkout')
    code = (
        'import json; from importlib.util import find_spec as f;'
        'print(json.dumps([f("mmkron").origin] + [list(s.submodule_search_locations or []) if s else []'
        ' for s in map(f, ("configs", "tools", "tests"))]))'
    )
    origin, *others = json.loads(call('-c', code, cwd=tmp_path))
    assert Path(origin).resolve().parents[1] == ROOT
    for entry in MIM_ENTRIES:
        assert (Path(origin).parent / '.mim' / entry).resolve() == ROOT / entry
    for locations in others:
        assert not [location for location in locations if Path(location).resolve().parent == ROOT]
