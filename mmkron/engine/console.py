"""Keep the start of a run short on the console; the log file has all that MMEngine says."""

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
from mmengine.runner import Runner

from mmkron.engine.fit import find_pretrained


def _is_for_console(record: logging.LogRecord) -> bool:
    """Pass warnings, errors and what is marked for the console, except MMEngine's warnings about its own names."""
    wanted = record.levelno >= logging.WARNING or getattr(record, 'on_console', False)
    return wanted and 'will be deprecated in future' not in record.getMessage()


def quiet(logger: MMLogger) -> MMLogger:
    """Keep all but warnings off the console until :class:`StartSummaryHook` opens it; return ``logger``."""
    for handler in logger.handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.addFilter(_is_for_console)
            if get_rank():
                handler.setStream(sys.__stdout__)  # the other processes print nothing but errors
    return logger


class StartSummaryHook(Hook):
    """Hook that opens the console when a run starts, with a summary of its model, its data and its results."""

    priority = 'VERY_LOW'  # after CheckpointHook

    def before_train(self, runner: Runner) -> None:
        """Start the console log of a training."""
        _start(runner, 'training', {'train': runner.train_loop, 'val': runner.val_loop})

    def before_test(self, runner: Runner) -> None:
        """Start the console log of a test."""
        _start(runner, 'test', {'test': runner.test_loop})


def _start(runner: Runner, purpose: str, loops: dict[str, Any]) -> None:
    for handler in runner.logger.handlers:
        handler.removeFilter(_is_for_console)
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else 'no device'
    count = sum(parameter.numel() for parameter in parameters)
    rows = {'config': runner.cfg.filename, 'model': f'{type(model).__name__}: {count:,} parameters, on {device}'}
    for split, loop in loops.items():
        if loop is not None:
            dataset, size = loop.dataloader.dataset, (runner.cfg.get(f'{split}_dataloader') or {}).get('batch_size')
            samples = f' of {len(dataset):,} samples' if hasattr(dataset, '__len__') else ''
            rows[split] = f'{type(dataset).__name__}{samples}, {size} per batch in each of {get_world_size()} processes'
            classes = (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
            rows['classes'] = textwrap.shorten(
                f'{len(classes)}: {", ".join(map(str, classes))}', 100, placeholder=' ...'
            )
    rows['weights'] = _describe_weights(runner)
    rows['results'] = runner.work_dir
    rows['log'] = osp.join(runner.log_dir, f'{runner.timestamp}.log')
    runner.logger.info('\n'.join([f'the {purpose} starts', *(f'  {name:<8} {text}' for name, text in rows.items())]))


def _describe_weights(runner: Runner) -> str:
    path = runner.cfg.get('load_from')
    if path is not None and runner.cfg.get('resume'):
        return f'resumed from {path}, after epoch {runner.epoch}, iteration {runner.iter}'
    files = [path] if path is not None else [config['checkpoint'] for *_, config in find_pretrained(runner.model)]
    return f'from {", ".join(files)}' if files else 'initialized at random'
