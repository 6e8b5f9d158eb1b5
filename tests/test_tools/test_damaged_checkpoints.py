"""Files that are not checkpoints, or damaged ones: one message for every error of the reader."""

import io
import json
import os
import pickle
import random
import struct
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.logging import HistoryBuffer

from mmkron.engine import checkpoints
from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import UnreadableError, read_whole
from support.errors import raises
from support.tools import Touch, load_tool


def content():
    """Return a small checkpoint as MMEngine saves it."""
    history = HistoryBuffer()
    history.update(0.5)
    generator = torch.Generator().manual_seed(0)
    return dict(
        meta=dict(epoch=1, iter=4, seed=0, best=np.float64(0.5)),
        state_dict={f'backbone.{i}.weight': torch.randn(8, 8, generator=generator) for i in range(3)},
        message_hub=dict(log_scalars=dict(loss=history), runtime_info={}, resumed_keys={}),
        optimizer=dict(state={0: dict(momentum_buffer=torch.ones(8, 8))}, param_groups=[dict(lr=0.1, params=[0])]),
    )


def saved(legacy=False):
    buffer = io.BytesIO()
    torch.save(content(), buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def tar():
    """Return a file in the format of PyTorch 0.1."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as archive:
        for name in ('storages', 'tensors', 'pickle'):
            archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


def zipped(data, entries):
    """Return the archive with some entries replaced and correct checksums."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, 'w') as new:
        for name in old.namelist():
            new.writestr(name, entries.get(name.split('/')[-1], old.read(name)))
    return buffer.getvalue()


def nested(depth):
    return b'\x80\x02' + b']' * depth + b'a' * (depth - 1) + b'.'


MAGIC = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, dict(little_endian=True))]
FILES = {
    'empty': b'',
    'one byte': b'\x80',
    'junk of 4 bytes': b'\xde\xad\xbe\xef',
    'other junk': b'J\x01\x02',
    'zeros': bytes(4096),
    'html': b'<!DOCTYPE html><html><body>404 Not Found</body></html>',
    'json': json.dumps(dict(state_dict={})).encode(),
    'pointer of Git LFS': b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n',
    'tar': tar(),
    'zip of something else': zipped(saved(), dict(version=b'x')),
    'start of a zip': b'PK\x03\x04',
    'empty zip': b'PK\x05\x06' + bytes(18),
    'half': saved()[: len(saved()) // 2],
    'half of the older format': saved(legacy=True)[:-60],
    'deep': nested(100_000),
    'no pickle in a zip': zipped(saved(), {'data.pkl': b''}),
    'string of 2 GB': b'\x80\x02X\xff\xff\xff\x7fabc',
    'string of 2 GB in a zip': zipped(saved(), {'data.pkl': b'\x80\x02X\xff\xff\xff\x7fabc'}),
    'reference to nothing': b'\x80\x02h\x07.',
    'stack that is empty': b'\x80\x02.',
    'no dict': zipped(saved(), {'data.pkl': b'\x80\x02}(K\x01K\x02K\x03u.'}),
    'storage that is missing': zipped(saved(), {'data.pkl': b'\x80\x02(X\x07\x00\x00\x00storageX\x01\x00\x00\x00aQ.'}),
    'storage of the older format': b''.join(MAGIC)
    + pickle.dumps({}, 2)
    + pickle.dumps(['9'], 2)
    + struct.pack('<q', 1 << 60),
}


@pytest.mark.parametrize('name', FILES)
def test_one_message(name, tmp_path):
    path = tmp_path / 'a.pth'
    path.write_bytes(FILES[name])
    with raises(UnreadableError, 'checkpoint', path) as info:
        read_whole(path, 'checkpoint')
    assert 'weights_only' not in str(info.value)  # no advice to turn the check off
    assert len(str(info.value)) < 600


def test_resume_takes_the_one_before(tmp_path, monkeypatch):
    """Also if a part of a checkpoint has another type than MMEngine writes."""
    files = dict(FILES)
    for name, change in {
        'meta': dict(meta=None),
        'epoch': dict(meta=dict(epoch='1', iter=4)),
        'weights': dict(state_dict=[1]),
        'hub': dict(message_hub=None),
    }.items():
        buffer = io.BytesIO()
        torch.save({**content(), **change}, buffer)
        files[name] = buffer.getvalue()
    (tmp_path / 'whole.pth').write_bytes(saved())
    for i, data in enumerate(files.values()):
        (tmp_path / f'epoch_{i}.pth').write_bytes(data)
        os.utime(tmp_path / f'epoch_{i}.pth', (2e9 + i, 2e9 + i))
    cfg = Config(dict(work_dir=str(tmp_path), resume=True, load_from=None))
    log = []
    monkeypatch.setattr(checkpoints, 'print_log', lambda text, **_: log.append(text))
    found = checkpoints.check_checkpoints(cfg)
    assert cfg.load_from == str(tmp_path / 'whole.pth')
    assert found['meta']['iter'] == 4
    assert all(str(tmp_path / f'epoch_{i}.pth') in ''.join(log) for i in range(len(files)))
    for i in range(len(FILES), len(files)):
        with raises(LaunchError, '--resume', tmp_path / f'epoch_{i}.pth'):
            checkpoints.check_checkpoints(Config(dict(cfg.to_dict(), load_from=str(tmp_path / f'epoch_{i}.pth'))))


@pytest.mark.parametrize('legacy', [False, True], ids=['archive', 'older format'])
def test_flipped_bits(legacy, tmp_path):
    """Archives have checksums, so that damage is found. The format before PyTorch 1.6 has none."""
    data, path, numbers = saved(legacy), tmp_path / 'a.pth', random.Random(0)
    loaded = 0
    for _ in range(300):
        position = numbers.randrange(8 * len(data))
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        path.write_bytes(changed)
        try:
            found = read_whole(path, 'checkpoint')
        except LaunchError:
            continue
        loaded += 1
        if not legacy:
            expected = content()
            for part in (found, expected):  # without __eq__
                part['message_hub'].pop('log_scalars')
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert loaded < 300


def test_archive_without_checksums(tmp_path):
    """PyTorch can omit the checksums to save time."""
    if not hasattr(torch.serialization, 'set_crc32_options'):
        pytest.skip('this PyTorch always writes checksums')
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(dict(a=torch.arange(5.0), b=torch.ones(3)), tmp_path / 'a.pth')
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_whole(tmp_path / 'a.pth', 'checkpoint')['a'].tolist() == [0, 1, 2, 3, 4]


def test_random_bytes(tmp_path):
    numbers = random.Random(1)
    for i in range(300):
        path = tmp_path / 'a.pth'
        path.write_bytes((b'\x80\x02' if i % 2 else b'') + numbers.randbytes(numbers.randrange(1, 64)))
        with pytest.raises(LaunchError):
            read_whole(path, 'checkpoint')


def test_converters_and_publish(tmp_path):
    for data in FILES.values():
        path = tmp_path / 'a.pth'
        path.write_bytes(data)
        with raises(UnreadableError, 'SRC', path):
            load_tool('model_converters/common').read_weights(path)
    path.write_bytes(zipped(saved(), {'data.pkl': nested(100_000)}))
    with raises(LaunchError, 'SRC', path):
        load_tool('model_converters/common').read_weights(path)
    for part in (dict(meta=None), dict(state_dict=None)):
        torch.save({**content(), **part}, path)
        with raises(LaunchError, 'SRC', path):
            load_tool('model_converters/publish_model').publish(path, tmp_path / 'b.pth')


def test_safetensors(tmp_path):
    pytest.importorskip('safetensors')
    for data in (b'', b'\xff' * 8, bytes(4096), b'<html></html>', struct.pack('<Q', 2) + b'[]'):
        path = tmp_path / 'a.safetensors'
        path.write_bytes(data)
        with raises(LaunchError, 'SRC', path):
            load_tool('model_converters/common').read_weights(path)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_downloads_are_not_unpickled(tmp_path, monkeypatch):
    """torch.hub, with which MMEngine downloads, turns PyTorch's check off."""
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'hub'))
    torch.save(dict(state_dict={}, x=Touch(tmp_path / 'proof')), tmp_path / 'evil.pth')
    torch.save(dict(state_dict={}), tmp_path / 'good.pth')
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f'http://127.0.0.1:{server.server_port}'
        assert read_whole(f'{url}/good.pth', 'checkpoint') == dict(state_dict={})
        with raises(UnreadableError, 'checkpoint', f'{url}/evil.pth'):
            read_whole(f'{url}/evil.pth', 'checkpoint')
        with raises(UnreadableError, 'checkpoint', f'{url}/gone.pth'):
            read_whole(f'{url}/gone.pth', 'checkpoint')
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert not (tmp_path / 'proof').exists()
