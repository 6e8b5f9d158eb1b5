"""Which checkpoint a training resumes from, and what is said about those that do not serve."""

import os
import re

import pytest
import torch
from mmengine.config import Config

from mmkron.engine import checkpoints
from mmkron.engine.runner import LaunchError


@pytest.fixture
def folder(tmp_path):
    """A work dir to which checkpoints of ages (in seconds) are added, and its config."""

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


def test_the_named_checkpoint_is_taken(folder, capsys):
    first = folder.add('epoch_1.pth', 4, age=9)
    second = folder.add('epoch_2.pth', 8, age=5)
    folder.add('best_accuracy_epoch_2.pth', 8, age=1)
    folder.last(second)
    assert folder.pick() == second
    assert capsys.readouterr().out == f'--resume continues from {second}\n'
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


def test_damaged_ones_are_named_and_passed_over(folder, capsys):
    whole = folder.add('epoch_1.pth', 4, age=9)
    cut = folder.add('epoch_2.pth', 8, age=5, cut=True)
    other = folder.add('weights.pth', 8, age=4)
    torch.save({'state_dict': {}}, other)
    folder.last(cut)
    assert folder.pick() == whole
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf'--resume skips checkpoint {cut} is damaged or cut off: .+', lines[0])
    assert re.fullmatch(rf'--resume skips checkpoint {other} has no message_hub, meta', lines[1])
    assert lines[2] == f'--resume continues from {whole}'
    folder.last('gone.pth')
    assert folder.pick() == whole
    assert '--resume skips gone.pth, which last_checkpoint names: there is no such file' in capsys.readouterr().out


def test_no_checkpoint_and_none_that_is_whole(folder, capsys):
    assert folder.pick() is None
    assert 'no checkpoint in ' in capsys.readouterr().out
    folder.add('epoch_1.pth', 4, age=9, cut=True)
    with pytest.raises(LaunchError, match='none of the 1 checkpoints in .*work loads whole; remove them to start'):
        folder.pick()


def test_checkpoints_in_the_hooks_own_folder(folder, tmp_path):
    folder.cfg.default_hooks = dict(checkpoint=dict(out_dir=str(tmp_path / 'big')))
    path = folder.add('../big/work/epoch_1.pth', 4, age=9)
    assert os.path.samefile(folder.pick(), path)


def test_given_path_that_does_not_serve(folder, tmp_path):
    cut = folder.add('cut.pth', 4, age=9, cut=True)
    (tmp_path / 'empty.pth').touch()
    torch.save({'state_dict': {}, 'meta': {}}, tmp_path / 'published.pth')
    for path, message in (
        (cut, 'is damaged or cut off: '),
        (tmp_path / 'empty.pth', 'is damaged or cut off: '),
        (tmp_path / 'published.pth', 'it has no message_hub to resume from; to start from its'),
        (tmp_path / 'gone.pth', r'.*is not a file'),
    ):
        with pytest.raises(LaunchError, match=f'--resume {path}.*{message}|--resume is not a file: .*gone'):
            checkpoints.check_checkpoints(Config(dict(folder.cfg.to_dict(), load_from=str(path))))
    with pytest.raises(LaunchError, match=f'load_from {cut} is damaged or cut off'):
        checkpoints.check_checkpoints(Config(dict(load_from=cut)))
    without = folder.add('without.pth', 4, age=9)
    content = checkpoints.read_whole(without, '')
    content.pop('optimizer')
    torch.save(content, without)
    cfg = Config(dict(folder.cfg.to_dict(), load_from=without))
    checkpoints.check_checkpoints(cfg)
    assert (cfg.load_from, cfg.resume) == (without, True)


def test_what_starts_anew_is_said(folder, capsys):
    def said(path=None):
        cfg = Config(dict(folder.cfg.to_dict(), load_from=path))
        checkpoints.check_checkpoints(cfg)
        return [line for line in capsys.readouterr().out.splitlines() if 'has no' in line]

    whole = folder.add('epoch_1.pth', 4, age=9, param_schedulers=[])
    assert said() == said(whole) == []
    path = folder.add('epoch_2.pth', 8, age=5)
    content = checkpoints.read_whole(path, '')
    content.pop('optimizer')
    torch.save(content, path)
    for found in (said(path), said()):
        assert found == [f'--resume {path}: it has no state of the optimizer, which starts from scratch']
