"""The recipes of configs/lambda_resnet, and what its README tells to type for a batch of 4096 on fewer devices."""

import re

import pytest
from mmengine.config import Config

from mmkron.engine import runner as launch
from support.tools import ROOT

FOLDER = ROOT / 'configs/lambda_resnet'


def commands():
    """The arguments of each command line of the README that starts a training on several processes."""
    text = (FOLDER / 'README.md').read_text(encoding='utf-8').replace('\\\n', ' ')
    return [line.split()[2:] for line in re.findall(r'^bash tools/dist_train\.sh .+', text, re.M)]


@pytest.mark.parametrize(('index', 'lr', 'counts', 'interval'), [(0, 1.6, 8, None), (1, 0.2, 1, None), (2, 1.6, 8, 8)])
def test_batch_of_4096(index, lr, counts, interval, train_args, tmp_path):
    """Eight processes of 64 images: as the README says, by accumulation, by linear scaling, and with the average."""
    path, processes, *options = commands()[index]
    args = train_args(ROOT / path, '--work-dir', tmp_path, *options)
    cfg = launch.merge_train_args(launch.load_config(args.config), args)
    assert cfg.train_dataloader.batch_size * int(processes) == 512
    cfg.experiment_name = tmp_path.name
    with launch.environment(cfg, args):
        runner = launch.build_runner(cfg)
        runner._world_size = int(processes)
        wrapper = runner.build_optim_wrapper(cfg.optim_wrapper)
        runner.scale_lr(wrapper, cfg.auto_scale_lr)
    assert wrapper.optimizer.param_groups[0]['lr'] == pytest.approx(lr)
    assert wrapper._accumulative_counts == counts
    averages = [hook.ema_cfg for hook in runner.hooks if type(hook).__name__ == 'EMAHook']
    assert [(ema['momentum'], ema['interval'], ema['update_buffers']) for ema in averages] == (
        [] if interval is None else [(1e-4, interval, True)]
    )


@pytest.mark.parametrize('path', sorted(FOLDER.glob('*_32xb128*.py')), ids=lambda path: path.name)
def test_recipe(path):
    """Learning rate for 4096, warm-up and cosine by iteration; RandAugment, dropout and average with 350 epochs."""
    cfg = Config.fromfile(path)
    epochs = 350 if '350e' in path.name else 90
    optimizer = cfg.optim_wrapper.optimizer
    assert optimizer.lr == pytest.approx(0.1 * 4096 / 256)
    assert (optimizer.momentum, optimizer.weight_decay) == (0.9, 4e-5 if epochs == 350 else 1e-4)
    assert cfg.auto_scale_lr.base_batch_size == 32 * cfg.train_dataloader.batch_size == 4096
    warmup, cosine = cfg.param_scheduler
    assert (warmup.end, cosine.begin, cosine.end, cfg.train_cfg.max_epochs) == (5, 5, epochs, epochs)
    assert warmup.convert_to_iter_based
    assert cosine.convert_to_iter_based
    assert cfg.model.head.loss.label_smooth_val == 0.1
    size = int(match[1]) if (match := re.search(r'-(\d+)px', path.stem)) else 224
    train, test = cfg.train_dataloader.dataset.pipeline, cfg.test_dataloader.dataset.pipeline
    assert (train[1].scale, test[-2].crop_size) == (size, size)
    assert (train, test, test) == (cfg.train_pipeline, cfg.test_pipeline, cfg.val_dataloader.dataset.pipeline)
    if epochs == 350:
        assert (train[3].num_policies, train[3].magnitude_level) == (2, 10 if size <= 160 else 15)
        assert cfg.model.neck.drop_rate >= 0.2
        assert cfg.custom_hooks[0].type == 'EMAHook'
