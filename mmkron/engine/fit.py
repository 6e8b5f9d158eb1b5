"""Measure how much of a checkpoint fits a model, on the tensors that a load writes to."""

from __future__ import annotations

import logging
import os.path as osp
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mmengine.logging import MMLogger
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.runner import checkpoint
from torch import Tensor, nn

from mmkron.engine.checkpoints import checkpoint_path, read_whole, state_dict_of
from mmkron.engine.errors import LaunchError


class Fit(NamedTuple):
    """The effect of a load on the tensors of a module, except ``num_batches_tracked`` of batch norms."""

    names: list[str]  # all tensors of the module
    unset: list[str]  # the tensors that the load did not write to
    entries: list[str]  # the entries of the checkpoint

    def __str__(self) -> str:
        counts = {
            'have another shape in it': [name for name in self.unset if name in set(self.entries)],
            'are missing in it': [name for name in self.unset if name not in set(self.entries)],
            'of its entries are not in the model': [name for name in self.entries if name not in set(self.names)],
        }
        parts = [f'{len(found)} {what} ({", ".join(found[:3])})' for what, found in counts.items() if found]
        return '; '.join([f'it sets {len(self.names) - len(self.unset)} of {len(self.names)} tensors', *parts])

    def report(self, source: str) -> None:
        """Log the counts; raise LaunchError if no tensor was set, or none of the backbone of a model that has one."""
        names = [name for name in self.names if name.startswith('backbone.')] or self.names
        if names and set(names) <= set(self.unset):
            raise LaunchError(f'{source} does not fit the model: {self}')
        level = logging.WARNING if self.unset else logging.INFO
        MMLogger.get_current_instance().log(level, f'{source}: {self}', extra=dict(on_console=True))


def _counted(names: Iterable[str]) -> list[str]:
    return [name.removeprefix('module.') for name in names if not name.endswith('num_batches_tracked')]


def _versions(module: nn.Module) -> dict[str, int]:
    """Return the number of writes to each tensor, which shows what a load sets even if it renames or resizes."""
    tensors = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    return {name: tensors[name]._version for name in _counted(tensors)}


def _measure(module: nn.Module, before: dict[str, int], entries: Iterable[str]) -> Fit:
    after = _versions(module)
    return Fit(list(before), [name for name in before if after.get(name) == before[name]], _counted(entries))


def _unwrap(model: nn.Module) -> nn.Module:
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def check_fit(model: nn.Module, path: str | None, content: Any, argument: str, whole: bool, hint: str = '') -> None:
    """Load a checkpoint into a model as MMEngine does, and log how much of it fits.

    Args:
        model: The model, which may be wrapped for several processes or for test-time augmentation.
        path: A file or URL. None, and a folder with one file per process, are skipped.
        content: The content of the file, or None to read it here.
        argument: The name of the file in messages.
        whole: Whether the checkpoint must set each tensor of the model, or at least one of its backbone.
        hint: The remedy in the message.

    Raises:
        LaunchError: The file cannot be read, or it does not fit.
    """
    if path is None or osp.isdir(path):
        return
    source, model = f'{argument} {path}', _unwrap(model)
    weights = state_dict_of(read_whole(path, argument) if content is None else content, source)
    before = _versions(model)
    checkpoint._load_checkpoint_to_model(model, dict(state_dict=weights), logger='silent')
    fit = _measure(model, before, weights)
    if whole and fit.unset:
        raise LaunchError(f'{source} does not fit the model: {fit}{hint and f"; {hint}"}')
    fit.report(source)


def find_pretrained(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict]]:
    """Yield name, module and config of each part of a model with ``init_cfg=dict(type='Pretrained')``."""
    for name, module in _unwrap(model).named_modules():
        configs = getattr(module, 'init_cfg', None) or ()
        for config in [configs] if isinstance(configs, dict) else configs:
            if 'Pretrained' in str(config.get('type')):
                yield name, module, config


def watch_pretrained(model: nn.Module) -> None:
    """Check the files of each ``init_cfg=dict(type='Pretrained')``, and let ``init_weights`` log how much fits.

    ``init_weights`` will raise LaunchError for a file of which no tensor of the module, or of its backbone, fits.

    Raises:
        LaunchError: A local file is missing, damaged or refused, or has no entry with the prefix.
    """
    for name, module, config in find_pretrained(model):
        key = '.'.join(filter(None, ('model', name, 'init_cfg.checkpoint')))
        path, prefix = osp.expanduser(config['checkpoint']), config.get('prefix') or ''
        source = f'{key} {path}' + (prefix and f' with prefix={prefix!r}')
        if '://' not in path:
            weights = state_dict_of(read_whole(checkpoint_path(path, key), key), source)
            if not any(entry.startswith(prefix) for entry in weights):
                raise LaunchError(f'{source} holds no weights')
        _watch(module, source)


def _watch(module: nn.Module, source: str) -> None:
    """Report the first load into a module; a later one, of a whole checkpoint, has nothing to do with ``init_cfg``."""
    before: dict[str, int] = {}
    entries: list[str] = []
    done = []

    def begin(state_dict: dict, prefix: str, *_: Any) -> None:
        before.update({} if done else _versions(module))
        entries[:] = [name.removeprefix(prefix) for name in state_dict]

    def end(loaded: nn.Module, _: Any) -> None:
        if loaded is module and not done:  # an EMAHook copies the model together with these hooks
            done.append(True)
            _measure(module, before, entries).report(source)

    module._register_load_state_dict_pre_hook(begin)
    module.register_load_state_dict_post_hook(end)
