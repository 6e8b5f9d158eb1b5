"""Where the composed scenes get their images from, and what is refused."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

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
    """Fashion-MNIST's four files with disks: training images are of class 3, test images of class 7."""
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
        path = folder / f'{part}-{kind}-idx{array.ndim}-ubyte'
        if zipped:
            path.with_name(f'{path.name}.gz').write_bytes(gzip.compress(idx_bytes(array)))
        else:
            path.write_bytes(idx_bytes(array))
    return folder


# -------------------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize('zipped', [False, True])
def test_idx_files_and_their_split(tool, tmp_path, capsys, zipped):
    folder = write_fashion(tmp_path / 'files', zipped)
    source = tool.read_source(str(folder))
    np.testing.assert_array_equal(source.splits['train'].images, np.stack([disk(10)] * 6))
    np.testing.assert_array_equal(source.splits['val'].images, np.stack([disk(8)] * 4))
    names = 't-shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle-boot'
    assert ', '.join(source.classes) == names

    tool.main([str(tmp_path / 'out'), '--source', str(folder), *SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5] == f'Fashion-MNIST in {folder}: 10 classes, {names}'
    for split, category, scenes, line in (('train', 4, 2, lines[-4]), ('val', 8, 1, lines[-3])):
        coco = json.loads((tmp_path / f'out/annotations/instances_{split}.json').read_text())
        assert {annotation['category_id'] for annotation in coco['annotations']} == {category}
        assert line.split(maxsplit=1) == [split, f'{scenes} scenes with {len(coco["annotations"])} objects']
    assert lines[-1] == f'picture  {tmp_path / "out" / "samples.png"}'


def test_plain_files_go_before_zipped_ones(tool, tmp_path):
    write_fashion(tmp_path, zipped=True, train_labels=np.full(6, 5))
    assert set(tool.read_fashion(tmp_path).splits['train'].labels) == {5}
    write_fashion(tmp_path)
    assert set(tool.read_fashion(tmp_path).splits['train'].labels) == {3}


def test_auto_takes_the_first_whole_source(tool, tmp_path, monkeypatch, capsys):
    first, second = tmp_path / 'first', tmp_path / 'second'
    monkeypatch.setattr(tool, 'FASHION_DIRS', (first, second))
    assert tool.read_source('auto').classes == tuple('0123456789')
    (said,) = capsys.readouterr().out.splitlines()
    assert 'dataset-fashion-mnist' in said
    assert 'digits' in said

    write_fashion(second, zipped=True)
    write_fashion(first)
    (first / 't10k-labels-idx1-ubyte').unlink()
    assert tool.read_source('auto').name == f'Fashion-MNIST in {second}'
    write_fashion(first)
    assert tool.read_source('auto').name == f'Fashion-MNIST in {first}'
    assert capsys.readouterr().out == ''


def test_fashion_never_becomes_digits(tool, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, 'FASHION_DIRS', (tmp_path / 'files',))
    assert refusal(tool, capsys, tmp_path / 'out', '--source', 'fashion') == (
        'Fashion-MNIST is not on disk: sudo apt-get install dataset-fashion-mnist, or put its four IDX files, plain or '
        f'.gz, into {tmp_path / "files"}'
    )
    assert list(tmp_path.iterdir()) == []
    write_fashion(tmp_path / 'files')
    assert tool.read_source('fashion').name == f'Fashion-MNIST in {tmp_path / "files"}'


def test_digits_are_split_as_in_the_dataset(tool):
    from mmkron.datasets import Digits

    source = tool.read_digits()
    for split, sprites in source.splits.items():
        samples = Digits(split, lazy_init=True).load_data_list()
        assert sprites.labels.tolist() == [sample['gt_label'] for sample in samples]
        assert sprites.images.shape == (len(samples), 28, 28)
        ink = np.array([sample['img'].mean() for sample in samples])
        assert np.corrcoef(ink, sprites.images.mean((1, 2)))[0, 1] > 0.9
        assert not sprites.solid


def test_blank_images_are_left_out(tool, tmp_path):
    images = np.stack([np.zeros((28, 28)), disk(), np.full((28, 28), 16)])
    write_fashion(tmp_path, train_images=images, train_labels=np.array([1, 2, 3]))
    assert tool.read_fashion(tmp_path).splits['train'].labels.tolist() == [2]


BROKEN = {
    'no idx': (b'\x89PNG' + bytes(100), 'train-images-idx3-ubyte is not an IDX file of unsigned bytes in 3 dimensions'),
    'labels for images': (idx_bytes(np.zeros(6)), 'is not an IDX file of unsigned bytes in 3 dimensions'),
    'empty': (b'', 'is not an IDX file of unsigned bytes in 3 dimensions'),
    'truncated': (
        idx_bytes(np.zeros((6, 28, 28)))[:-1],
        'train-images-idx3-ubyte must hold (6, 28, 28) bytes after its header, got 4703',
    ),
    'other size': (idx_bytes(np.zeros((6, 8, 8))), 'must hold images of 28 x 28 pixels, got (8, 8)'),
    'other count': (
        idx_bytes(np.zeros((5, 28, 28))),
        'train-labels-idx1-ubyte must hold 5 labels, one per image, got 6',
    ),
    'blank': (idx_bytes(np.zeros((6, 28, 28))), 'must hold at least one image that is not blank'),
}


@pytest.mark.parametrize('what', BROKEN)
def test_broken_idx_files(tool, tmp_path, what):
    data, message = BROKEN[what]
    write_fashion(tmp_path)
    (tmp_path / 'train-images-idx3-ubyte').write_bytes(data)
    with pytest.raises(ValueError) as e:  # noqa: PT011
        tool.read_fashion(tmp_path)
    assert message in str(e.value)
    assert str(tmp_path) in str(e.value)


def test_broken_zipped_files_and_labels(tool, tmp_path):
    write_fashion(tmp_path, zipped=True)
    path = tmp_path / 't10k-images-idx3-ubyte.gz'
    whole = path.read_bytes()
    for data in (whole[:-12], b'no gzip', whole[:20] + b'\xff' * 8 + whole[28:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf'{path.name} is not a complete \.gz file: '):
            tool.read_fashion(tmp_path)
    path.write_bytes(whole)
    write_fashion(tmp_path, zipped=True, train_labels=np.full(6, 10))
    with pytest.raises(ValueError, match=r'train-labels-idx1-ubyte\.gz must hold labels from 0 to 9, got 10'):
        tool.read_fashion(tmp_path)


# ------------------------------------------------------------------------------------------------------------- refusals


def refusal(tool, capsys, *argv) -> str:
    """The one message with which the tool ends, as argparse does."""
    with pytest.raises(SystemExit) as e:
        tool.main([str(arg) for arg in argv])
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert err.count('error: ') == 1
    return err.split('error: ')[1].strip()


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        ('--size 31 64', '--size must be two sizes of at least 32, got (31, 64)'),
        ('--size 64 -1', '--size must be two sizes of at least 32, got (64, -1)'),
        ('--train 0', '--train must be at least 1, got 0'),
        ('--val -1', '--val must be at least 1, got -1'),
        ('--objects 5 4', '--objects must be 1 <= MIN <= MAX <= 254, got (5, 4)'),
        ('--objects 0 4', '--objects must be 1 <= MIN <= MAX <= 254, got (0, 4)'),
        ('--objects 1 255', '--objects must be 1 <= MIN <= MAX <= 254, got (1, 255)'),
        ('--scale 2 1', '--scale must be 0.25 <= MIN <= MAX, got (2.0, 1.0)'),
        ('--scale 0 1', '--scale must be 0.25 <= MIN <= MAX, got (0.0, 1.0)'),
        ('--scale 1 nan', '--scale must be 0.25 <= MIN <= MAX, got (1.0, nan)'),
        ('--scale 1 inf', '--scale must be 0.25 <= MIN <= MAX, got (1.0, inf)'),
        ('--seed -1', '--seed must be at least 0, got -1'),
        ('--train many', "argument --train: invalid int value: 'many'"),
        (
            '--source absent',
            "--source must be 'auto', 'fashion', 'digits' or a folder of Fashion-MNIST's files, got 'absent'",
        ),
    ],
)
def test_bad_arguments(tool, tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert refusal(tool, capsys, 'out', *argv.split()) == message
    assert list(tmp_path.iterdir()) == []


def test_source_without_its_files(tool, tmp_path, capsys):
    folder = write_fashion(tmp_path / 'files')
    for name in ('train-labels-idx1-ubyte', 't10k-images-idx3-ubyte'):
        (folder / name).unlink()
    message = refusal(tool, capsys, tmp_path / 'out', '--source', folder)
    assert message == f'--source {folder} has no train-labels-idx1-ubyte, t10k-images-idx3-ubyte (plain or .gz)'
    assert [path.name for path in tmp_path.iterdir()] == ['files']


def test_an_existing_folder_is_refused_unless_empty(tool, tmp_path, capsys):
    out, source = tmp_path / 'out', write_fashion(tmp_path / 'files')
    out.mkdir()
    tool.main([str(out), '--source', str(source), *SMALL])
    before = content(out)
    assert len(before) == 3 * 3 + 8
    capsys.readouterr()
    message = refusal(tool, capsys, out, '--source', source, *SMALL, '--seed', '1')
    assert f'OUT must be a new or empty folder, got {out}' in message
    assert content(out) == before

    (tmp_path / 'file').write_text('kept')
    assert refusal(tool, capsys, tmp_path / 'file').startswith('OUT must be a new or empty folder, got ')
    assert 'file' in refusal(tool, capsys, tmp_path / 'file' / 'out', '--source', source)
    assert (tmp_path / 'file').read_text() == 'kept'


@pytest.mark.parametrize('error', [KeyboardInterrupt, OSError('disk full')])
def test_an_interrupted_run_leaves_nothing(tool, tmp_path, monkeypatch, capsys, error):
    source = write_fashion(tmp_path / 'files')

    def stop(folder):
        assert (folder / 'annotations/instances_val.json').is_file()
        raise error

    monkeypatch.setattr(tool, 'draw_samples', stop)
    argv = [str(tmp_path / 'out'), '--source', str(source), *SMALL]
    if isinstance(error, OSError):
        assert refusal(tool, capsys, *argv) == 'disk full'
    else:
        with pytest.raises(KeyboardInterrupt):
            tool.main(argv)
    assert [path.name for path in tmp_path.iterdir()] == ['files']
