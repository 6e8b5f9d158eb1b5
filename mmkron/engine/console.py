"""Keep the start of a run short on the console; the log file has all that MMEngine says."""

from __future__ import annotations

import logging
import sys
from typing import Any

from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner


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
    count = sum(parameter.numel() for parameter in model.parameters())
    rows = {'config': runner.cfg.filename, 'model': f'{type(model).__name__}, {count:,} parameters'}
    for split, loop in loops.items():
        if loop is not None:
            dataset = loop.dataloader.dataset
            count = f'{len(dataset):,} samples' if hasattr(dataset, '__len__') else 'samples'
            rows[split] = f'{type(dataset).__name__}, {count}, {get_world_size()} processes'
    rows['weights'] = runner.cfg.get('load_from') or 'initial ones'
    if runner.cfg.get('resume'):
        rows['weights'] += f', resumed after epoch {runner.epoch}, iteration {runner.iter}'
    rows['results'] = runner.work_dir
    runner.logger.info('\n'.join([f'the {purpose} starts', *(f'  {name:<8} {text}' for name, text in rows.items())]))
