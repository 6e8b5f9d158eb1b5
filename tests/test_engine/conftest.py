"""A training that the tests of the engine share."""

import pytest

from mmkron.engine import runner


@pytest.fixture
def trained(tiny_config, tmp_path, train_args):
    """Train the tiny config for one epoch, and return the work dir."""
    runner.train(train_args(tiny_config, '--work-dir', tmp_path / 'work'))
    return tmp_path / 'work'
