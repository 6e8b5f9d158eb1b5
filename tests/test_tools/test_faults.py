"""Full disks, unreadable samples and data workers that die: each ends with the file and the reason."""

import multiprocessing
import os
import resource
import signal
import uuid

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset, Compose, ConcatDataset, RepeatDataset
from mmengine.registry import TRANSFORMS, DefaultScope
from PIL import Image

from mmkron.engine import checkpoints
from mmkron.engine import runner as launch
from mmkron.engine.data_faults import DataError, _datasets, data_faults
from mmkron.engine.runner import LaunchError
from support.tools import CLASSES


class KillWorker:
    """A transform that ends its process, as a full memory or a crash of a decoder does."""

    def __init__(self, name):
        self.name = name

    def __call__(self, results):
        if results['img_path'].endswith(self.name) and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return results


class Fail(KillWorker):
    """A transform whose error says nothing about the sample."""

    def __call__(self, results):
        if results['img_path'].endswith(self.name):
            raise KeyError('gt_something')
        return results


@pytest.fixture(autouse=True)
def transforms(monkeypatch):
    monkeypatch.setattr(os, 'fsync', lambda descriptor: None)  # for a power cut, which nothing here tests
    monkeypatch.setattr(Config, 'pretty_text', '')
    for cls in (KillWorker, Fail):
        monkeypatch.setitem(TRANSFORMS.module_dict, cls.__name__, cls)


@pytest.fixture
def train(tiny_config, train_args, tmp_path):
    """Trains the tiny image tree with changes of the config."""

    def run(changes='', *options):
        path = tmp_path / 'changed.py'
        # MMEngine keeps scores by the name of the experiment and the second.
        path.write_text(tiny_config.read_text() + f'experiment_name = {uuid.uuid4().hex!r}\n' + changes)
        options = ('--cfg-options', *options) if options else ()
        return launch.train(train_args(path, '--work-dir', tmp_path / 'work', '--no-validate', *options))

    return run


# ----------------------------------------------------------------------------------------------------------- full disk


def test_disk_full_while_saving(train, tmp_path):
    """A limit on the size of files stands for the disk: the write of the second checkpoint stops in the middle."""
    own = "\ndefault_hooks['checkpoint'].update(type='mmkron.CheckpointHook', max_keep_ckpts=1)"
    own += "\ntrain_cfg['max_epochs'] = {}"
    train(own.format(1))
    work = tmp_path / 'work'
    first = (work / 'epoch_1.pth').read_bytes()
    said = tmp_path / 'said'

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(first) // 2, len(first) // 2))
        try:
            train(own.format(2) + '\nresume = True')
        except LaunchError as error:
            said.write_text(str(error))

    process = multiprocessing.get_context('fork').Process(target=fill)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    message = said.read_text()
    assert message.startswith(f'checkpoint {work}/epoch_2.pth cannot be written: File too large (')
    assert 'the earlier ones are as they were, and --resume goes on from the last of them' in message
    assert [path.name for path in work.glob('*.pth*')] == ['epoch_1.pth']
    assert (work / 'epoch_1.pth').read_bytes() == first
    assert (work / 'last_checkpoint').read_text() == f'{work}/epoch_1.pth'
    assert train(own.format(2) + '\nresume = True').iter == 4


def test_truncated_checkpoint_of_mmengines_own_hook(train, tmp_path, capsys):
    """MMEngine writes in place, and names the file only afterwards."""
    train("\ntrain_cfg['max_epochs'] = 2")
    second = tmp_path / 'work/epoch_2.pth'
    second.write_bytes(second.read_bytes()[:1000])
    runner = train("\ntrain_cfg['max_epochs'] = 2\nresume = True")
    assert runner.iter == 4
    out = capsys.readouterr().out
    assert f'--resume passes over checkpoint {second} is damaged or cut off: ' in out
    assert f'--resume goes on from {tmp_path}/work/epoch_1.pth' in out
    assert checkpoints.read_whole(str(second), '')['meta']['iter'] == 4


# ------------------------------------------------------------------------------------------------------- bad samples


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('backend', ['cv2', 'pillow'])
def test_unreadable_image_among_many(train, tmp_path, workers, backend):
    """With the loading transform of the hosts, whose decoders do not know the name."""
    path = tmp_path / 'imagenet/train' / CLASSES[1] / f'{CLASSES[1]}_1.JPEG'
    path.write_bytes(b'no image')
    load = f"\npipeline[0] = dict(type='LoadImageFromFile', imdecode_backend={backend!r})"
    with pytest.raises((AssertionError, DataError), match=str(path)):
        train(load, f'train_dataloader.num_workers={workers}')


@pytest.mark.parametrize(('workers', 'iterations'), [(0, False), (1, False), (1, True)])
def test_transform_that_fails(train, tmp_path, workers, iterations):
    name = f'{CLASSES[0]}_2.JPEG'
    changes = f"\npipeline.insert(1, dict(type='Fail', name={name!r}))"
    if iterations:  # these workers start before any hook runs
        changes += '\ntrain_cfg = dict(by_epoch=False, max_iters=4)'
        changes += "\ntrain_dataloader['sampler'] = dict(type='InfiniteSampler')"
    with pytest.raises(DataError, match=f"{tmp_path}/imagenet/train/{CLASSES[0]}/{name}: KeyError: 'gt_something'"):
        train(changes, f'train_dataloader.num_workers={workers}')


def test_worker_that_dies(train, tmp_path):
    path = tmp_path / 'imagenet/train' / CLASSES[0] / f'{CLASSES[0]}_2.JPEG'
    changes = f"\npipeline.insert(1, dict(type='KillWorker', name={path.name!r}))"
    with pytest.raises(
        LaunchError, match=rf'DataLoader worker[^\n]*(\n.*)*what it read last, by process: \d+: {path}\n'
    ):
        train(changes, 'train_dataloader.num_workers=2')


@pytest.mark.parametrize('host', ['mmpretrain', 'mmseg', 'mmdet'])
def test_datasets_of_each_host(host, tmp_path):
    """Also what the loading of annotations fails at, and below wrappers."""
    if host == 'mmdet':
        pytest.importorskip('mmcv._ext', reason='mmdet needs the compiled operators of mmcv')
    from importlib import import_module
    from types import SimpleNamespace

    datasets = import_module(f'{host}.datasets')
    for name in ('a', 'b'):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / f'{name}.png')
    (tmp_path / 'maps').mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / 'maps/a.png')
    (tmp_path / 'maps/b.png').write_bytes(b'no image')
    load = dict(type='LoadImageFromFile', imdecode_backend='pillow')
    bad = tmp_path / 'b.png'
    if host == 'mmseg':
        bad = tmp_path / 'maps/b.png'
        data = datasets.BaseSegDataset(
            data_prefix=dict(img_path=str(tmp_path), seg_map_path=str(tmp_path / 'maps')),
            img_suffix='.png',
            metainfo=dict(classes=('x',)),
            pipeline=[load, dict(type='mmseg.LoadAnnotations')],
        )
        order = [str(info['img_path'])[-5] for info in map(data.get_data_info, range(2))]
    else:
        bad.write_bytes(b'no image')
        base = {'mmpretrain': 'BaseDataset', 'mmdet': 'BaseDetDataset'}[host]
        content = dict(metainfo={}, data_list=[dict(img_path=str(tmp_path / f'{n}.png'), instances=[]) for n in 'ab'])
        (tmp_path / 'list.json').write_text(str(content).replace("'", '"'))
        with DefaultScope.overwrite_default_scope(host):
            data = getattr(datasets, base)(ann_file=str(tmp_path / 'list.json'), data_root='', pipeline=[load])
        order = ['a', 'b']
    wrapped = RepeatDataset(data, times=2)
    both = ConcatDataset([data, data])
    assert list(_datasets(both)) == [both, data, data]
    assert list(_datasets(wrapped)) == [wrapped, data]

    hooks = []
    loader = SimpleNamespace(dataset=wrapped)
    runner = SimpleNamespace(register_hook=hooks.append, test_dataloader=loader)
    with data_faults(runner):
        hooks[0].before_test(runner)
        assert isinstance(data.pipeline, Compose)
        assert wrapped[order.index('a')]['img'].shape == (8, 8, 3)
        with pytest.raises(DataError, match=f'{bad}.*: UnidentifiedImageError: cannot identify image file'):
            wrapped[order.index('b')]


def test_other_errors_pass(train):
    with pytest.raises(RuntimeError, match='of a model'), data_faults_of_nothing():
        raise RuntimeError('of a model')


def data_faults_of_nothing():
    from types import SimpleNamespace

    return data_faults(SimpleNamespace(register_hook=lambda hook: None))


def test_sample_without_a_file():
    """Data that is made, not read, is called by its number."""
    from types import SimpleNamespace

    class Made(BaseDataset):
        def load_data_list(self):
            return [dict(x=0), dict(x=1)]

    def fail(results):
        raise ValueError('no such thing')

    data, hooks = Made(pipeline=[fail]), []
    runner = SimpleNamespace(register_hook=hooks.append, test_dataloader=SimpleNamespace(dataset=data))
    with data_faults(runner):
        hooks[0].before_test(runner)
        with pytest.raises(DataError, match='sample 1: ValueError: no such thing'):
            data[1]
