"""Image loading: results equal to MMCV's for whole files, and an error that names a damaged one."""

import io
import struct

import mmcv
import numpy as np
import pytest
from mmengine.registry import TRANSFORMS
from PIL import Image

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


@pytest.mark.parametrize('tail', [b'', b'\0' * 512, b'trailing bytes'])
def test_feature_complete_file_with_a_tail_loads(tmp_path, jpeg, tail, monkeypatch):
    if not tail:
        monkeypatch.setattr(Image, 'open', lambda *args: pytest.fail('decoded twice'))
    result = LoadImageFromFile().transform({'img_path': save(tmp_path / 'a.jpg', jpeg + tail)})
    np.testing.assert_array_equal(result['img'], mmcv.imfrombytes(jpeg))


def test_feature_float32_grayscale(tmp_path, jpeg):
    transform = TRANSFORMS.build(dict(type='mmkron.LoadImageFromFile', to_float32=True, color_type='grayscale'))
    result = transform({'img_path': save(tmp_path / 'a.jpg', jpeg)})
    assert result['img'].dtype == np.float32
    assert result['img'].shape == (48, 64)


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP'])
@pytest.mark.parametrize('fraction', [0, 0.3, 0.95])
def test_exception_truncated(tmp_path, kind, fraction):
    data = encode(kind)
    path = save(tmp_path / f'truncated.{kind}', data[: int(len(data) * fraction)])
    with raises(ValueError, path):
        LoadImageFromFile().transform({'img_path': path})


@pytest.mark.parametrize('zeros', [0, 1000])
def test_exception_truncated_for_a_lenient_decoder(tmp_path, jpeg, monkeypatch, zeros):
    # OpenCV 4 returns an image whose missing part is gray.
    monkeypatch.setattr(mmcv, 'imfrombytes', lambda *args, **kwargs: np.zeros((48, 64, 3), np.uint8))
    path = save(tmp_path / 'a.jpg', jpeg[: len(jpeg) // 2] + b'\0' * zeros)
    with raises(ValueError, path):
        LoadImageFromFile().transform({'img_path': path})


@pytest.mark.parametrize('kind', ['JPEG', 'TIFF'])
def test_feature_no_limit_of_pixels(tmp_path, kind, monkeypatch):
    """Pillow refuses images of more than twice its limit, which is lowered here; MMCV has no limit."""
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 48 * 64 // 2 - 1)
    data = encode(kind) + b'a tail, so that a JPEG is checked, too'
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(data))
    path = save(tmp_path / 'large', data)
    np.testing.assert_array_equal(LoadImageFromFile().transform({'img_path': path})['img'], mmcv.imfrombytes(data))
    assert Image.MAX_IMAGE_PIXELS == 48 * 64 // 2 - 1
    with raises(ValueError, path):
        LoadImageFromFile().transform({'img_path': save(tmp_path / 'large', data[:1500])})
    assert Image.MAX_IMAGE_PIXELS == 48 * 64 // 2 - 1


def test_feature_variant_unknown_to_pillow(tmp_path):
    """The bitmap has 32 bits per pixel, with red in the lowest byte, then blue, then green."""
    masks = (0x0000FF, 0xFF0000, 0x00FF00, 0)
    info = struct.pack('<IiiHHIIiiII4I', 56, 2, 2, 1, 32, 3, 16, 0, 0, 0, 0, *masks)
    rows = struct.pack('<4I', 1, 2, 0x030405, 9)  # the lowest row first
    data = struct.pack('<2sIHHI', b'BM', 14 + 56 + 16, 0, 0, 70) + info + rows
    with pytest.raises(OSError, match='Unsupported BMP'):
        Image.open(io.BytesIO(data))
    img = LoadImageFromFile().transform({'img_path': save(tmp_path / 'a.bmp', data)})['img']
    np.testing.assert_array_equal(img, [[[4, 3, 5], [0, 0, 9]], [[0, 0, 1], [0, 0, 2]]])


def test_exception_no_image(tmp_path, jpeg):
    """The option to ignore empty files covers missing and damaged ones."""
    for path, error in (('nowhere.jpg', FileNotFoundError), ('text.jpg', ValueError), ('cut.jpg', ValueError)):
        path = str(tmp_path / path)
        if 'nowhere' not in path:
            save(tmp_path / path, b'not an image' if 'text' in path else jpeg[:-100])
        with raises(error, path):
            LoadImageFromFile().transform({'img_path': path})
        assert LoadImageFromFile(ignore_empty=True).transform({'img_path': path}) is None
    whole = {'img_path': save(tmp_path / 'a.jpg', jpeg)}
    assert LoadImageFromFile(ignore_empty=True).transform(whole) is not None
