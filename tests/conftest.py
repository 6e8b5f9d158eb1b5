"""What several test modules share."""

import gc
import random
import socket

import mmengine.config.config
import pytest
import torch
import yapf.yapflib.yapf_api
from mmengine.registry import DefaultScope

from support.tools import ROOT as ROOT
from support.tools import TINY_CONFIG, load_tool, make_image_tree

DTYPES = ('float32', 'float64', 'bfloat16', 'float16')

# arch -> weights without batch norm and biases, multiply-adds of convolutions, products and classifier at 224 x 224
KANET_COUNTS = {
    'kanet-kv': (3_448_448, 288_413_728),
    'kanet-qkv': (3_448_448, 281_119_392),
    'attnnet': (3_448_448, 365_374_304),
    'attnnet-pool': (3_448_448, 300_248_480),
    'mobilenet-v2-kao': (3_461_120, 298_649_632),
    'kanet-wo-kao': (3_457_088, 290_538_368),
    'mobilenet-v2': (3_469_760, 300_774_272),
}


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
    """Keep MMEngine from laying out its configs with yapf, which takes a second per checkpoint and log."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (mmengine.config.config, yapf.yapflib.yapf_api):  # it imports the function early or late
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
    """Keep the default scope that MMEngine's Runner and the inferencers leave behind from the next test."""
    before = dict(DefaultScope._instance_dict)
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(before)


def free_ports(count: int) -> list[str]:
    """Ports for process groups, below those that the system hands out itself, as to the connections of gloo: what is
    free now could be theirs when it is wanted."""
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
    """Path of a config whose data is the class-folder tree ``tmp_path/imagenet``."""
    make_image_tree(tmp_path / 'imagenet', with_meta=False)
    path = tmp_path / 'tiny.py'
    path.write_text(TINY_CONFIG.format(root=str(tmp_path / 'imagenet')))
    return path


@pytest.fixture(scope='session')
def train_args():
    """Parses a command line as ``tools/train.py`` does."""
    script = load_tool('train')
    return lambda *argv: script.parse_args([str(arg) for arg in argv])


@pytest.fixture(scope='session')
def test_args():
    """Parses a command line as ``tools/test.py`` does."""
    script = load_tool('test')
    return lambda *argv: script.parse_args([str(arg) for arg in argv])
