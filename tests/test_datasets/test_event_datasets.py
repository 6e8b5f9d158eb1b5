"""CIFAR10-DVS and DVS128 Gesture from files in their byte formats: splits, labels and cache."""

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from event_files import aedat2, aedat3, packet3, random_events
from mmengine.config import ConfigDict

from mmkron.datasets import CIFAR10DVS, DVS128Gesture, event_datasets
from mmkron.datasets.events import read_aedat2, read_aedat3, to_frames
from support.data_checks import problems
from support.errors import raises
from support.tools import ROOT

# The clock of the gestures' recordings jumps at its overflow, of which the reader warns.
pytestmark = pytest.mark.filterwarnings('ignore:event file .* of .* events:UserWarning')

CLASSES = CIFAR10DVS.METAINFO['classes']
AIRPLANE = 'airplane/cifar10_airplane_{}.aedat'
LABELS = 'class,startTime_usec,endTime_usec\n'


def make_cifar(root, count=20):
    """Write ``count`` recordings of each class, numbered from 0."""
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f'cifar10_{name}_{i}.aedat').write_bytes(aedat2(random_events(rng, 8 + i)))
    return root


@pytest.fixture
def cifar(tmp_path):
    return make_cifar(tmp_path / 'cifar')


@pytest.fixture
def gesture(tmp_path):
    """Write two recordings for training and one for the test, with a clock that overflows and overlapping windows."""
    rng, root = np.random.default_rng(0), tmp_path / 'gesture'
    root.mkdir()
    for name in ('user01_led', 'user02_lab', 'user24_led'):
        packets = [random_events(rng, 300), random_events(rng, 300)]
        (root / f'{name}.aedat').write_bytes(aedat3(packet3(packets[0]), packet3(packets[1], overflow=1)))
    (root / 'user01_led_labels.csv').write_text(f'{LABELS}1,0,400\n11,300,900\n3,{2**31},{2**31 + 500}\n')
    (root / 'user02_lab_labels.csv').write_text(f'{LABELS}4,100,700\n\n')
    (root / 'user24_led_labels.csv').write_text('2,0,1000\n')
    (root / 'trials_to_train.txt').write_text('user01_led.aedat\nuser02_lab.aedat\n\n')
    (root / 'trials_to_test.txt').write_text('user24_led.aedat')
    return root


def names(dataset):
    return [Path(dataset.get_data_info(i)['img_path']).name for i in range(len(dataset))]


def cached(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file())


@pytest.fixture
def reads(monkeypatch):
    """Return the list of the gesture recordings that are read."""
    paths, read = [], DVS128Gesture.read
    monkeypatch.setattr(DVS128Gesture, 'read', lambda self, path: paths.append(Path(path).name) or read(self, path))
    return paths


def test_cifar_lexicographic(cifar):
    """As text, 8 and 9 are the last of 0 to 19; hidden files, which macOS writes, are not recordings."""
    for file in list((cifar / 'airplane').iterdir()):
        file.with_name(f'._{file.name}').write_bytes(b'attributes')
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
    with raises(ValueError, 'split_rule', str(tmp_path / 'cat/other.aedat')):
        CIFAR10DVS(str(tmp_path), split_rule='tebn')


def test_cifar_sample(cifar):
    sample = CIFAR10DVS(str(cifar), 'test', frames=4, by='time')[3]
    assert sample['img'].dtype == np.float32
    events = read_aedat2(cifar / 'automobile' / 'cifar10_automobile_9.aedat')
    np.testing.assert_array_equal(sample['img'], to_frames(events, 128, 4, by='time'))
    assert (sample['gt_label'], sample['sample_idx'], sample['img'].sum()) == (1, 3, 17)


def test_cifar_incomplete(cifar, monkeypatch):
    """Too few recordings cause a warning, since the split differs; a class without any, an error."""
    logged = []
    monkeypatch.setattr(event_datasets, 'print_log', lambda text, **_: logged.append(text))
    CIFAR10DVS(str(cifar))
    assert 'airplane 20, automobile 20, ' in logged[0]
    monkeypatch.setattr(event_datasets, 'SAMPLES_A_CLASS', 20)
    CIFAR10DVS(str(cifar))
    assert len(logged) == 1
    for file in (cifar / 'ship').iterdir():
        file.unlink()
    with raises(FileNotFoundError, 'data_root', str(cifar / 'ship')):
        CIFAR10DVS(str(cifar))
    with raises(FileNotFoundError, 'data_root', str(cifar / 'gone/truck')):
        CIFAR10DVS(str(cifar / 'gone'))


def test_gesture_windows(gesture):
    """Labels start at 0; an event in two windows belongs to both; the clock passes its overflow."""
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
    path = gesture / 'user02_lab_labels.csv'
    path.unlink()
    with raises(FileNotFoundError, str(path)):
        DVS128Gesture(str(gesture))
    trials = gesture / 'trials_to_test.txt'
    trials.write_text('a.aedat\nb.aedat\n')
    with raises(FileNotFoundError, str(gesture / 'a_labels.csv'), gesture / 'b.aedat'):
        DVS128Gesture(str(gesture), 'test')
    for text, value in (
        ('\n', 'empty'),
        ('../a.aedat', "'../a.aedat'"),
        ('/a.aedat', "'/a.aedat'"),
        ('b.aedat\nb.aedat', "'b.aedat'"),
        ('c/b.aedat\nc//./b.aedat', "'c//./b.aedat'"),
    ):
        trials.write_text(text)
        with raises(ValueError, str(trials), value):
            DVS128Gesture(str(gesture), 'test')
    trials.unlink()
    with raises(FileNotFoundError, str(trials)):
        DVS128Gesture(str(gesture), 'test')


@pytest.mark.parametrize(
    'line', ['0,1,2', '12,1,2', '1,5,5', '1,2', '1,2,3,4', 'a,1,2', '1,-1,2', '1,1.5,2', '\udc80,1,2']
)
def test_gesture_bad_labels(gesture, line):
    path = gesture / 'user24_led_labels.csv'
    path.write_bytes((LABELS + '2,0,1000\n' + line).encode(errors='surrogateescape'))
    with raises(ValueError, str(path), 'line 3'):
        DVS128Gesture(str(gesture), 'test')
    path.write_text(LABELS)
    with raises(ValueError, str(path)):
        DVS128Gesture(str(gesture), 'test')


def test_cache(cifar, monkeypatch):
    """The cache is read, and rebuilt when it is damaged, of another shape, or older than the events."""
    dataset = CIFAR10DVS(str(cifar), 'test', frames=4)
    frames = dataset[0]['img']
    path, source = cifar / 'frames/number4' / f'{AIRPLANE.format(8)}.npz', cifar / AIRPLANE.format(8)
    assert cached(cifar / 'frames') == [path.relative_to(cifar / 'frames').as_posix()]
    whole = path.read_bytes()
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
    source.write_bytes(aedat2([(i, 1, 2, 1) for i in range(600)]))  # counts that exceed a byte
    os.utime(path, (1, 1))
    for _ in range(2):
        counts = dataset[0]['img']
        assert counts[:, 1, 2, 1].tolist() == [150] * 4
        assert counts.sum() == 600


def test_cache_of_other_rules(cifar, tmp_path):
    """Each rule has its folder; a duration gives as many frames as it needs."""
    folder = tmp_path / 'elsewhere'
    for rule in (dict(frames=4), dict(frames=5), dict(frames=4, by='time'), dict(frames=None, duration=100)):
        for _ in range(2):
            frames = CIFAR10DVS(str(cifar), 'test', cache=str(folder), **rule)[0]['img']
    assert sorted(path.name for path in folder.iterdir()) == ['duration100', 'number4', 'number5', 'time4']
    events = read_aedat2(cifar / AIRPLANE.format(8))
    assert len(frames) == (events.t[-1] - events.t[0]) // 100 + 1 > 1
    assert CIFAR10DVS(str(cifar), 'test', cache=False, frames=4)[0]['img'].shape == (4, 2, 128, 128)
    assert not (cifar / 'frames').exists()


def test_cache_of_another_recording(tmp_path):
    """Two folders with equal names share a cache; a file is replaced by an older one of equal length."""
    first, second = (make_cifar(tmp_path / name, count=2) for name in ('first', 'second'))
    for root, x in ((first, 3), (second, 5)):
        for i in (0, 1):
            (root / AIRPLANE.format(i)).write_bytes(aedat2([(i, x, 1, 1) for i in range(4)]))
    for _ in range(2):
        for root, x in ((first, 3), (second, 5)):
            frames = CIFAR10DVS(str(root), frames=1, cache=str(tmp_path / 'cache'))[0]['img']
            assert (frames[0, 1, 1, x], frames.sum()) == (4, 4)
    (second / AIRPLANE.format(0)).write_bytes(aedat2([(i, 7, 1, 1) for i in range(4)]))
    os.utime(second / AIRPLANE.format(0), (1, 1))
    assert CIFAR10DVS(str(second), frames=1, cache=str(tmp_path / 'cache'))[0]['img'][0, 1, 1, 7] == 4


def test_cache_that_cannot_be_written(cifar, monkeypatch):
    """An interrupt leaves no partial file."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, 'savez_compressed', interrupt)
        with pytest.raises(KeyboardInterrupt):
            CIFAR10DVS(str(cifar), 'test')[0]
    assert cached(cifar / 'frames') == []
    with raises(OSError, 'cache'):
        CIFAR10DVS(str(cifar), cache=str(cifar / AIRPLANE.format(0)))[0]


def test_cache_of_a_recording(gesture, reads):
    """A recording is read once for all its samples, also when it changed."""
    dataset = DVS128Gesture(str(gesture), frames=2)
    first = [dataset[i]['img'] for i in (1, 0, 2, 3)]
    assert reads == ['user01_led.aedat', 'user02_lab.aedat']
    assert len(cached(gesture / 'frames' / 'number2')) == 4
    for frames, i in zip(first, (1, 0, 2, 3)):
        np.testing.assert_array_equal(frames, DVS128Gesture(str(gesture), frames=2, cache=False)[i]['img'])
    for path in (gesture / 'frames').rglob('*.npz'):
        os.utime(path, (1, 1))
    reads.clear()
    for i in range(3):
        dataset[i]
    assert len(reads) == 1


def test_cache_of_names_that_differ_in_their_suffix(gesture):
    """Two recordings with the same windows have their own frames."""
    (gesture / 'user01_led.aedat3').write_bytes(aedat3(packet3([(i, 5, 6, 1) for i in range(0, 900, 2)])))
    (gesture / 'user01_led_labels.csv').write_text('1,0,400\n')
    (gesture / 'trials_to_train.txt').write_text('user01_led.aedat\nuser01_led.aedat3\n')
    dataset = DVS128Gesture(str(gesture), frames=2)
    for _ in range(2):
        first, second = (dataset[i]['img'] for i in range(2))
        assert (second[:, 1, 6, 5].tolist(), second.sum()) == ([100, 100], 200)
        assert not np.array_equal(first, second)
    assert len(cached(gesture / 'frames')) == 2


def test_damaged_recordings(cifar, gesture):
    path = cifar / AIRPLANE.format(8)
    for data, rule, argument in (
        (path.read_bytes()[:-1], {}, 'damaged at byte'),
        (aedat2([]), {}, 'damaged'),
        (aedat2([(0, 1, 1, 1), (101_000, 1, 1, 1)]), dict(frames=None, duration=1000), 'duration'),
    ):
        path.write_bytes(data)
        with raises(ValueError, argument, path):
            CIFAR10DVS(str(cifar), 'test', **rule)[0]
    assert not (cifar / 'frames').exists()
    dataset, path = DVS128Gesture(str(gesture)), gesture / 'user01_led.aedat'
    path.write_bytes(aedat3(packet3([(10, 1, 1, 1)] * 3)))
    with raises(ValueError, str(path), 'from 300 to 900 us'):
        dataset[1]
    assert dataset[0]['img'].sum() == 3  # the window that has events


def test_missing_data_message(tmp_path):
    """The launcher names the root, then the missing parts of the layout."""
    root = str(tmp_path / 'data')
    for name, parts in (('CIFAR10DVS', CLASSES), ('DVS128Gesture', ('trials_to_train.txt', 'trials_to_test.txt'))):
        cfg = ConfigDict(train_dataloader=dict(dataset=dict(type=f'mmkron.{name}', data_root=root, split='train')))
        (missing,) = problems(cfg, 'files', ['train'])
        assert (missing.where, missing.option) == (root, 'train_dataloader.dataset.data_root=PATH')
        assert missing.hints[0].startswith(f'{name} reads this layout: help(mmkron.datasets.{name})')
        os.makedirs(root, exist_ok=True)
        assert [item.where for item in problems(cfg, 'files', ['train'])] == [f'{root}/{part}' for part in parts]
        os.rmdir(root)


# ---------------------------------------------------------------------------------------------------------- training


def test_readme(gesture, monkeypatch):
    """The README's snippet for the user's own recordings makes frames and windows."""
    text = (ROOT / 'configs/qkformer/README.md').read_text(encoding='utf-8')
    (snippet,) = re.findall(r'<!-- events -->\n```python\n(.*?)```', text, re.DOTALL)
    events = [(0, 1, 2, 1), (99_999, 3, 4, 0), (100_000, 3, 4, 1), (2_000_000, 5, 6, 0)]
    (gesture / 'user01_led.aedat').write_bytes(aedat3(packet3(events)))
    monkeypatch.chdir(gesture)
    scope = {}
    exec(snippet, scope)
    assert (scope['frames'].shape, scope['frames'].sum()) == ((16, 2, 128, 128), 3)
    assert scope['windows'].shape == (21, 2, 128, 128)
    assert [scope['windows'][i].sum() for i in (0, 1, 20)] == [2, 1, 1]
