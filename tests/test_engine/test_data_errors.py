"""Samples that cannot be loaded: the error names the file, with the loaders of all hosts and in a data worker."""

from importlib import import_module

import numpy as np
import pytest
from mmengine.dataset import BaseDataset, Compose, ConcatDataset, RepeatDataset
from mmengine.registry import TRANSFORMS, DefaultScope
from PIL import Image

from mmkron.engine.data_errors import DataError, NamedPipeline, name_samples
from support.errors import raises
from support.tools import CLASSES, run_training


class Fail:
    """A transform whose error says nothing about the sample."""

    def __init__(self, name):
        self.name = name

    def __call__(self, results):
        if results['img_path'].endswith(self.name):
            raise KeyError('gt_something')
        return results


@pytest.fixture
def train(tiny_config, train_args, tmp_path, monkeypatch):
    """Train the tiny image tree with changes of the config."""
    monkeypatch.setitem(TRANSFORMS.module_dict, 'Fail', Fail)

    def run(changes, workers):
        path = tmp_path / 'changed.py'
        path.write_text(f"{tiny_config.read_text()}{changes}\ntrain_dataloader['num_workers'] = {workers}\n")
        return run_training(train_args(path, '--work-dir', tmp_path / 'work', '--no-validate'))

    return run


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('backend', ['cv2', 'pillow'])
def test_unreadable_image(train, tmp_path, workers, backend):
    """The decoders of the hosts' loading transform do not know the name of the file."""
    path = tmp_path / 'imagenet/train' / CLASSES[1] / f'{CLASSES[1]}_1.JPEG'
    path.write_bytes(b'no image')
    load = f"\npipeline[0] = dict(type='LoadImageFromFile', imdecode_backend={backend!r})"
    with pytest.raises((AssertionError, DataError), match=str(path)):
        train(load, workers)


@pytest.mark.parametrize('runner', ['Runner', 'mmkron.FlexibleRunner'])
@pytest.mark.parametrize(('workers', 'iterations'), [(0, False), (1, True)])
def test_transform_that_fails(train, tmp_path, workers, iterations, runner):
    """The workers of an iteration-based loop start before any hook runs."""
    name = f'{CLASSES[0]}_2.JPEG'
    changes = f"\npipeline.insert(1, dict(type='Fail', name={name!r}))"
    if iterations:
        changes += '\ntrain_cfg = dict(by_epoch=False, max_iters=4)'
        changes += "\ntrain_dataloader['sampler'] = dict(type='InfiniteSampler')"
    if runner != 'Runner':
        changes += f'\nrunner_type = {runner!r}'
    with pytest.raises(DataError, match=f"{tmp_path}/imagenet/train/{CLASSES[0]}/{name}: KeyError: 'gt_something'"):
        train(changes, workers)


@pytest.mark.parametrize('host', ['mmpretrain', 'mmseg', 'mmdet'])
def test_datasets_of_each_host(host, tmp_path):
    """Loading of annotations is covered, and datasets in wrappers."""
    if host == 'mmdet':
        pytest.importorskip('mmcv._ext', reason='mmdet needs the compiled operators of mmcv')
    datasets = import_module(f'{host}.datasets')
    for name in ('a', 'b'):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / f'{name}.png')
    (tmp_path / 'maps').mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / 'maps/a.png')
    bad = tmp_path / ('maps/b.png' if host == 'mmseg' else 'b.png')
    bad.write_bytes(b'no image')
    load = dict(type='LoadImageFromFile', imdecode_backend='pillow')
    if host == 'mmseg':
        data = datasets.BaseSegDataset(
            data_prefix=dict(img_path=str(tmp_path), seg_map_path=str(tmp_path / 'maps')),
            img_suffix='.png',
            metainfo=dict(classes=('x',)),
            pipeline=[load, dict(type='mmseg.LoadAnnotations')],
        )
    else:
        base = {'mmpretrain': 'BaseDataset', 'mmdet': 'BaseDetDataset'}[host]
        content = dict(metainfo={}, data_list=[dict(img_path=str(tmp_path / f'{n}.png'), instances=[]) for n in 'ab'])
        (tmp_path / 'list.json').write_text(str(content).replace("'", '"'))
        with DefaultScope.overwrite_default_scope(host):
            data = getattr(datasets, base)(ann_file=str(tmp_path / 'list.json'), data_root='', pipeline=[load])
    order = [str(info['img_path'])[-5] for info in map(data.get_data_info, range(2))]
    wrapped = RepeatDataset(data, times=2)
    for dataset in (ConcatDataset([data, data]), wrapped):  # of the same data, which is wrapped once
        name_samples(dataset)
    assert type(data.pipeline) is NamedPipeline
    assert wrapped[order.index('a')]['img'].shape == (8, 8, 3)
    with pytest.raises(DataError, match=f'{bad}.*: UnidentifiedImageError: '):
        wrapped[order.index('b')]


def test_sample_without_a_file():
    """Data that is generated, not read, has a number; an error that names the file stays as it is."""

    class Generated(BaseDataset):
        def load_data_list(self):
            return [dict(x=0), dict(x=1)]

    def fail(results):
        raise ValueError('no such thing as a.png')

    data = Generated(pipeline=[fail])
    name_samples(data)
    with raises(DataError, 'sample 1', 'ValueError: no such thing'):
        data[1]
    with raises(ValueError, 'no such thing'):
        NamedPipeline(Compose([fail]))(dict(img_path='a.png'))
