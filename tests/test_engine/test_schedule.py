"""The learning rates of a resumed training equal those of a training that had the schedule from the start."""

import logging
import uuid
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import CosineAnnealingLR, LinearLR, OptimWrapper, OptimWrapperDict, StepLR
from mmengine.runner import Runner

from mmkron.engine import flexible
from mmkron.engine.hooks import schedule
from mmkron.engine.hooks.schedule import FollowConfigHook
from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import read_whole, safe_loading
from support.errors import raises

SGD = dict(type='SGD', lr=0.1, momentum=0.9)
ADAM = dict(type='AdamW', lr=0.1, betas=(0.8, 0.99))


class Toy(BaseModel):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

    def forward(self, inputs, data_samples=None, mode='loss'):
        return dict(loss=self.second(self.first(inputs)).square().mean())


class Recorder(Hook):
    """Record the options of the optimizers at each iteration."""

    def __init__(self):
        self.seen = {}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        wrappers = getattr(runner.optim_wrapper, 'optim_wrappers', {'': runner.optim_wrapper})
        self.seen[runner.iter] = [
            {name: value for name, value in group.items() if name in ('lr', 'momentum', 'betas', 'weight_decay')}
            for wrapper in wrappers.values()
            for group in wrapper.optimizer.param_groups
        ]


@pytest.fixture
def train(tmp_path):
    """Train on 12 samples, and return the options of the optimizers at each iteration."""

    def run(
        schedule,
        epochs=None,
        iters=None,
        resume=None,
        batch=3,
        optimizer=SGD,
        wrapper=None,
        cls=Runner,
        keep=(),
        **more,
    ):
        loop = dict(by_epoch=True, max_epochs=epochs) if epochs else dict(by_epoch=False, max_iters=iters)
        hook = dict(type='CheckpointHook', interval=1, by_epoch=bool(epochs), **dict(keep))
        runner = cls(
            Toy(),
            work_dir=str(tmp_path),
            train_dataloader=dict(
                dataset=[dict(inputs=torch.ones(2) * i) for i in range(12)],
                batch_size=batch,
                sampler=dict(type='DefaultSampler' if epochs else 'InfiniteSampler', shuffle=False),
                collate_fn=dict(type='default_collate'),
            ),
            train_cfg=loop,
            optim_wrapper=wrapper() if wrapper else dict(optimizer=optimizer, **more),
            param_scheduler=schedule,
            default_hooks=dict(checkpoint=hook, logger=None),
            load_from=resume and str(tmp_path / resume),
            resume=resume is not None,
            experiment_name=uuid.uuid4().hex,
            log_level='ERROR',
        )
        recorder = Recorder()
        runner.register_hook(recorder)
        runner.register_hook(FollowConfigHook())
        with safe_loading():
            runner.train()
        return recorder.seen

    return run


def cosine(end, warmup=2, by_iter=True):
    """Return a linear warm-up in iterations and a cosine in epochs up to ``end``, as in the shipped configs."""
    return [
        dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=warmup),
        dict(type='CosineAnnealingLR', T_max=end, eta_min=1e-4, by_epoch=True, end=end, convert_to_iter_based=by_iter),
    ]


# Each a function of the length of the training.
SCHEDULES = {
    'cosine by iteration': cosine,
    'cosine by epoch': lambda end: cosine(end, by_iter=False),
    'poly': lambda end: dict(type='PolyLR', power=0.9, eta_min=1e-4, by_epoch=True, begin=0, end=end),
    'steps': lambda end: dict(type='MultiStepLR', milestones=[end // 3, end - 1], gamma=0.1),
    'length of the training': lambda end: dict(type='LinearLR', start_factor=1, end_factor=0.1, by_epoch=True),
    'one more': lambda end: [dict(type='ExponentialLR', gamma=0.9)] + [dict(type='StepLR', step_size=2)] * (end > 4),
    'none': lambda end: None if end > 4 else dict(type='ExponentialLR', gamma=0.5),
    'momentum': lambda end: [*cosine(end), dict(type='CosineAnnealingMomentum', T_max=end, eta_min=0.5, end=end)],
    'restarts': lambda end: dict(type='CosineRestartLR', periods=[2, end], restart_weights=[1, 0.5], eta_min=0.0),
}


@pytest.mark.parametrize('optimizer', [SGD, ADAM], ids=['SGD', 'AdamW'])
@pytest.mark.parametrize('name', SCHEDULES)
def test_longer_schedule(train, name, optimizer):
    """No value differs from a training that was never stopped."""
    schedule = SCHEDULES[name]
    whole = train(schedule(8), epochs=8, optimizer=optimizer)
    assert len(whole) == 32
    first = train(schedule(4), epochs=4, optimizer=optimizer)
    assert any(first[i] != whole[i] for i in first)  # it is another schedule
    assert train(schedule(8), epochs=8, resume='epoch_4.pth', optimizer=optimizer) == {
        i: whole[i] for i in range(16, 32)
    }


def test_mmengine_alone_stays_at_the_last_rate(train, monkeypatch):
    """The behavior of MMEngine that the hook corrects."""
    monkeypatch.setattr(FollowConfigHook, 'after_load_checkpoint', lambda *_, **kwargs: None)
    whole = train(cosine(8), epochs=8)
    train(cosine(4), epochs=4)
    resumed = train(cosine(8), epochs=8, resume='epoch_4.pth')
    assert max(group[0]['lr'] for group in resumed.values()) < 0.01 < 0.05 < whole[16][0]['lr']


def test_same_schedule_is_left_alone(train, monkeypatch):
    """Stepping takes minutes for a long schedule of many parameter groups."""
    changed, take = [], schedule._take_options
    monkeypatch.setattr(schedule, '_take_options', lambda *args: changed.append(take(*args)) or changed[-1])
    monkeypatch.setattr(schedule, '_step_to', lambda *_: pytest.fail('stepped again'))
    whole = train(cosine(8), epochs=8)
    assert train(cosine(8), epochs=8, resume='epoch_4.pth') == {i: whole[i] for i in range(16, 32)}
    assert changed == [set()]


def test_iteration_based_training(train):
    def poly(end):
        return [
            dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=3),
            dict(type='PolyLR', power=0.9, eta_min=1e-4, by_epoch=False, begin=3, end=end),
        ]

    whole = train(poly(20), iters=20)
    train(poly(7), iters=7)
    assert train(poly(20), iters=20, resume='iter_7.pth') == {i: whole[i] for i in range(7, 20)}


def test_other_number_of_batches(train):
    """The training resumes at the epoch: iteration 8 of 4 per epoch corresponds to iteration 4 of 2 per epoch."""
    whole = train(cosine(4), epochs=4, batch=6)
    train(cosine(4), epochs=2, batch=3)
    resumed = train(cosine(4), epochs=4, batch=6, resume='epoch_2.pth')
    assert list(resumed.values()) == [whole[i] for i in range(4, 8)]


def test_options_of_the_optimizer(train):
    """A rate, a weight decay, and betas that a momentum schedule does not set."""
    schedule = cosine(4)
    other = dict(type='AdamW', lr=0.05, betas=(0.7, 0.9), weight_decay=0.3)
    whole = train(schedule, epochs=4, optimizer=other)
    train(schedule, epochs=2, optimizer=ADAM)
    assert train(schedule, epochs=4, optimizer=other, resume='epoch_2.pth') == {i: whole[i] for i in range(8, 16)}
    train(None, epochs=2, optimizer=ADAM)
    resumed = train(None, epochs=3, optimizer=dict(other, lr=0.1), resume='epoch_2.pth')
    assert resumed[8][0] == dict(lr=0.1, betas=(0.7, 0.9), weight_decay=0.3)


def test_several_groups(train):
    own = dict(custom_keys={'first': dict(lr_mult=0.1)})
    whole = train(cosine(6), epochs=6, paramwise_cfg=own)
    train(cosine(3), epochs=3, paramwise_cfg=own)
    resumed = train(cosine(6), epochs=6, resume='epoch_3.pth', paramwise_cfg=own)
    assert resumed == {i: whole[i] for i in range(12, 24)}
    assert resumed[12][0]['lr'] != resumed[12][-1]['lr']


def test_several_optimizers():
    """Each has its own schedules: MMEngine then loads the states of a schedule of 6 epochs."""

    def state(end, epochs):
        weights = {name: torch.nn.Parameter(torch.ones(1)) for name in ('a', 'b')}
        wrappers = {
            name: OptimWrapper(torch.optim.SGD([weight], lr=0.1 if name == 'a' else 0.2))
            for name, weight in weights.items()
        }
        schedulers = dict(
            a=[CosineAnnealingLR(wrappers['a'], T_max=end, end=end)],
            b=[LinearLR(wrappers['b'], end=8, by_epoch=False), StepLR(wrappers['b'], step_size=2)],
        )
        for _ in range(epochs):
            for scheduler in [schedulers['b'][0]] * 4 + [schedulers['a'][0], schedulers['b'][1]]:
                scheduler.step()
        return OptimWrapperDict(**wrappers), schedulers

    def saved(wrappers, schedulers):
        states = {name: [scheduler.state_dict() for scheduler in group] for name, group in schedulers.items()}
        return dict(optimizer=wrappers.state_dict(), param_schedulers=states)

    checkpoint = dict(meta=dict(epoch=3, iter=12), **saved(*state(3, 3)))
    wrappers, schedulers = state(6, 0)
    runner = SimpleNamespace(
        _resume=True,
        optim_wrapper=wrappers,
        param_schedulers=schedulers,
        train_loop=SimpleNamespace(dataloader=range(4)),
        logger=logging.getLogger('none'),
    )
    expected = saved(*state(6, 3))
    assert checkpoint['optimizer'] != expected['optimizer']
    FollowConfigHook().after_load_checkpoint(runner, checkpoint)
    assert {key: checkpoint[key] for key in expected} == expected


@pytest.mark.parametrize('cls', [Runner, flexible.FlexibleRunner])
@pytest.mark.parametrize('lacking', ['optimizer', 'param_schedulers'])
def test_checkpoint_without_a_part(train, tmp_path, lacking, cls):
    """MMEngine would continue the schedule from the first rate, or restart it from the last one."""
    whole = train(cosine(4), epochs=4, cls=cls)
    content = read_whole(str(tmp_path / 'epoch_2.pth'), '')
    del content[lacking]
    torch.save(content, tmp_path / 'less.pth')
    assert train(cosine(4), epochs=4, resume='less.pth', cls=cls) == {i: whole[i] for i in range(8, 16)}


def test_flexible_runner(train):
    whole = train(cosine(6), epochs=6, cls=flexible.FlexibleRunner)
    train(cosine(3), epochs=3, cls=flexible.FlexibleRunner)
    resumed = train(cosine(6), epochs=6, resume='epoch_3.pth', cls=flexible.FlexibleRunner)
    assert resumed == {i: whole[i] for i in range(12, 24)}


def test_refused_checkpoints(train, tmp_path):
    train(cosine(4), epochs=2)
    with raises(LaunchError, 'optim_wrapper.optimizer', 'AdamW'):
        train(cosine(4), epochs=4, resume='epoch_2.pth', optimizer=ADAM)
    with raises(LaunchError, 'optim_wrapper.optimizer', 4):
        train(cosine(4), epochs=4, resume='epoch_2.pth', paramwise_cfg=dict(custom_keys=dict(first=dict(lr_mult=0.1))))
    plateau = dict(type='ReduceOnPlateauLR', monitor='loss', rule='less', end=100)
    with raises(LaunchError, 'param_scheduler', 'ReduceOnPlateauLR'):
        train(plateau, epochs=4, resume='epoch_2.pth')
    train(plateau, epochs=2)
    assert len(train(plateau, epochs=4, resume='epoch_2.pth')) == 8  # as it was
    content = read_whole(str(tmp_path / 'epoch_2.pth'), '')
    for part in (None, {}, dict(param_groups=[1])):
        torch.save(dict(content, optimizer=part), tmp_path / 'other.pth')
        with raises(LaunchError, '--resume'):
            train(cosine(4), epochs=4, resume='other.pth')


def test_config_of_a_checkpoint_is_not_run(train, tmp_path):
    """MMEngine's ``resume`` executes the config text in a checkpoint; the hook removes it."""
    train(cosine(4), epochs=2)
    content = read_whole(str(tmp_path / 'epoch_2.pth'), '')
    content['meta']['config'] = f'import os\nos.mkdir({str(tmp_path / "proof")!r})'
    torch.save(content, tmp_path / 'evil.pth')
    train(cosine(4), epochs=4, resume='evil.pth')
    assert not (tmp_path / 'proof').exists()
