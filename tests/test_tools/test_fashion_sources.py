"""The sources of the composed scenes' images, and the errors of the tool."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from mmkron.datasets import Digits
from support.errors import raises
from support.tools import load_tool

from .test_fashion_scenes import content, disk

pytest.importorskip('pycocotools', reason='the masks of the COCO set are encoded by pycocotools')

SMALL = ['--train', '2', '--val', '1', '--size', '40', '48']


@pytest.fixture(scope='module')
def tool():
    return load_tool('dataset_converters/fashion_scenes')


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, '>u4').tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_fashion(folder: Path, zipped: bool = False, **changes: np.ndarray) -> Path:
    """Write Fashion-MNIST's four files with disks: training images are of class 3, test images of class 7."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        'train_images': np.stack([disk(10)] * 6),
        'train_labels': np.full(6, 3),
        't10k_images': np.stack([disk(8)] * 4),
        't10k_labels': np.full(4, 7),
        **changes,
    }
    for name, array in arrays.items():
        part, kind = name.split('_')
        path = folder / f'{part}-{kind}-idx{array.ndim}-ubyte{".gz" if zipped else ""}'
        path.write_bytes(gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array))
    return folder


def refusal(tool, capsys, *argv) -> str:
    """Return the message with which the tool ends, as argparse does."""
    with pytest.raises(SystemExit, match='2'):
        tool.main([str(arg) for arg in argv])
    return capsys.readouterr().err.split('error: ')[1].strip()


# -------------------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize('zipped', [False, True])
def test_idx_files_and_their_split(tool, tmp_path, zipped):
    folder = write_fashion(tmp_path / 'files', zipped)
    source = tool.read_source(str(folder))
    np.testing.assert_array_equal(source.splits['train'].images, np.stack([disk(10)] * 6))
    np.testing.assert_array_equal(source.splits['val'].images, np.stack([disk(8)] * 4))
    tool.main([str(tmp_path / 'out'), '--source', str(folder), *SMALL])
    for split, category in (('train', 4), ('val', 8)):
        coco = json.loads((tmp_path / f'out/annotations/instances_{split}.json').read_text())
        assert {annotation['category_id'] for annotation in coco['annotations']} == {category}


def test_order_of_the_sources(tool, tmp_path, monkeypatch, capsys):
    """The first folder with all files is read, plain files before zipped ones; only 'auto' falls back to digits."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    monkeypatch.setattr(tool, 'FASHION_DIRS', (first, second))
    assert tool.read_source('auto').classes == tuple('0123456789')
    assert 'dataset-fashion-mnist' in capsys.readouterr().out
    assert str(first) in refusal(tool, capsys, tmp_path / 'out', '--source', 'fashion')
    assert list(tmp_path.iterdir()) == []

    write_fashion(second, zipped=True, train_labels=np.full(6, 5))
    write_fashion(first)
    (first / 't10k-labels-idx1-ubyte').unlink()
    for source in ('auto', 'fashion'):
        assert set(tool.read_source(source).splits['train'].labels) == {5}
    write_fashion(second)
    assert set(tool.read_source('auto').splits['train'].labels) == {3}
    write_fashion(first)
    assert tool.read_source('auto').name.endswith(str(first))


def test_digits_are_split_as_in_the_dataset(tool):
    source = tool.read_digits()
    for split, sprites in source.splits.items():
        samples = Digits(split, lazy_init=True).load_data_list()
        assert sprites.labels.tolist() == [sample['gt_label'] for sample in samples]
        assert sprites.images.shape == (len(samples), 28, 28)
        ink = np.array([sample['img'].mean() for sample in samples])
        assert np.corrcoef(ink, sprites.images.mean((1, 2)))[0, 1] > 0.9
        assert not sprites.solid


def test_blank_images_are_skipped(tool, tmp_path):
    images = np.stack([np.zeros((28, 28)), disk(), np.full((28, 28), 16)])
    write_fashion(tmp_path, train_images=images, train_labels=np.array([1, 2, 3]))
    assert tool.read_fashion(tmp_path).splits['train'].labels.tolist() == [2]


@pytest.mark.parametrize(
    ('data', 'file', 'value'),
    [
        (b'', 'images-idx3', 3),
        (b'\x89PNG' + bytes(100), 'images-idx3', 3),
        (idx_bytes(np.zeros(6)), 'images-idx3', 3),
        (idx_bytes(np.zeros((6, 28, 28)))[:-1], 'images-idx3', 4703),
        (idx_bytes(np.zeros((6, 8, 8))), 'images-idx3', (8, 8)),
        (idx_bytes(np.zeros((5, 28, 28))), 'labels-idx1', 6),
        (idx_bytes(np.zeros((6, 28, 28))), 'images-idx3', 'blank'),
    ],
)
def test_broken_idx_files(tool, tmp_path, data, file, value):
    write_fashion(tmp_path)
    (tmp_path / 'train-images-idx3-ubyte').write_bytes(data)
    with raises(ValueError, f'{tmp_path}/train-{file}-ubyte', value):
        tool.read_fashion(tmp_path)


def test_broken_zipped_files_and_labels(tool, tmp_path):
    write_fashion(tmp_path, zipped=True)
    path = tmp_path / 't10k-images-idx3-ubyte.gz'
    whole = path.read_bytes()
    for data in (whole[:-12], b'no gzip', whole[:20] + b'\xff' * 8 + whole[28:]):
        path.write_bytes(data)
        with raises(ValueError, str(path)):
            tool.read_fashion(tmp_path)
    path.write_bytes(whole)
    write_fashion(tmp_path, zipped=True, train_labels=np.full(6, 10))
    with raises(ValueError, 'train-labels-idx1-ubyte.gz', 10):
        tool.read_fashion(tmp_path)


# --------------------------------------------------------------------------------------------------------------- errors


BAD = ['--size 31 64', '--train 0', '--val -1', '--objects 5 4', '--objects 0 4', '--objects 1 255']
BAD += ['--scale 2 1', '--scale 0 1', '--scale 1 nan', '--scale 1 inf', '--seed -1', '--source absent']


@pytest.mark.parametrize('argv', BAD)
def test_bad_arguments(tool, tmp_path, monkeypatch, capsys, argv):
    monkeypatch.chdir(tmp_path)
    message = refusal(tool, capsys, 'out', *argv.split())
    assert message.startswith(f'{argv.split()[0]} must be ')
    assert ', got ' in message
    assert list(tmp_path.iterdir()) == []


def test_source_without_its_files(tool, tmp_path, capsys):
    folder = write_fashion(tmp_path / 'files')
    names = 'train-labels-idx1-ubyte', 't10k-images-idx3-ubyte'
    for name in names:
        (folder / name).unlink()
    message = refusal(tool, capsys, tmp_path / 'out', '--source', folder)
    assert all(name in message for name in (str(folder), *names))
    assert [path.name for path in tmp_path.iterdir()] == ['files']


def test_existing_files_are_kept(tool, tmp_path, capsys):
    """The target may be an empty folder, not a full one or a file."""
    out, source = tmp_path / 'out', write_fashion(tmp_path / 'files')
    out.mkdir()
    tool.main([str(out), '--source', str(source), *SMALL])
    before = content(out)
    assert str(out) in refusal(tool, capsys, out, '--source', source, *SMALL, '--seed', '1')
    assert content(out) == before
    (tmp_path / 'file').write_text('kept')
    for target in (tmp_path / 'file', tmp_path / 'file' / 'out'):
        assert str(tmp_path / 'file') in refusal(tool, capsys, target, '--source', source)
    assert (tmp_path / 'file').read_text() == 'kept'


@pytest.mark.parametrize('error', [KeyboardInterrupt(), OSError('disk full')])
def test_an_interrupted_run_leaves_nothing(tool, tmp_path, monkeypatch, error):
    def stop(folder):
        assert (folder / 'annotations/instances_val.json').is_file()
        raise error

    source = write_fashion(tmp_path / 'files')
    monkeypatch.setattr(tool, 'draw_samples', stop)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        tool.main([str(tmp_path / 'out'), '--source', str(source), *SMALL])
    assert [path.name for path in tmp_path.iterdir()] == ['files']
