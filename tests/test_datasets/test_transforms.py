"""Image loading: equal to MMCV on whole files, an error with the name on damaged ones."""

import io
import struct

import mmcv
import numpy as np
import pytest
from mmengine.registry import TRANSFORMS
from PIL import Image
from torch.utils.data import DataLoader

from mmkron.datasets.transforms import LoadImageFromFile
from support.errors import raises


def encode(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope='module')
def jpeg():
    return encode('JPEG')


def save(path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def test_smoke_built_by_prefix():
    transform = TRANSFORMS.build({'type': 'mmkron.LoadImageFromFile', 'color_type': 'grayscale'})
    assert type(transform) is LoadImageFromFile
    assert transform.color_type == 'grayscale'


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'BMP', 'WEBP', 'GIF'])
def test_feature_same_as_mmcv(tmp_path, kind):
    path = save(tmp_path / f'image.{kind}', encode(kind))
    ours, theirs = LoadImageFromFile(), mmcv.transforms.LoadImageFromFile()
    if kind == 'GIF':  # OpenCV does not read it on every platform
        ours.imdecode_backend = theirs.imdecode_backend = 'pillow'
    result, expected = ours.transform({'img_path': path, 'label': 3}), theirs.transform({'img_path': path, 'label': 3})
    assert result.keys() == expected.keys()
    np.testing.assert_array_equal(result['img'], expected['img'])
    assert result['img'].dtype == np.uint8
    assert result['img_shape'] == result['ori_shape'] == (48, 64)


def test_feature_float32_grayscale(tmp_path, jpeg):
    result = LoadImageFromFile(to_float32=True, color_type='grayscale').transform(
        {'img_path': save(tmp_path / 'a.jpg', jpeg)}
    )
    assert result['img'].dtype == np.float32
    assert result['img'].shape == (48, 64)


@pytest.mark.parametrize('tail', [b'', b'\0' * 512, b'trailing bytes'])
def test_feature_complete_file_with_a_tail_loads(tmp_path, jpeg, tail):
    result = LoadImageFromFile().transform({'img_path': save(tmp_path / 'a.jpg', jpeg + tail)})
    np.testing.assert_array_equal(result['img'], mmcv.imfrombytes(jpeg))


def test_feature_no_second_decode_of_complete_files(tmp_path, jpeg, monkeypatch):
    monkeypatch.setattr(Image, 'open', lambda *args: pytest.fail('decoded twice'))
    assert LoadImageFromFile().transform({'img_path': save(tmp_path / 'a.jpg', jpeg)})['img'].shape == (48, 64, 3)


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP'])
@pytest.mark.parametrize('fraction', [0.3, 0.6, 0.95])
def test_exception_truncated(tmp_path, kind, fraction):
    data = encode(kind)
    path = save(tmp_path / f'cut off.{kind}', data[: int(len(data) * fraction)])
    with pytest.raises(ValueError, match='cannot be decoded') as error:
        LoadImageFromFile().transform({'img_path': path})
    assert path in str(error.value)


@pytest.mark.parametrize('zeros', [0, 1000])
def test_exception_truncated_even_if_the_decoder_is_content(tmp_path, jpeg, monkeypatch, zeros):
    # OpenCV 4 returns an image with grey where the rest was.
    monkeypatch.setattr(mmcv, 'imfrombytes', lambda *args, **kwargs: np.zeros((48, 64, 3), np.uint8))
    path = save(tmp_path / 'a.jpg', jpeg[: len(jpeg) // 2] + b'\0' * zeros)
    with pytest.raises(ValueError, match=r'a\.jpg.*truncated'):
        LoadImageFromFile().transform({'img_path': path})


@pytest.mark.parametrize('kind', ['JPEG', 'BMP', 'TIFF', 'WEBP'])
def test_feature_no_limit_that_mmcv_has_not(tmp_path, kind, monkeypatch):
    """Pillow refuses images of more than twice its limit, 179 megapixels, which here is less than these have."""
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 48 * 64 // 2 - 1)
    data = encode(kind) + b'a tail, so that a JPEG is looked at, too'
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(data))
    path = save(tmp_path / 'large', data)
    np.testing.assert_array_equal(LoadImageFromFile().transform({'img_path': path})['img'], mmcv.imfrombytes(data))
    assert Image.MAX_IMAGE_PIXELS == 48 * 64 // 2 - 1
    with raises(ValueError, path):
        LoadImageFromFile().transform({'img_path': save(tmp_path / 'large', data[:1500])})
    assert Image.MAX_IMAGE_PIXELS == 48 * 64 // 2 - 1


def test_feature_variant_that_pillow_does_not_know(tmp_path):
    """A bitmap of 32 bits per pixel that has red in its lowest byte, blue in the next one, then green."""
    masks = (0x0000FF, 0xFF0000, 0x00FF00, 0)
    info = struct.pack('<IiiHHIIiiII4I', 56, 2, 2, 1, 32, 3, 16, 0, 0, 0, 0, *masks)
    rows = struct.pack('<4I', 1, 2, 0x030405, 9)  # the lowest row first
    data = struct.pack('<2sIHHI', b'BM', 14 + 56 + 16, 0, 0, 70) + info + rows
    with pytest.raises(OSError, match='Unsupported BMP'):
        Image.open(io.BytesIO(data))
    img = LoadImageFromFile().transform({'img_path': save(tmp_path / 'a.bmp', data)})['img']
    np.testing.assert_array_equal(img, [[[4, 3, 5], [0, 0, 9]], [[0, 0, 1], [0, 0, 2]]])


@pytest.mark.parametrize(('data', 'reason'), [(b'', 'the file is empty'), (b'not an image', 'no image data')])
def test_exception_no_image(tmp_path, data, reason):
    path = save(tmp_path / 'a.jpg', data)
    with pytest.raises(ValueError, match=reason) as error:
        LoadImageFromFile().transform({'img_path': path})
    assert path in str(error.value)


def test_exception_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'nowhere\.jpg'):
        LoadImageFromFile().transform({'img_path': str(tmp_path / 'nowhere.jpg')})


def test_ignore_empty(tmp_path, jpeg):
    transform = LoadImageFromFile(ignore_empty=True)
    assert transform.transform({'img_path': str(tmp_path / 'nowhere.jpg')}) is None
    assert transform.transform({'img_path': save(tmp_path / 'a.jpg', jpeg[:-100])}) is None
    assert transform.transform({'img_path': save(tmp_path / 'a.jpg', jpeg)}) is not None


class Files:
    def __init__(self, paths):
        self.paths, self.load = paths, LoadImageFromFile()

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.load({'img_path': self.paths[index]})['img']


def test_exception_through_workers(tmp_path, jpeg):
    paths = [save(tmp_path / 'good.jpg', jpeg), save(tmp_path / 'bad.jpg', jpeg[:-200])]
    loaded = iter(DataLoader(Files(paths), batch_size=1, num_workers=1))
    assert next(loaded).shape == (1, 48, 64, 3)
    with pytest.raises(ValueError, match=r'bad\.jpg.*truncated'):
        next(loaded)
