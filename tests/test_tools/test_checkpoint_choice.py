"""Which checkpoint a training resumes from, and which ones it skips."""

import os

import pytest
import torch
from mmengine.config import Config

from mmkron.engine import checkpoints
from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import UnreadableError, read_whole
from support.errors import raises


@pytest.fixture
def log(monkeypatch):
    """Return the list of logged messages."""
    found = []
    monkeypatch.setattr(checkpoints, 'print_log', lambda text, **_: found.append(text))
    return found


@pytest.fixture
def folder(tmp_path, log):
    """Return a work dir to which checkpoints of given ages in seconds can be added, with its config."""

    class Folder:
        cfg = Config(dict(work_dir=str(tmp_path / 'work'), resume=True, load_from=None))

        def add(self, name, iteration, age, cut=False, **changes):
            path = tmp_path / 'work' / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = dict(meta=dict(iter=iteration, epoch=0), state_dict={}, message_hub={}, optimizer={})
            torch.save({**content, **changes}, path)
            if cut:
                path.write_bytes(path.read_bytes()[:-40])
            os.utime(path, (1e9 - age, 1e9 - age))
            return str(path)

        def last(self, text):
            (tmp_path / 'work' / 'last_checkpoint').write_text(text)

        def pick(self):
            cfg = Config(self.cfg.to_dict())
            checkpoints.check_checkpoints(cfg)
            assert cfg.resume is (cfg.load_from is not None)
            return cfg.load_from

    return Folder()


def test_the_named_checkpoint_is_taken(folder, log):
    first = folder.add('epoch_1.pth', 4, age=9)
    second = folder.add('epoch_2.pth', 8, age=5)
    folder.add('best_accuracy_epoch_2.pth', 8, age=1)
    folder.last(second)
    assert folder.pick() == second
    assert second in log[-1]
    folder.last(first)  # a user goes back
    assert folder.pick() == first
    folder.last('/elsewhere/before/epoch_1.pth')  # the folder has moved
    assert folder.pick() == first


def test_stale_checkpoint_of_an_earlier_training(folder):
    folder.add('epoch_300.pth', 1200, age=999)
    new = folder.add('epoch_2.pth', 8, age=1)
    for text in (new, ''):
        folder.last(text)
        assert folder.pick() == new


def test_damaged_ones_are_named_and_skipped(folder, log):
    whole = folder.add('epoch_1.pth', 4, age=9)
    cut = folder.add('epoch_2.pth', 8, age=5, cut=True)
    other = folder.add('weights.pth', 8, age=4)
    torch.save({'state_dict': {}}, other)
    folder.last(cut)
    assert folder.pick() == whole
    assert [name for line in log for name in (cut, other, whole) if name in line] == [cut, other, whole]
    folder.last('gone.pth')
    os.symlink('gone.pth', f'{folder.cfg.work_dir}/latest.pth')
    assert folder.pick() == whole
    assert any('gone.pth' in line for line in log)


def test_no_checkpoint_and_none_that_can_be_read(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs(folder.cfg.work_dir, exist_ok=True)
    folder.add('../epoch_9.pth', 9, age=1)  # in the working directory, which is not the work dir
    assert folder.pick() is None
    folder.last('gone.pth')
    assert folder.pick() is None
    folder.add('epoch_1.pth', 4, age=9, cut=True)
    with raises(LaunchError, '--resume', folder.cfg.work_dir):
        folder.pick()


def test_checkpoints_in_the_hooks_own_folder(folder, tmp_path):
    path, cut = folder.add('../big/work/epoch_1.pth', 4, age=9), folder.add('../big/work/epoch_2.pth', 4, 5, cut=True)
    os.makedirs(folder.cfg.work_dir, exist_ok=True)
    folder.last(cut)
    assert os.path.samefile(folder.pick(), path)
    folder.cfg.default_hooks = dict(checkpoint=dict(out_dir=str(tmp_path / 'big')))
    for text in ('', '/gone/epoch_1.pth', '\0' * 8):
        folder.last(text)
        assert os.path.samefile(folder.pick(), path)


def test_given_path_that_cannot_be_resumed(folder, tmp_path):
    cut = folder.add('cut.pth', 4, age=9, cut=True)
    (tmp_path / 'empty.pth').touch()
    torch.save({'state_dict': {}, 'meta': {}}, tmp_path / 'published.pth')
    for path in (cut, tmp_path / 'empty.pth', tmp_path / 'published.pth', tmp_path / 'gone.pth'):
        with pytest.raises(LaunchError, match=f'--resume .*{path}'):
            checkpoints.check_checkpoints(Config(dict(folder.cfg.to_dict(), load_from=str(path))))
    with raises(UnreadableError, 'load_from', cut):
        checkpoints.check_checkpoints(Config(dict(load_from=cut)))


def test_missing_state_of_the_optimizer_is_said(folder, log):
    def warned(path=None):
        cfg = Config(dict(folder.cfg.to_dict(), load_from=path))
        log.clear()
        checkpoints.check_checkpoints(cfg)
        assert cfg.resume
        return any('optimizer' in line for line in log)

    whole = folder.add('epoch_1.pth', 4, age=9, param_schedulers=[])
    assert not warned()
    assert not warned(whole)
    path = folder.add('epoch_2.pth', 8, age=5)
    content = read_whole(path, '')
    content.pop('optimizer')
    torch.save(content, path)
    assert warned(path)
    assert warned()
