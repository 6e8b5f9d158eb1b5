"""Class folders of recordings and frames: splits, labels, formats, ignored files, and files that are not frames."""

import io
import os
import re
import zipfile

import numpy as np
import pytest
from event_files import aedat2, aedat3, nmnist, packet3, random_events

from mmkron.datasets import EventFolder, event_folder
from mmkron.datasets.events import Events, to_frames
from support.errors import raises
from support.tools import ROOT, run_training

CLASSES = ('clap', 'roll', 'wave')
WRITERS = {'.aedat': aedat2, '.aedat3': lambda events: aedat3(packet3(events)), '.bin': nmnist}


def make(root, splits=('train', 'val'), classes=CLASSES, suffix='.aedat', count=2):
    """Write ``count`` recordings per class and split, and return the events by path."""
    rng, made = np.random.default_rng(0), {}
    for split in splits:
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                path = root / split / name / f'{i}{suffix}'
                made[path] = random_events(rng, 60, 34)
                path.write_bytes(WRITERS[suffix](made[path]))
    return made


def samples(dataset):
    infos = [dataset.get_data_info(i) for i in range(len(dataset))]
    return [(os.path.relpath(info['img_path'], dataset.data_root), info['gt_label']) for info in infos]


@pytest.fixture
def warned(monkeypatch):
    texts = []
    monkeypatch.setattr(event_folder, 'print_log', lambda text, **_: texts.append(text))
    return texts


@pytest.mark.parametrize(('suffix', 'size'), [('.aedat', 128), ('.aedat3', (40, 36)), ('.bin', 34)])
def test_formats(tmp_path, suffix, size, warned):
    """The three byte formats are told apart by suffix and header; the second pass reads the cache."""
    made = make(tmp_path, suffix=suffix)
    for _ in range(2):
        dataset = EventFolder(str(tmp_path), 'val', size=size, frames=4)
        assert [label for _, label in samples(dataset)] == [0, 0, 1, 1, 2, 2]
        assert dataset.metainfo['classes'] == CLASSES
        for i, (path, _) in enumerate(samples(dataset)):
            events = Events(*(np.array(column) for column in zip(*made[tmp_path / path])))
            np.testing.assert_array_equal(dataset[i]['img'], to_frames(events, size, frames=4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['.frames', 'train', 'val']
    assert warned == []


def test_header_tells_the_version(tmp_path):
    """Both versions of AEDAT have the suffix .aedat; version 2.0 has one sensor size."""
    made = make(tmp_path, ['train'], count=1)
    for path, events in made.items():
        path.write_bytes(aedat3(packet3(events)))
    for size in (34, 128):
        dataset = EventFolder(str(tmp_path), 'train', size=size, frames=2, cache=False)
        assert [dataset[i]['img'].sum() for i in range(3)] == [60, 60, 60]
    path = next(iter(made))
    path.write_bytes(aedat2(made[path]))
    with raises(ValueError, 'size', (34, 34)):
        EventFolder(str(tmp_path), 'train', size=34)[0]


def test_classes_are_those_of_train(tmp_path, warned):
    """Neither a class that val does not have nor a hidden folder shifts a label; an unknown folder is an error."""
    make(tmp_path)
    for path in (tmp_path / 'val/clap').iterdir():
        path.unlink()
    (tmp_path / 'val/clap').rmdir()
    for hidden in ('train/.ipynb_checkpoints', 'val/.ipynb_checkpoints'):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / 'x.aedat').touch()
    (tmp_path / 'val/roll/._0.aedat').touch()
    dataset = EventFolder(str(tmp_path), 'val')
    assert dataset.metainfo['classes'] == CLASSES
    assert samples(dataset) == [
        (f'val/{name}/{i}.aedat', label) for name, label in (('roll', 1), ('wave', 2)) for i in (0, 1)
    ]
    (text,) = warned
    assert text.endswith(': clap')
    (tmp_path / 'val/claps').mkdir()
    with raises(ValueError, str(tmp_path / 'val/claps'), CLASSES):
        EventFolder(str(tmp_path), 'val')


def test_classes_of_metainfo(tmp_path):
    """The classes of metainfo set the order of the labels, and the folder train may be absent."""
    make(tmp_path, ['test'])
    classes = ['wave', 'clap', 'roll']
    dataset = EventFolder(str(tmp_path), 'test', metainfo=dict(classes=classes))
    assert samples(dataset)[::2] == [('test/clap/0.aedat', 1), ('test/roll/0.aedat', 2), ('test/wave/0.aedat', 0)]
    with raises(ValueError, str(tmp_path / 'test/wave')):
        EventFolder(str(tmp_path), 'test', metainfo=dict(classes=['clap', 'roll']))
    with raises(FileNotFoundError, str(tmp_path / 'train')):
        EventFolder(str(tmp_path), 'test')
    for bad, error in (((), ValueError), (('clap', 'clap'), ValueError), ((1, 2), TypeError)):
        with raises(error, 'classes', bad):
            EventFolder(str(tmp_path), 'test', metainfo=dict(classes=bad))


def test_absent_folders(tmp_path):
    """Without a prefix, the folders of the splits are not classes."""
    with raises(FileNotFoundError, str(tmp_path / 'train')):
        EventFolder(str(tmp_path), 'train')
    make(tmp_path)
    with raises(FileNotFoundError, str(tmp_path / 'gone')):
        EventFolder(str(tmp_path), 'gone')
    with raises(ValueError, str(tmp_path / 'train')):
        EventFolder(str(tmp_path))
    with raises(FileNotFoundError, str(tmp_path / 'train/train')):
        EventFolder(str(tmp_path / 'train'))
    assert len(EventFolder(str(tmp_path / 'train'), metainfo=dict(classes=CLASSES))) == 6
    for path in (tmp_path / 'train').rglob('*.aedat'):
        path.unlink()
    with raises(FileNotFoundError, str(tmp_path / 'train')):
        EventFolder(str(tmp_path), 'train')


def test_ignored_files(tmp_path, warned):
    """Ignored files are counted in a warning; a recording that is also present as frames is an error."""
    make(tmp_path, ['train'])
    for name in ('clap/notes.txt', 'clap/0.aedat4', 'roll/0', 'stray.aedat'):
        (tmp_path / 'train' / name).touch()
    (tmp_path / 'train/wave/deeper.npy').mkdir()
    assert len(EventFolder(str(tmp_path), 'train')) == 6
    (text,) = warned
    assert text.startswith('5 files')
    np.save(tmp_path / 'train/wave/0.npy', np.zeros((16, 2, 128, 128)))
    with raises(ValueError, str(tmp_path / 'train'), 'wave/0.npy'):
        EventFolder(str(tmp_path), 'train')


def test_lists(tmp_path):
    """Both lists have the classes of the folder; the cache next to them is not a class."""
    make(tmp_path, ['recordings'])
    (tmp_path / 'train.txt').write_text('wave/0.aedat\n./clap/1.aedat\n\nroll//0.aedat\n', encoding='utf-8-sig')
    (tmp_path / 'val.txt').write_text('wave/1.aedat\nroll/1.aedat\n')
    for root, prefix in ((tmp_path, 'recordings'), (tmp_path / 'recordings', '')):
        train, val = (
            EventFolder(str(root), prefix, str(tmp_path / f'{split}.txt'), frames=2) for split in ('train', 'val')
        )
        names = [os.path.join(prefix, name) for name in ('wave/0.aedat', 'clap/1.aedat', 'roll/0.aedat')]
        assert samples(train) == list(zip(names, (2, 0, 1)))
        assert [label for _, label in samples(val)] == [2, 1]
        assert train.metainfo['classes'] == val.metainfo['classes'] == CLASSES
        assert train[0]['img'].sum() == 60


@pytest.mark.parametrize(
    ('lines', 'error', 'value'),
    [
        ('wave/0.aedat\nwave/./0.aedat', ValueError, 'wave/./0.aedat'),
        ('../0.aedat', ValueError, '../0.aedat'),
        ('/wave/0.aedat', ValueError, '/wave/0.aedat'),
        ('0.aedat', ValueError, '0.aedat'),
        ('other/0.aedat', ValueError, 'other/0.aedat'),
        ('wave/0.aedat 2', ValueError, 'wave/0.aedat 2'),
        ('\n', ValueError, ''),
        ('wave/0.aedat\nwave/7.aedat\nwave/8.aedat', FileNotFoundError, 'wave/7.aedat, wave/8.aedat'),
    ],
)
def test_bad_lists(tmp_path, lines, error, value):
    make(tmp_path, ['.'])
    (tmp_path / 'train.txt').write_text(lines)
    with raises(error, str(tmp_path / 'train.txt'), value):
        EventFolder(str(tmp_path), ann_file='train.txt')


def put_frames(root, name='0.npy'):
    (root / 'train/clap').mkdir(parents=True, exist_ok=True)
    return root / 'train/clap' / name


def test_frames(tmp_path):
    """Frames are read from .npy and .npz of any type and memory order, and are not cached."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 9, (4, 2, 6, 8))
    np.save(put_frames(tmp_path, 'a.npy'), frames.astype(np.uint8))
    np.save(put_frames(tmp_path, 'b.npy'), np.asfortranarray(frames.astype('>f8')))
    np.savez(put_frames(tmp_path, 'c.npz'), frames)
    np.savez_compressed(put_frames(tmp_path, 'd.NPZ').open('wb'), frames=frames.astype(np.float16), other=np.zeros(3))
    dataset = EventFolder(str(tmp_path), 'train', size=(6, 8), frames=4)
    assert len(dataset) == 4
    for i in range(4):
        assert dataset[i]['img'].dtype == np.float32
        np.testing.assert_array_equal(dataset[i]['img'], frames)
    assert not (tmp_path / '.frames').exists()
    np.save(put_frames(tmp_path, 'a.npy'), frames[:3])
    with raises(ValueError, str(tmp_path / 'train/clap/a.npy'), (3, 2, 6, 8)):
        dataset[0]
    assert len(EventFolder(str(tmp_path), 'train', size=(6, 8), frames=None, duration=9)[0]['img']) == 3


class Unpickled:
    def __reduce__(self):
        return os.mkdir, ('unpickled',)


def save_array(save, *arrays, **options):
    """Return the bytes that a function of NumPy writes."""
    file = io.BytesIO()
    save(file, *arrays, **options)
    return file.getvalue()


def claim(shape):
    """Return a .npy file of 136 bytes whose header claims a large array."""
    header = dict(descr='<f8', fortran_order=False, shape=shape)
    return save_array(np.lib.format.write_array_header_1_0, header) + bytes(8)


GOOD = np.ones((4, 2, 6, 8))
ARCHIVE = save_array(np.savez, GOOD)
ARRAYS = (
    GOOD[:, :1], GOOD[0], GOOD.transpose(0, 1, 3, 2), np.float64(4), GOOD[:0], GOOD * 1j, GOOD.astype('S1'),
    GOOD * np.nan, GOOD * 1e300, np.array([Unpickled()]),
)  # fmt: skip
NOT_FRAMES = [
    b'', b'40 bytes that are a text and not an array', save_array(np.save, GOOD)[:-9], claim((10**4, 2, 6, 8)),
    claim((10**9, 2, 6, 8)), ARCHIVE[:-40], ARCHIVE[:300] + b'\xff' * 8 + ARCHIVE[308:],
    save_array(np.savez, GOOD, GOOD), save_array(np.savez), save_array(np.savez, np.array([Unpickled()])),
    *(save_array(np.save, array) for array in ARRAYS),
]  # fmt: skip


@pytest.mark.parametrize('rule', [dict(frames=4), dict(frames=None, duration=5)])
def test_files_that_are_not_frames(tmp_path, monkeypatch, rule):
    """Each error names the file; nothing is unpickled."""
    monkeypatch.chdir(tmp_path)
    path = put_frames(tmp_path)
    path.touch()
    dataset = EventFolder(str(tmp_path), 'train', size=(6, 8), **rule)
    for data in NOT_FRAMES:
        path.write_bytes(data)
        with raises(ValueError, f'frame file {str(path)!r}'):
            dataset[0]
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('frames.npy', claim((10**12, 2, 6, 8)))
    with raises(ValueError, f'frame file {str(path)!r}'):
        dataset[0]
    assert not (tmp_path / 'unpickled').exists()


PAGE = (ROOT / 'docs/events.md').read_text(encoding='utf-8')
CONFIGS = dict(re.findall(r'<!-- own events: configs/my/(\w+)\.py -->\n```python\n(.*?)```', PAGE, re.S))


def test_configs_of_the_page(tmp_path, monkeypatch, train_args):
    """The second config, whose base is the first, makes a training step on recordings and frames, and validates."""
    monkeypatch.chdir(tmp_path)
    made = make(tmp_path / 'data/moves', suffix='.bin', count=1)
    for path, events in list(made.items())[::3]:  # of the first class, in each split
        frames = to_frames(Events(*(np.array(column) for column in zip(*events))), 34, frames=2)
        np.save(path.with_suffix('.npy'), frames.astype(np.uint16))
        path.unlink()
    for each, text in CONFIGS.items():
        (tmp_path / f'{each}.py').write_text(text.replace("'../", f"'{ROOT}/configs/"))
    options = ['train_cfg.max_epochs=1', 'train_dataloader.batch_size=3', 'param_scheduler=[]', 'custom_hooks=[]']
    options.append('model.backbone.steps=2')
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        options += [f'{loader}.num_workers=0', f'{loader}.persistent_workers=False']
        options += [f'{loader}.dataset.size=34', f'{loader}.dataset.frames=2']
    runner = run_training(train_args(tmp_path / 'qkformer_moves_cutmix.py', '--cfg-options', *options))
    assert runner.iter == 1
    assert runner.train_dataloader.dataset.metainfo['classes'] == CLASSES
    augments = [type(augment).__name__ for augment in runner.model.data_preprocessor.batch_augments.augments]
    assert augments == ['Mixup', 'CutMix']
    for name in ('train/loss', 'val/accuracy/top1'):
        assert np.isfinite(runner.message_hub.get_scalar(name).current())
