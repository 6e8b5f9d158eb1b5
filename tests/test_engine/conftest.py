"""A training that the tests of the engine share, and shorter runs."""

import shutil

import pytest
from mmengine.config import Config

from support.tools import TINY_CONFIG, make_image_tree, run_training


@pytest.fixture(scope='session')
def shared_work_dir(tmp_path_factory, train_args):
    """Train the tiny config for one epoch."""
    folder = tmp_path_factory.mktemp('shared')
    root = make_image_tree(folder / 'imagenet', with_meta=False)
    (folder / 'tiny.py').write_text(TINY_CONFIG.format(root=str(root)))
    run_training(train_args(folder / 'tiny.py', '--work-dir', folder / 'work'))
    return folder / 'work'


@pytest.fixture
def trained(shared_work_dir, tmp_path):
    """Return the work dir of a training of one epoch, which the test may change."""
    work = shutil.copytree(shared_work_dir, tmp_path / 'work')
    (work / 'last_checkpoint').write_text(f'{work}/epoch_1.pth')
    return work


@pytest.fixture(autouse=True)
def unformatted_configs(monkeypatch):
    """Skip the formatting of configs, which takes most of the time of a short run."""
    monkeypatch.setattr(Config, 'pretty_text', 'model = dict()')
