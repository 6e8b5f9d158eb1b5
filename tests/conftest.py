"""Options and fixtures that several test modules share."""

import gc
import random
import socket

import mmengine.config.config
import pytest
import torch
import yapf.yapflib.yapf_api
from mmengine.registry import DefaultScope

from support.tools import TINY_CONFIG, load_tool, make_image_tree

DTYPES = ('float32', 'float64', 'bfloat16', 'float16')


def pytest_addoption(parser):
    group = parser.getgroup('mmkron')
    group.addoption('--device', default='cpu', help='device of the operators, layers and backbones under test')
    group.addoption('--dtype', default='float32', choices=DTYPES, help='dtype of their inputs and parameters')


@pytest.fixture(scope='session')
def device(request):
    """Return the device of ``pytest --device``."""
    return torch.device(request.config.getoption('--device'))


@pytest.fixture(scope='session')
def dtype(request):
    """Return the dtype of ``pytest --dtype``."""
    return getattr(torch, request.config.getoption('--dtype'))


@pytest.fixture(scope='session', autouse=True)
def plain_config_text():
    """Keep MMEngine from formatting its configs with yapf, which takes a second per checkpoint and log."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (mmengine.config.config, yapf.yapflib.yapf_api):  # versions differ in when they import it
            patch.setattr(module, 'FormatCode', lambda text, **_: (text, True), raising=False)
        yield


@pytest.fixture(scope='module', autouse=True)
def frozen_imports():
    """Speed up the garbage collections of MMEngine's datasets, which need 0.3 s each with all hosts imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def own_scope():
    """Restore the default scope, which MMEngine's Runner and the inferencers change."""
    before = dict(DefaultScope._instance_dict)
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(before)


def free_ports(count: int) -> list[str]:
    """Return free ports below the range that the system assigns to other connections, such as gloo's."""
    found: list[str] = []
    for port in random.SystemRandom().sample(range(20000, 32768), 1000):
        with socket.socket() as free:
            try:
                free.bind(('127.0.0.1', port))
            except OSError:
                continue
        found.append(str(port))
        if len(found) == count:
            break
    return found


@pytest.fixture
def tiny_config(tmp_path):
    """Return the path of a config whose data are the class folders ``tmp_path/imagenet``."""
    make_image_tree(tmp_path / 'imagenet', with_meta=False)
    path = tmp_path / 'tiny.py'
    path.write_text(TINY_CONFIG.format(root=str(tmp_path / 'imagenet')))
    return path


@pytest.fixture(scope='session')
def train_args():
    """Return a function that parses a command line of ``tools/train.py``."""
    script = load_tool('train')
    return lambda *argv: script.parse_args([str(arg) for arg in argv])


@pytest.fixture(scope='session')
def test_args():
    """Return a function that parses a command line of ``tools/test.py``."""
    script = load_tool('test')
    return lambda *argv: script.parse_args([str(arg) for arg in argv])
