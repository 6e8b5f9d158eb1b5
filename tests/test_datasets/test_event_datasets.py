"""CIFAR10-DVS and DVS128 Gesture from files in their byte formats: splits, labels, cache, and a step of training."""

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from event_files import aedat2, aedat3, packet3
from mmengine.config import Config, ConfigDict
from mmengine.dataset import ClassBalancedDataset
from mmengine.registry import DATASETS, DefaultScope
from mmengine.runner import Runner

from mmkron.datasets import CIFAR10DVS, DVS128Gesture, event_datasets
from mmkron.datasets.events import read_aedat2, read_aedat3, to_frames
from support.data_checks import problems
from support.errors import raises
from support.tools import ROOT

# The clock of the gestures' recordings jumps to its overflow, of which the reader warns.
pytestmark = pytest.mark.filterwarnings('ignore:event file .* of .* events:UserWarning')

CLASSES = CIFAR10DVS.METAINFO['classes']


def random_events(rng, count=40, start=0, end=1000):
    columns = [np.sort(rng.integers(start, end, count)), *rng.integers(0, 128, (2, count)), rng.integers(0, 2, count)]
    return list(zip(*(column.tolist() for column in columns)))


def make_cifar(root, count=20):
    """``count`` recordings of each class, numbered from 0."""
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f'cifar10_{name}_{i}.aedat').write_bytes(aedat2(random_events(rng, count=8 + i)))
    return root


LABELS = 'class,startTime_usec,endTime_usec\n'


def make_gesture(root):
    """Two recordings for training and one for the test; a clock that overflows, windows that overlap."""
    rng = np.random.default_rng(0)
    root.mkdir(exist_ok=True)
    for name in ('user01_led', 'user02_lab', 'user24_led'):
        packets = [random_events(rng, 300, 0, 1000), random_events(rng, 300, 0, 1000)]
        (root / f'{name}.aedat').write_bytes(aedat3(packet3(packets[0]), packet3(packets[1], overflow=1)))
    (root / 'user01_led_labels.csv').write_text(f'{LABELS}1,0,400\n11,300,900\n3,{2**31},{2**31 + 500}\n')
    (root / 'user02_lab_labels.csv').write_text(f'{LABELS}4,100,700\n\n')
    (root / 'user24_led_labels.csv').write_text('2,0,1000\n')
    (root / 'trials_to_train.txt').write_text('user01_led.aedat\nuser02_lab.aedat\n\n')
    (root / 'trials_to_test.txt').write_text('user24_led.aedat')
    return root


@pytest.fixture
def cifar(tmp_path):
    return make_cifar(tmp_path / 'cifar')


@pytest.fixture
def gesture(tmp_path):
    return make_gesture(tmp_path / 'gesture')


def names(dataset):
    return [Path(dataset.get_data_info(i)['img_path']).name for i in range(len(dataset))]


def test_cifar_lexicographic(cifar):
    """As text 8 and 9 come last of 0 to 19; classes in the order of CIFAR-10."""
    train, test = CIFAR10DVS(str(cifar)), CIFAR10DVS(str(cifar), 'test', test_mode=True)
    assert names(test) == [f'cifar10_{name}_{i}.aedat' for name in CLASSES for i in (8, 9)]
    assert names(train)[:4] == [f'cifar10_airplane_{i}.aedat' for i in (0, 1, 10, 11)]
    assert len(train) == 180
    assert not set(names(train)) & set(names(test))
    assert [test.get_cat_ids(i) for i in range(20)] == [[i // 2] for i in range(20)]


def test_cifar_tebn(tmp_path):
    for name in CLASSES:
        (tmp_path / name).mkdir()
        for i in (0, 7, 99, 100, 123, 999):
            (tmp_path / name / f'cifar10_{name}_{i}.aedat').touch()
    train, test = (CIFAR10DVS(str(tmp_path), split, split_rule='tebn') for split in ('train', 'test'))
    assert names(train)[:3] == [f'cifar10_airplane_{i}.aedat' for i in (100, 123, 999)]
    assert names(test)[-3:] == [f'cifar10_truck_{i}.aedat' for i in (0, 7, 99)]
    (tmp_path / 'cat' / 'other.aedat').touch()
    with pytest.raises(ValueError, match=r"names that end in _NUMBER.aedat, got '.*cat/other.aedat'"):
        CIFAR10DVS(str(tmp_path), split_rule='tebn')


def test_cifar_hidden_files(cifar):
    """macOS keeps attributes of a file in another one, whose name begins with a dot."""
    count = len(CIFAR10DVS(str(cifar)))
    for file in list((cifar / 'airplane').iterdir()):
        file.with_name(f'._{file.name}').write_bytes(b'attributes')
    assert len(CIFAR10DVS(str(cifar))) == count


def test_cifar_sample(cifar):
    dataset = CIFAR10DVS(str(cifar), 'test', frames=4, by='time')
    sample = dataset[3]
    assert sample['img'].dtype == np.float32
    events = read_aedat2(cifar / 'automobile' / 'cifar10_automobile_9.aedat')
    np.testing.assert_array_equal(sample['img'], to_frames(events, 128, 4, by='time'))
    assert (sample['gt_label'], sample['sample_idx'], sample['img'].sum()) == (1, 3, 17)


def test_cifar_missing(cifar):
    for file in (cifar / 'ship').iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r'airplane/cifar10_airplane_0.aedat below data_root; .*ship/\*.aedat$'):
        CIFAR10DVS(str(cifar))
    with pytest.raises(FileNotFoundError, match='gone/airplane/.*gone/truck'):
        CIFAR10DVS(str(cifar / 'gone'))


def test_cifar_incomplete(cifar, monkeypatch):
    """Fewer recordings than the data set has are worth a warning: the split would be another one."""
    said = []
    monkeypatch.setattr(event_datasets, 'print_log', lambda text, **_: said.append(text))
    CIFAR10DVS(str(cifar))
    assert said[0].startswith('CIFAR10-DVS has 1000 recordings per class, but found: airplane 20, automobile 20, ')
    monkeypatch.setattr(event_datasets, 'SAMPLES_A_CLASS', 20)
    CIFAR10DVS(str(cifar))
    assert len(said) == 1


def test_gesture_windows(gesture):
    """Labels from 0; an event in two windows belongs to both; the clock beyond its overflow."""
    train, test = DVS128Gesture(str(gesture), frames=2), DVS128Gesture(str(gesture), 'test', frames=2)
    assert names(train) == ['user01_led.aedat'] * 3 + ['user02_lab.aedat']
    assert [train.get_cat_ids(i)[0] for i in range(4)] == [0, 10, 2, 3]
    assert names(test) == ['user24_led.aedat']
    events = read_aedat3(gesture / 'user01_led.aedat')
    for i, (start, end) in enumerate([(0, 400), (300, 900), (2**31, 2**31 + 500)]):
        expected = np.zeros((2, 2, 128, 128), np.float32)
        inside = [event for event in zip(*events) if start <= event[0] < end]
        for j, (_, x, y, p) in enumerate(inside):
            expected[min(1, j // (len(inside) // 2)), p, y, x] += 1
        assert expected.sum() > 100
        np.testing.assert_array_equal(train[i]['img'], expected)
    assert pickle.loads(pickle.dumps(train))[3]['gt_label'] == 3


def test_gesture_missing(gesture):
    (gesture / 'user02_lab_labels.csv').unlink()
    with pytest.raises(FileNotFoundError, match=r'needs trials_to_train.txt.* missing: [^,]*/user02_lab_labels.csv$'):
        DVS128Gesture(str(gesture))
    (gesture / 'trials_to_test.txt').write_text('a.aedat\nb.aedat\n')
    with pytest.raises(FileNotFoundError, match=r'missing: .*/a.aedat, .*/a_labels.csv, .*/b.aedat and 1 more$'):
        DVS128Gesture(str(gesture), 'test')
    (gesture / 'trials_to_test.txt').write_text('\n')
    with pytest.raises(ValueError, match="trials_to_test.txt' must name one recording per line"):
        DVS128Gesture(str(gesture), 'test')
    cases = ('../a.aedat', '../a.aedat'), ('/a.aedat', '/a.aedat'), ('b.aedat\nb.aedat', 'b.aedat')
    for text, name in (*cases, ('b.aedat\n./b.aedat', './b.aedat'), ('c/b.aedat\nc//./b.aedat', 'c//./b.aedat')):
        (gesture / 'trials_to_test.txt').write_text(text)
        with pytest.raises(
            ValueError, match=f"trials_to_test.txt' must name .* below data_root, each once, got '{name}'"
        ):
            DVS128Gesture(str(gesture), 'test')
    (gesture / 'trials_to_test.txt').unlink()
    with pytest.raises(FileNotFoundError, match='missing: .*/trials_to_test.txt$'):
        DVS128Gesture(str(gesture), 'test')


@pytest.mark.parametrize(
    'line', ['0,1,2', '12,1,2', '1,5,5', '1,2', '1,2,3,4', 'a,1,2', '1,-1,2', '1,1.5,2', '\udc80,1,2']
)
def test_gesture_bad_labels(gesture, line):
    path = gesture / 'user24_led_labels.csv'
    path.write_bytes((LABELS + '2,0,1000\n' + line).encode(errors='surrogateescape'))
    with pytest.raises(ValueError, match=r"user24_led_labels.csv', line 3: expected the class, 1 to 11, .* got '"):
        DVS128Gesture(str(gesture), 'test')
    path.write_text(LABELS)
    with pytest.raises(ValueError, match="user24_led_labels.csv' must have a line for each gesture"):
        DVS128Gesture(str(gesture), 'test')


def cached(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file())


def test_cache(cifar, monkeypatch):
    """Read once, then from the cache; made anew when it is damaged, of another shape, or older than the events."""
    dataset = CIFAR10DVS(str(cifar), 'test', frames=4)
    frames = dataset[0]['img']
    assert cached(cifar / 'frames') == ['number4/airplane/cifar10_airplane_8.aedat.npz']
    path = cifar / 'frames' / 'number4/airplane/cifar10_airplane_8.aedat.npz'
    whole, source = path.read_bytes(), cifar / 'airplane' / 'cifar10_airplane_8.aedat'
    with monkeypatch.context() as patch:
        patch.setattr(CIFAR10DVS, 'read', lambda *_: pytest.fail('read again'))
        again = dataset[0]['img']
    assert again.dtype == np.float32
    np.testing.assert_array_equal(again, frames)

    rng = np.random.default_rng(0)
    for damaged in (b'', b'no archive', whole[:-30], whole[:200] + rng.bytes(40) + whole[240:]):
        path.write_bytes(damaged)
        np.testing.assert_array_equal(dataset[0]['img'], frames)
        assert path.read_bytes() == whole
    for content in (
        dict(frames=np.zeros((3, 2, 128, 128), np.uint8)),
        dict(frames=np.full((4, 2, 128, 128), np.nan)),
        dict(frames=np.uint8(1)),
        dict(frames=np.array([None])),
        dict(other=np.zeros((4, 2, 128, 128), np.uint8)),
        dict(frames=np.zeros((4, 2, 128, 128), np.uint8), source=[source.stat().st_size, 7]),
    ):
        np.savez(path, **dict(dict(source=event_datasets._fingerprint(source)), **content))
        np.testing.assert_array_equal(dataset[0]['img'], frames)
    source.write_bytes(aedat2(random_events(rng, count=99)))
    os.utime(path, (1, 1))
    assert dataset[0]['img'].sum() == 99


def test_cache_of_other_rules(cifar, tmp_path):
    """Each rule has its folder; a duration gives as many frames as it needs."""
    folder = tmp_path / 'elsewhere'
    for rule in (dict(frames=4), dict(frames=5), dict(frames=4, by='time'), dict(frames=None, duration=100)):
        for _ in range(2):
            CIFAR10DVS(str(cifar), 'test', cache=str(folder), **rule)[0]
    assert sorted(path.name for path in folder.iterdir()) == ['duration100', 'number4', 'number5', 'time4']
    assert not (cifar / 'frames').exists()
    events = read_aedat2(cifar / 'airplane' / 'cifar10_airplane_8.aedat')
    for _ in range(2):
        frames = CIFAR10DVS(str(cifar), 'test', cache=str(folder), frames=None, duration=100)[0]['img']
        assert len(frames) == (events.t[-1] - events.t[0]) // 100 + 1 > 1
    without = CIFAR10DVS(str(cifar), 'test', cache=False, frames=4)
    assert without[0]['img'].shape == (4, 2, 128, 128)
    assert not (cifar / 'frames').exists()


def test_cache_of_another_recording(tmp_path):
    """Of two folders with the same names, and after a file was replaced by one of the same length that is older."""
    first, second = (make_cifar(tmp_path / name, count=2) for name in ('first', 'second'))
    names = [f'airplane/cifar10_airplane_{i}.aedat' for i in (0, 1)]
    for root, x in ((first, 3), (second, 5)):
        for name in names:
            (root / name).write_bytes(aedat2([(i, x, 1, 1) for i in range(4)]))
    for _ in range(2):
        for root, x in ((first, 3), (second, 5)):
            frames = CIFAR10DVS(str(root), frames=1, cache=str(tmp_path / 'cache'))[0]['img']
            assert (frames[0, 1, 1, x], frames.sum()) == (4, 4)
    (second / names[0]).write_bytes(aedat2([(i, 7, 1, 1) for i in range(4)]))
    os.utime(second / names[0], (1, 1))
    assert CIFAR10DVS(str(second), frames=1, cache=str(tmp_path / 'cache'))[0]['img'][0, 1, 1, 7] == 4


def test_cache_of_large_counts(cifar):
    (cifar / 'airplane' / 'cifar10_airplane_8.aedat').write_bytes(aedat2([(i, 1, 2, 1) for i in range(600)]))
    for _ in range(2):
        frames = CIFAR10DVS(str(cifar), 'test', frames=2)[0]['img']
        assert (frames[0, 1, 2, 1], frames[1, 1, 2, 1], frames.sum()) == (300, 300, 600)


def test_cache_that_cannot_be_written(cifar):
    (cifar / 'frames').touch()
    with pytest.raises(OSError, match=r'frames cannot be cached as .*; set cache to a folder or to False'):
        CIFAR10DVS(str(cifar))[0]


def test_cache_interrupted(cifar, monkeypatch):
    """No part of a file is left, neither under its name nor beside it."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    dataset = CIFAR10DVS(str(cifar), 'test')
    with monkeypatch.context() as patch:
        patch.setattr(np, 'savez_compressed', interrupt)
        with pytest.raises(KeyboardInterrupt):
            dataset[0]
    assert cached(cifar / 'frames') == []


def test_cache_of_a_recording(gesture, monkeypatch):
    """A recording is read once for all its samples."""
    reads, read = [], DVS128Gesture.read
    monkeypatch.setattr(DVS128Gesture, 'read', lambda self, path: reads.append(path) or read(self, path))
    dataset = DVS128Gesture(str(gesture), frames=2)
    first = [dataset[i]['img'] for i in (1, 0, 2, 3)]
    assert [Path(path).name for path in reads] == ['user01_led.aedat', 'user02_lab.aedat']
    assert cached(gesture / 'frames' / 'number2') == [
        'user01_led.aedat_0-400.npz',
        'user01_led.aedat_2147483648-2147484148.npz',
        'user01_led.aedat_300-900.npz',
        'user02_lab.aedat_100-700.npz',
    ]
    for frames, i in zip(first, (1, 0, 2, 3)):
        np.testing.assert_array_equal(frames, DVS128Gesture(str(gesture), frames=2, cache=False)[i]['img'])


def test_cache_of_names_that_differ_in_their_suffix(gesture):
    """Two recordings with the same windows: each has its own frames."""
    (gesture / 'user01_led.aedat3').write_bytes(aedat3(packet3([(i, 5, 6, 1) for i in range(0, 900, 2)])))
    (gesture / 'user01_led_labels.csv').write_text('1,0,400\n')
    (gesture / 'trials_to_train.txt').write_text('user01_led.aedat\nuser01_led.aedat3\n')
    dataset = DVS128Gesture(str(gesture), frames=2)
    for _ in range(2):
        first, second = (dataset[i]['img'] for i in range(2))
        assert (second[:, 1, 6, 5].tolist(), second.sum()) == ([100, 100], 200)
        assert not np.array_equal(first, second)
    assert len(cached(gesture / 'frames')) == 2


def test_cache_of_a_recording_that_changed(gesture, monkeypatch):
    """All its samples are out of date, and one reading renews them."""
    dataset, read, reads = DVS128Gesture(str(gesture), frames=2), DVS128Gesture.read, []
    dataset[0]
    for path in (gesture / 'frames').rglob('*.npz'):
        os.utime(path, (1, 1))
    monkeypatch.setattr(DVS128Gesture, 'read', lambda self, path: reads.append(path) or read(self, path))
    for i in range(3):
        dataset[i]
    assert len(reads) == 1


def test_damaged_recordings(cifar, gesture):
    path = cifar / 'airplane' / 'cifar10_airplane_8.aedat'
    path.write_bytes(path.read_bytes()[:-1])
    dataset = CIFAR10DVS(str(cifar), 'test')
    with pytest.raises(ValueError, match=f"event file '{path}' is damaged at byte [0-9]+: 7 bytes are left"):
        dataset[0]
    path.write_bytes(aedat2([]))
    with pytest.raises(ValueError, match=f"event file '{path}' is damaged: it has no event$"):
        dataset[0]
    path.write_bytes(aedat2([(0, 1, 1, 1), (101_000, 1, 1, 1)]))
    with raises(ValueError, 'duration', 1000) as info:
        CIFAR10DVS(str(cifar), 'test', frames=None, duration=1000)[0]
    assert f"event file '{path}': " in str(info.value)
    assert not (cifar / 'frames').exists()
    dataset = DVS128Gesture(str(gesture))
    path = gesture / 'user01_led.aedat'
    path.write_bytes(aedat3(packet3([(10, 1, 1, 1)] * 3)))
    with pytest.raises(ValueError, match=f"event file '{path}' is damaged: it has no event from 300 to 900 us"):
        dataset[1]
    assert dataset[0]['img'].sum() == 3  # the window that has events


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        (dict(split='val'), ValueError, r"split must be one of \('train', 'test'\), got 'val'"),
        (dict(split_rule='random'), ValueError, r"split_rule must be one of \('lexicographic', 'tebn'\), got 'random'"),
        (dict(frames=0), ValueError, 'frames must be at least 1, got 0'),
        (dict(frames=10_001), ValueError, 'frames must be at most 10,000, got 10001'),
        (dict(duration=10), ValueError, 'frames or duration must be given .* got 16 and 10'),
        (dict(by='event'), ValueError, "by must be one of .* got 'event'"),
        (dict(cache=True), TypeError, 'cache must be a folder, None .* got True'),
        (dict(cache=''), TypeError, "cache must be a folder, None .* got ''"),
        (dict(data_root=''), TypeError, "data_root must be the path of a folder, got ''"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        CIFAR10DVS(**dict(dict(data_root='gone'), **arguments))


def test_missing_data_message(tmp_path):
    """The launcher's check: the root, then what is below it, with the layout."""
    root = str(tmp_path / 'data')
    for name, parts in (('CIFAR10DVS', CLASSES), ('DVS128Gesture', ('trials_to_train.txt', 'trials_to_test.txt'))):
        cfg = ConfigDict(train_dataloader=dict(dataset=dict(type=f'mmkron.{name}', data_root=root, split='train')))
        (missing,) = problems(cfg, 'files', ['train'])
        assert (missing.where, missing.option) == (root, 'train_dataloader.dataset.data_root=PATH')
        assert missing.hints[0].startswith(f'{name} reads this layout: help(mmkron.datasets.{name})')
        os.makedirs(root, exist_ok=True)
        assert [item.where for item in problems(cfg, 'files', ['train'])] == [f'{root}/{part}' for part in parts]
        os.rmdir(root)


def test_readme(gesture, monkeypatch):
    """The snippet for recordings of one's own."""
    text = (ROOT / 'configs/qkformer/README.md').read_text(encoding='utf-8')
    (snippet,) = re.findall(r'<!-- events -->\n```python\n(.*?)```', text, re.DOTALL)
    path = gesture / 'user01_led.aedat'
    path.write_bytes(aedat3(packet3([(0, 1, 2, 1), (99_999, 3, 4, 0), (100_000, 3, 4, 1), (2_000_000, 5, 6, 0)])))
    monkeypatch.chdir(gesture)
    scope = {}
    exec(snippet, scope)
    assert scope['frames'].shape == (16, 2, 128, 128)
    assert scope['frames'].sum() == 3
    assert scope['windows'].shape == (21, 2, 128, 128)
    assert [scope['windows'][i].sum() for i in (0, 1, 20)] == [2, 1, 1]


@pytest.mark.parametrize('name', ['cifar10-dvs', 'dvs-gesture'])
def test_recipe(name):
    """The learning rate at the start, after the warm-up and at the end, and when mixup stops."""
    cfg = Config.fromfile(ROOT / f'configs/qkformer/qkformer_{name}_t16.py')
    rate, low, epochs = {'cifar10-dvs': (5e-3, 1e-5, 106), 'dvs-gesture': (1e-3, 2e-5, 202)}[name]
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', rate, 0.06)
    warmup, cosine = cfg.param_scheduler
    assert warmup.start_factor * rate == pytest.approx(1e-5)
    assert (warmup.end, cosine.begin, cosine.end, cosine.eta_min) == (10, 10, epochs - 10, low)
    assert (cfg.train_cfg.max_epochs, cfg.randomness.seed) == (epochs, 2021)
    assert cfg.train_dataloader.batch_size == cfg.auto_scale_lr.base_batch_size == 16
    assert cfg.train_dataloader.dataset.frames == cfg.val_dataloader.dataset.frames == 16
    assert cfg.model.train_cfg == dict(augments=dict(type='Mixup', alpha=0.5), probs=0.5)
    assert cfg.custom_hooks[0].schedule == [dict(action_epoch=76, batch_augments=None)]
    assert (cfg.train_dataloader.dataset.split, cfg.val_dataloader.dataset.split) == ('train', 'test')


def tiny(cfg, root, folder):
    """The config for files below ``root``: a network of few channels, batches of 4, two frames, one epoch."""
    cfg.model.backbone = ConfigDict(
        type='mmkron.QKFormer',
        in_channels=2,
        arch=dict(
            dims=(8, 16),
            depths=(1, 1),
            heads=4,
            mlp_ratio=1,
            steps=2,
            attentions=('qkta', 'ssa'),
            stem=dict(widths=(4, 8), pools=(True, True), shortcut_from=1),
            pools=(True, True),
        ),
    )
    cfg.model.head.in_channels = 16
    cfg.model.train_cfg.probs = 1.0
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.update(batch_size=4, num_workers=0, persistent_workers=False)
        loader.dataset.update(data_root=str(root), frames=2)
        loader.dataset.indices = 4
    cfg.test_dataloader = cfg.val_dataloader
    cfg.train_cfg.max_epochs = 1
    cfg.work_dir = str(folder)
    cfg.default_hooks.checkpoint = None
    cfg.optim_wrapper.optimizer.lr = 1e-3
    cfg.param_scheduler = []
    return cfg


@pytest.mark.parametrize('name', ['cifar10-dvs', 'dvs-gesture'])
def test_training_step(name, tmp_path, request):
    """The shipped config: a step of training, with mixup and smooth labels, and one of validation, from bytes."""
    cfg = Config.fromfile(ROOT / f'configs/qkformer/qkformer_{name}_t16.py')
    root = request.getfixturevalue('cifar' if name == 'cifar10-dvs' else 'gesture')
    cfg = tiny(cfg, root, tmp_path / 'work')
    cfg.experiment_name = f'events-{name}'
    runner = Runner.from_cfg(cfg)
    forward, calls = runner.model.forward, []

    def record(inputs, data_samples=None, mode='tensor'):
        calls.append((tuple(inputs.shape), data_samples, forward(inputs, data_samples, mode)))
        return calls[-1][-1]

    runner.model.forward = record
    before = [p.detach().clone() for p in runner.model.parameters()]
    runner.train()
    (train_shape, samples, losses), (val_shape, _, predictions) = calls
    assert train_shape == (4, 2, 2, 128, 128)
    assert runner.model.data_preprocessor.batch_augments.probs == [1.0, 0.0]
    for sample in samples:
        assert sample.gt_score.shape == (cfg.model.head.num_classes,)
        assert sample.gt_score.sum() == pytest.approx(1, abs=1e-6)
    assert losses['loss'].isfinite()
    assert all(not torch.equal(old, new) for old, new in zip(before, runner.model.parameters()))
    count = len(runner.val_dataloader.dataset)
    assert val_shape == (count, 2, 2, 128, 128)
    hits = [bool(sample.pred_label == sample.gt_label) for sample in predictions]
    assert runner.message_hub.get_scalar('val/accuracy/top1').current() == pytest.approx(100 * sum(hits) / count)


def test_registry_and_wrappers(gesture):
    cfg = dict(type='mmkron.DVS128Gesture', data_root=str(gesture), split='train', frames=3)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        dataset = DATASETS.build(cfg)
    assert type(dataset) is DVS128Gesture
    assert len(dataset.metainfo['classes']) == 11
    assert len(ClassBalancedDataset(dataset, oversample_thr=0.5)) > len(dataset)
