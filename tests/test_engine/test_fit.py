"""Checkpoints that fit a model in part: refused, or logged with the right counts."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.model import BaseModel, BaseModule, BaseTTAModel, MMDistributedDataParallel
from torch import nn

from mmkron.utils import fit
from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import UnreadableError, read_whole
from support.errors import raises
from support.tools import load_tool, run_training

tool = load_tool('test')


class Backbone(BaseModule):
    """A backbone of 5 counted tensors: a convolution without bias, and a batch norm."""

    def __init__(self, channels=4, init_cfg=None):
        super().__init__(init_cfg)
        self.conv, self.norm = nn.Conv2d(3, channels, 1, bias=False), nn.BatchNorm2d(channels)


class Model(BaseModel):
    """A model with 2 more tensors in its head, whose buffer is not saved."""

    def __init__(self, classes=5, channels=4, init_cfg=None):
        super().__init__(init_cfg=init_cfg)
        self.backbone, self.head = Backbone(channels), nn.Linear(channels, classes)
        self.head.register_buffer('scale', torch.ones(1), persistent=False)

    def forward(self, inputs, data_samples=None, mode='loss'):
        return dict(loss=self.head(self.backbone.norm(self.backbone.conv(inputs)).mean((2, 3))).sum())


class Augmented(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        return data_samples_list


class Renamed(Model):
    """A model that reads checkpoints of its earlier version, and resizes a map."""

    def __init__(self):
        super().__init__()
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state_dict, prefix, *_):
        state_dict['head.weight'] = state_dict.pop('classifier')[:5]


@pytest.fixture
def lines(monkeypatch):
    found = []
    logger = SimpleNamespace(log=lambda level, text, extra: found.append(text))
    monkeypatch.setattr(fit, 'MMLogger', SimpleNamespace(get_current_instance=lambda: logger))
    return found


@pytest.fixture
def save(tmp_path):
    def write(state, name='a.pth'):
        torch.save(dict(state_dict=state), tmp_path / name)
        return str(tmp_path / name)

    return write


def check(model, state, whole=True):
    fit.check_fit(model, 'a.pth', dict(state_dict=state), 'checkpoint', whole, hint='--option')


def test_counts(lines):
    torch.manual_seed(0)
    model, other = Model(), Model()
    check(model, other.state_dict())
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
    check(model, dict(Model().state_dict(), extra=torch.ones(1)))
    bare = {name: value for name, value in other.state_dict().items() if 'num_batches' not in name}
    fit.check_fit(model, 'a.pth', bare, 'checkpoint', whole=True)
    head = Model(classes=7).state_dict()
    del head['backbone.norm.bias']
    check(model, head, whole=False)
    whole = 'checkpoint a.pth: it sets 7 of 7 tensors'
    assert lines == [
        whole,
        f'{whole}; 1 of its entries are not in the model (extra)',
        whole,
        'checkpoint a.pth: it sets 4 of 7 tensors; 2 have another shape in it (head.weight, head.bias); '
        '1 are missing in it (backbone.norm.bias)',
    ]
    for state in (head, {}, {f'student.{name}': value for name, value in bare.items()}, nn.Linear(2, 2).state_dict()):
        with raises(LaunchError, 'checkpoint', 'a.pth') as error:
            check(model, state)
        assert str(error.value).endswith('; --option')
    assert len(lines) == 4


def test_nothing_of_the_backbone(lines):
    """A head alone, or nothing, is refused."""
    for state in ({}, Model(channels=4).head.state_dict(), {'head.bias': torch.ones(5)}):
        with raises(LaunchError, 'checkpoint', 'a.pth'):
            check(Model(), state, whole=False)
    for content in ([1], 3, dict(state_dict=None), {1: torch.ones(1)}):
        with raises(LaunchError, 'checkpoint', 'a.pth'):
            fit.check_fit(Model(), 'a.pth', content, 'checkpoint', whole=False)
    assert lines == []


def test_wrapped_models(lines):
    """Models for test-time augmentation, and names with the prefix of an earlier MMEngine."""
    state = Model().state_dict()
    inner = Model()
    for model in (Augmented(inner), Model()):
        check(model, state)
        check(model, {f'module.{name}': value for name, value in state.items()})
    torch.testing.assert_close(inner.state_dict(), state, rtol=0, atol=0)
    assert lines == ['checkpoint a.pth: it sets 7 of 7 tensors'] * 4


def test_distributed_model(lines, tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        check(MMDistributedDataParallel(Model()), Model().state_dict())
        fit.watch_pretrained(MMDistributedDataParallel(Model()))
    finally:
        torch.distributed.destroy_process_group()
    assert lines == ['checkpoint a.pth: it sets 7 of 7 tensors']


def test_renamed_entries_count(lines):
    state = Model(classes=6).state_dict()
    state['classifier'] = state.pop('head.weight')
    state['head.bias'] = state['head.bias'][:5]
    check(Renamed(), state)
    with raises(LaunchError, 'checkpoint'):
        check(Model(), state)


# ---------------------------------------------------------------------------------------------------------- Pretrained


def pretrained(path, **options):
    return dict(type='Pretrained', checkpoint=path, **options)


def initialize(model):
    fit.watch_pretrained(model)
    model.init_weights()
    return model


def test_pretrained(lines, save):
    state = Model(classes=9).state_dict()
    path = save(state)
    initialize(Model())
    assert lines == []
    model = Model()
    model.backbone.init_cfg = [dict(type='Kaiming', layer='Conv2d'), pretrained(path, prefix='backbone.')]
    initialize(model)
    key = 'init_cfg.checkpoint'
    assert lines == [f"model.backbone.{key} {path} with prefix='backbone.': it sets 5 of 5 tensors"]
    assert torch.equal(model.backbone.conv.weight, state['backbone.conv.weight'])
    lines.clear()
    initialize(Model(init_cfg=pretrained(path)))
    assert lines == [f'model.{key} {path}: it sets 5 of 7 tensors; 2 have another shape in it (head.weight, head.bias)']
    lines.clear()
    del state['backbone.norm.weight']
    model = Model()
    model.backbone.init_cfg = pretrained(save(state), prefix='backbone.')
    initialize(model)
    assert lines[0].endswith('it sets 4 of 5 tensors; 1 are missing in it (norm.weight)')
    fit.check_fit(model, path, Model().state_dict(), 'load_from', whole=True)  # not a load of init_cfg
    assert len(lines) == 2


@pytest.mark.parametrize('place', ['backbone', 'model'])
def test_foreign_pretrained(lines, save, place):
    """Files without the prefix, with the prefix of another part, and of a model of which only the head fits."""
    states = [{}, nn.Linear(2, 2).state_dict(), {f'a.{key}': value for key, value in Backbone().state_dict().items()}]
    states += [Model(channels=9).state_dict(), {'head.bias': torch.ones(5)}]
    for state in states:
        path = save(state)
        model = Model()
        (model.backbone if place == 'backbone' else model).init_cfg = pretrained(path)
        with raises(LaunchError, path):
            initialize(model)
    assert lines == []


def test_module_that_loads_by_itself(lines, save):
    """Like the Swin transformers of the hosts, which rename the entries that they read."""
    state = Backbone().state_dict()
    path = save({name.replace('conv', 'projection'): value for name, value in state.items()})

    class Own(Backbone):
        def init_weights(self):
            content = torch.load(self.init_cfg['checkpoint'], weights_only=True)['state_dict']
            self.load_state_dict({name.replace('projection', 'conv'): value for name, value in content.items()})

    model = Model()
    model.backbone = Own(init_cfg=pretrained(path))
    initialize(model)
    assert lines == [f'model.backbone.init_cfg.checkpoint {path}: it sets 5 of 5 tensors']


def test_pretrained_files_that_cannot_be_used(lines, save, tmp_path):
    """They are refused before anything is initialized; remote files are not read twice."""

    def watch(path, **options):
        model = Model()
        model.backbone.init_cfg = [dict(type='Kaiming', layer='Conv2d'), pretrained(str(path), **options)]
        fit.watch_pretrained(model)

    key, whole = 'model.backbone.init_cfg.checkpoint', save(Model().state_dict())
    watch(whole)
    watch(whole, prefix='backbone.')
    watch('https://host/weights.pth')
    watch('torchvision://resnet50')
    with raises(LaunchError, key, 'gone.pth'):
        watch('gone.pth')
    with raises(LaunchError, key, 'teacher.'):
        watch(whole, prefix='teacher.')
    for i, content in enumerate(([1], dict(state_dict=3), {}, {1: 2})):
        torch.save(content, tmp_path / f'{i}.pth')
        with raises(LaunchError, key, tmp_path / f'{i}.pth'):
            watch(tmp_path / f'{i}.pth')
    with open(whole, 'r+b') as file:
        file.truncate(500)
    with raises(UnreadableError, key, whole):
        watch(whole)


# ----------------------------------------------------------------------------------------------------------- the tools


def changed(tiny_config, old, new):
    path = tiny_config.with_name('changed.py')
    text = tiny_config.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def with_another_head(path):
    """Write the checkpoint of a training with 3 classes."""
    content = read_whole(path, '')
    content['state_dict'].update({'head.fc.weight': torch.ones(3, 1280), 'head.fc.bias': torch.ones(3)})
    torch.save(content, path.with_name('other_head.pth'))
    return path.with_name('other_head.pth')


OTHER_MODEL = ("type='MobileNetV2', widen_factor=0.1", "type='MobileNetV2', widen_factor=0.2")


def test_test(trained, tiny_config, test_args, tmp_path, lines):
    def run(config, checkpoint, *argv):
        return tool.test(test_args(config, checkpoint, '--work-dir', tmp_path / 'test', *argv))

    path = trained / 'epoch_1.pth'
    metrics = run(tiny_config, path)
    count = len([name for name in read_whole(path, '')['state_dict'] if 'batches_tracked' not in name])
    assert lines == [f'checkpoint {path}: it sets {count} of {count} tensors']
    assert run(tiny_config, path, '--allow-partial') == metrics
    other = with_another_head(path)
    with raises(LaunchError, '--allow-partial', other):
        run(tiny_config, other)
    lines.clear()
    run(tiny_config, other, '--allow-partial')
    (line,) = lines
    assert f'it sets {count - 2} of {count} tensors; 2 have another shape in it (head.fc.weight, head.fc.bias)' in line
    torch.save(dict(state_dict={}), tmp_path / 'none.pth')
    foreign = tmp_path / 'foreign.pth'
    torch.save(nn.Linear(2, 2).state_dict(), foreign)
    for argv in ((), ('--allow-partial',)):
        for content in (tmp_path / 'none.pth', foreign):
            with raises(LaunchError, 'checkpoint', content):
                run(tiny_config, content, *argv)


def test_train(trained, tiny_config, train_args, tmp_path, lines):
    def run(config, *argv):
        run_training(train_args(config, '--work-dir', tmp_path / 'other', '--no-validate', *argv))

    path = trained / 'epoch_1.pth'
    head = with_another_head(path)
    run(tiny_config, '--cfg-options', f'load_from={head}', 'train_cfg.max_epochs=1')
    (line,) = lines
    assert line.startswith(f'load_from {head}: it sets ')
    assert line.endswith('2 have another shape in it (head.fc.weight, head.fc.bias)')
    other = changed(tiny_config, *OTHER_MODEL)
    with raises(LaunchError, '--resume', path):
        run(other, '--resume', path)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / 'foreign.pth')
    with raises(LaunchError, 'load_from', tmp_path / 'foreign.pth'):
        run(tiny_config, '--cfg-options', f'load_from={tmp_path}/foreign.pth')
    init = f"init_cfg=dict(type='Pretrained', checkpoint={str(tmp_path / 'foreign.pth')!r}), "
    for runner in ('Runner', 'mmkron.FlexibleRunner'):
        config = changed(tiny_config, "type='MobileNetV2', ", f"type='MobileNetV2', {init}")
        if runner != 'Runner':
            config.write_text(config.read_text() + "runner_type = 'mmkron.FlexibleRunner'\n")
        with raises(LaunchError, str(tmp_path / 'foreign.pth')):
            run(config)
        with raises(LaunchError, 'model.backbone.init_cfg.checkpoint', tmp_path / 'foreign.pth'):
            run(config, '--cfg-options', f'load_from={path}')  # the load of load_from is not the one of init_cfg


def test_averaged_weights(trained, tiny_config, train_args, test_args, tmp_path, lines):
    """An EMAHook saves the averages as the weights; it also copies the model and loads the copy."""
    config = changed(tiny_config, 'randomness', "custom_hooks = [dict(type='EMAHook')]\nrandomness")
    init = f"init_cfg=dict(type='Pretrained', prefix='backbone.', checkpoint={str(trained / 'epoch_1.pth')!r}), "
    config.write_text(config.read_text().replace("type='MobileNetV2', ", f"type='MobileNetV2', {init}"))
    run_training(train_args(config, '--work-dir', tmp_path / 'ema', '--no-validate'))
    (line,) = lines
    assert line.startswith(
        f"model.backbone.init_cfg.checkpoint {trained}/epoch_1.pth with prefix='backbone.': it sets "
    )
    path = tmp_path / 'ema/epoch_1.pth'
    assert 'ema_state_dict' in read_whole(path, '')
    for chosen in (config, tiny_config):
        tool.test(test_args(chosen, path, '--work-dir', tmp_path / 'test'))
    run_training(
        train_args(
            config,
            '--work-dir',
            tmp_path / 'ema',
            '--no-validate',
            '--resume',
            '--cfg-options',
            'train_cfg.max_epochs=2',
        )
    )
    assert all('sets' in line and 'missing' not in line for line in lines)
