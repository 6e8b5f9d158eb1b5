"""A short start of a run on the console. The log file keeps all that MMEngine says."""

from __future__ import annotations

import logging
import os.path as osp
import sys
import textwrap
from typing import Any

from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from mmkron.engine.fit import find_pretrained


class _WarningsAlone(logging.Filter):
    """Pass warnings, errors and what is meant for the console, except for MMEngine's warnings about its old names."""

    def filter(self, record: logging.LogRecord) -> bool:
        wanted = record.levelno >= logging.WARNING or getattr(record, 'on_console', False)
        return wanted and 'will be deprecated in future' not in record.getMessage()


def quiet(logger: MMLogger) -> MMLogger:
    """Keep all but warnings off the console until :class:`SayStart` opens it; return ``logger``."""
    for handler in logger.handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.addFilter(_WarningsAlone())
            if get_rank():
                handler.setStream(sys.__stdout__)  # other processes print nothing, but their errors are shown
    return logger


class QuietRunner(Runner):
    """MMEngine's runner, which dumps the environment, the config and the hooks into the log file alone."""

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build MMEngine's logger with a quiet console."""
        return quiet(super().build_logger(*args, **kwargs))


class SayStart(Hook):
    """Open the console when a run starts, with a summary of its model, its data and its results."""

    priority = 'VERY_LOW'  # after CheckpointHook

    def before_train(self, runner: Runner) -> None:
        """Open the console of a training."""
        _open(runner, 'training', {'train': runner.train_loop, 'val': runner.val_loop})

    def before_test(self, runner: Runner) -> None:
        """Open the console of a test."""
        _open(runner, 'test', {'test': runner.test_loop})


def _open(runner: Runner, purpose: str, loops: dict[str, Any]) -> None:
    for handler in runner.logger.handlers:
        for part in list(handler.filters):
            if isinstance(part, _WarningsAlone):
                handler.removeFilter(part)
    rows = {'config': runner.cfg.filename, 'model': _describe_model(runner.model)}
    loops = {split: loop for split, loop in loops.items() if loop is not None}
    rows.update((split, _describe_data(loop, runner.cfg.get(f'{split}_dataloader'))) for split, loop in loops.items())
    first = next(iter(loops.values()))
    rows['classes'] = _describe_classes(first.dataloader.dataset)
    if isinstance(first, EpochBasedTrainLoop):
        rows['length'] = f'{first.max_epochs} epochs of {len(first.dataloader)} iterations'
    elif 'train' in loops:
        rows['length'] = f'{first.max_iters} iterations'
    rows['weights'] = _describe_weights(runner)
    rows['results'] = runner.work_dir
    rows['log'] = osp.join(runner.log_dir, f'{runner.timestamp}.log')
    runner.logger.info('\n'.join([f'the {purpose} starts', *(f'  {name:<8} {text}' for name, text in rows.items())]))


def _describe_model(model: nn.Module) -> str:
    model = model.module if is_model_wrapper(model) else model
    parts = ', '.join(type(part).__name__ for name, part in model.named_children() if name != 'data_preprocessor')
    count = sum(parameter.numel() for parameter in model.parameters())
    sharded = any(isinstance(part, FullyShardedDataParallel) for part in model.modules())
    device = next((parameter.device for parameter in model.parameters()), 'no device')
    process = ' in this process' if sharded else ''
    return f'{type(model).__name__} of {parts}: {count:,} parameters{process}, on {device}'


def _describe_data(loop: Any, cfg: dict | None) -> str:
    dataset, size = loop.dataloader.dataset, (cfg or {}).get('batch_size')
    processes = f' in each of {get_world_size()} processes' if get_world_size() > 1 else ''
    samples = f' of {len(dataset):,} samples' if hasattr(dataset, '__len__') else ''
    return f'{type(dataset).__name__}{samples}' + (f', {size} per batch{processes}' if size else '')


def _describe_classes(dataset: Any) -> str:
    names = (getattr(dataset, 'metainfo', None) or {}).get('classes')
    if names is None:
        return 'not named by the data'
    return textwrap.shorten(f'{len(names)}: {", ".join(map(str, names))}', 100, placeholder=' ...')


def _describe_weights(runner: Runner) -> str:
    path = runner.cfg.get('load_from')
    if path is not None and runner.cfg.get('resume'):
        return f'resumed from {path}, after epoch {runner.epoch}, iteration {runner.iter}'
    files = [path] if path is not None else [config['checkpoint'] for *_, config in find_pretrained(runner.model)]
    return f'from {", ".join(files)}' if files else 'initialized at random'
