"""How much of a checkpoint fits a model: measured on the tensors while it is loaded, and said in one line."""

from __future__ import annotations

import logging
import os.path as osp
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.runner import Runner, checkpoint
from torch import Tensor

from mmkron.engine.checkpoints import checkpoint_path, read_whole, state_dict_of
from mmkron.engine.errors import LaunchError
from mmkron.engine.hooks.schedule import START_FROM_WEIGHTS, FollowConfigHook


class Fit(NamedTuple):
    """What a load did to the tensors of a module; ``num_batches_tracked`` of batch norms does not count."""

    names: list[str]  # all tensors of the module
    unset: list[str]  # those that the load left as they were
    entries: list[str]  # what the checkpoint holds

    def __str__(self) -> str:
        entries, names = set(self.entries), set(self.names)
        counts = {
            'have another shape in it': [name for name in self.unset if name in entries],
            'are missing in it': [name for name in self.unset if name not in entries],
            'of its entries have no place': [name for name in self.entries if name not in names],
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


def _counting(names: Iterable[str]) -> list[str]:
    return [name.removeprefix('module.') for name in names if not name.endswith('num_batches_tracked')]


def _versions(module: nn.Module) -> dict[str, int]:
    """Return how often each tensor was written to, which shows what a load set, whatever it renamed or resized."""
    tensors = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    return {name: tensors[name]._version for name in _counting(tensors)}


def _fit(module: nn.Module, before: dict[str, int], entries: Iterable[str]) -> Fit:
    after = _versions(module)
    return Fit(list(before), [name for name in before if after.get(name) == before[name]], _counting(entries))


def _unwrapped(model: nn.Module) -> nn.Module:
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def check_fit(model: nn.Module, path: str | None, content: Any, argument: str, whole: bool, hint: str = '') -> None:
    """Load a checkpoint into a model as MMEngine does, and log how much of it fits.

    Args:
        model: The model, which may be wrapped for several processes or for test-time augmentation.
        path: A file or URL; nothing happens if it is None or a folder with one file per process.
        content: What the file holds; None to read it here.
        argument: What a message calls it.
        whole: Whether each tensor of the model must be set; else one of its backbone is enough.
        hint: What to do if one is not.

    Raises:
        LaunchError: The file cannot be read, or it does not fit.
    """
    if path is None or osp.isdir(path):
        return
    source, model = f'{argument} {path}', _unwrapped(model)
    weights = state_dict_of(read_whole(path, argument) if content is None else content, source)
    before = _versions(model)
    checkpoint._load_checkpoint_to_model(model, dict(state_dict=weights), logger='silent')
    fit = _fit(model, before, weights)
    if whole and fit.unset:
        raise LaunchError(f'{source} does not fit the model: {fit}{hint and f"; {hint}"}')
    fit.report(source)


def check_start(runner: Runner, cfg: Config, content: Any) -> None:
    """Check that what a training starts from fits its model, and let a resumed one follow its config.

    ``content`` is that of ``cfg.load_from``, or None.

    Raises:
        LaunchError: It does not fit: a training that resumes needs each tensor, another one some of the backbone's.
    """
    runner.register_hook(FollowConfigHook())
    path, resume = cfg.get('load_from'), bool(cfg.get('resume'))
    check_fit(runner.model, path, content, '--resume' if resume else 'load_from', resume, START_FROM_WEIGHTS)
    watch_pretrained(runner.model)  # now, as the first load that it sees has to be that of init_weights


def find_pretrained(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict]]:
    """Yield the parts of a model with ``init_cfg=dict(type='Pretrained')``, with their name and that config."""
    for name, module in _unwrapped(model).named_modules():
        configs = getattr(module, 'init_cfg', None) or ()
        for config in [configs] if isinstance(configs, dict) else configs:
            if 'Pretrained' in str(config.get('type')):
                yield name, module, config


def watch_pretrained(model: nn.Module) -> None:
    """Read the files of each ``init_cfg=dict(type='Pretrained')``, and let ``init_weights`` log how much of them fits.

    Then ``init_weights`` raises LaunchError for one of which no tensor of the module, or of its backbone, fits.

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
    """Report the first load into a module; a later one, as of a whole checkpoint, is not that of ``init_cfg``."""
    before: dict[str, int] = {}
    entries: list[str] = []
    done = []

    def begin(state_dict: dict, prefix: str, *_: Any) -> None:
        before.update({} if done else _versions(module))
        entries[:] = [name.removeprefix(prefix) for name in state_dict]

    def end(loaded: nn.Module, _: Any) -> None:
        if loaded is module and not done:  # an EMAHook makes a copy of the model with its hooks
            done.append(True)
            _fit(module, before, entries).report(source)

    module._register_load_state_dict_pre_hook(begin)
    module.register_load_state_dict_post_hook(end)
