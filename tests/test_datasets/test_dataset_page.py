"""The dataset in docs/add_a_dataset.md is found by its file alone and returns what its archive holds."""

import sys

import numpy as np
import pytest
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from mmkron import datasets
from mmkron.registry import DATASETS
from support.docs import read_blocks
from support.errors import raises
from support.tools import ROOT

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 28, 28, 3), dtype=np.uint8)
LABELS = RNG.integers(0, 3, (5, 1))


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Add ``image_archive.py`` to mmkron.datasets; yield the page's config."""
    file, use = (block for block in read_blocks(ROOT / 'docs/add_a_dataset.md', 'python') if block.key == 'dataset')
    (tmp_path / 'package').mkdir()
    (tmp_path / 'package/image_archive.py').write_text(file.text)
    DATASETS.import_from_location()
    monkeypatch.setattr(datasets, '__path__', [*datasets.__path__, str(tmp_path / 'package')])
    monkeypatch.setattr(DATASETS, '_module_dict', dict(DATASETS.module_dict))
    monkeypatch.setattr(DATASETS, '_imported', False)
    monkeypatch.delitem(sys.modules, 'mmkron.datasets.image_archive', raising=False)
    (tmp_path / 'data').mkdir()
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(use.text, scope)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        yield scope['train_dataloader']


def test_dataset(config):
    np.savez('data/cells.npz', train_images=IMAGES, train_labels=LABELS)
    config['dataset']['pipeline'] = config['dataset']['pipeline'][1:]  # without the random crop
    loader = Runner.build_dataloader(config, seed=0)
    (batch,) = loader
    assert type(loader.dataset).__module__ == 'mmkron.datasets.image_archive'
    assert [loader.dataset.get_cat_ids(i) for i in range(5)] == LABELS.tolist()
    got = {(int(sample.gt_label), x.numpy().tobytes()) for sample, x in zip(batch['data_samples'], batch['inputs'])}
    bgr = np.ascontiguousarray(IMAGES[..., ::-1].transpose(0, 3, 1, 2))
    assert got == {(int(label), image.tobytes()) for label, image in zip(LABELS[:, 0], bgr)}


def test_misuse(config):
    np.savez('data/cells.npz', train_images=IMAGES, train_labels=LABELS[:4])
    with raises(ValueError, "'data/cells.npz'", 4):
        DATASETS.build(config['dataset'])
