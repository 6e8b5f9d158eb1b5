"""Measure how much of a checkpoint fits a model, on the tensors that a load writes to."""

from __future__ import annotations

import logging
import os.path as osp
from collections.abc import Iterable
from typing import Any

from mmengine.logging import MMLogger
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.runner import checkpoint
from torch import Tensor, nn

from mmkron.utils.errors import LaunchError
from mmkron.utils.weights import checkpoint_path, read_whole, state_dict_of


class Fit:
    """The effect of a load on the tensors of a module, except ``num_batches_tracked`` of batch norms.

    PyTorch counts the writes to each tensor, which shows what a load sets even if it renames or resizes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = self._versions()

    def _versions(self) -> dict[str, int]:
        tensors = self.module.state_dict(keep_vars=True)
        names = [name for name, tensor in tensors.items() if isinstance(tensor, Tensor)]
        return {name: tensors[name]._version for name in _counted(names)}

    def report(self, entries: Iterable[str], source: str, whole: bool = False, hint: str = '') -> None:
        """Log what a load has set.

        Args:
            entries: The names in the checkpoint.
            source: The checkpoint in messages.
            whole: Whether it must set each tensor, or at least one, in a model with a backbone one of the backbone.
            hint: The remedy in the message.

        Raises:
            LaunchError: It does not set what it must.
        """
        after, entries = self._versions(), _counted(entries)
        unset = [name for name in self.before if after.get(name) == self.before[name]]
        counts = {
            'have another shape in it': [name for name in unset if name in entries],
            'are missing in it': [name for name in unset if name not in entries],
            'of its entries are not in the model': [name for name in entries if name not in self.before],
        }
        parts = [f'{len(found)} {what} ({", ".join(found[:3])})' for what, found in counts.items() if found]
        text = '; '.join([f'it sets {len(self.before) - len(unset)} of {len(self.before)} tensors', *parts])
        needed = [name for name in self.before if name.startswith('backbone.')] or [*self.before]
        if (whole and unset) or (needed and set(needed) <= set(unset)):
            raise LaunchError(f'{source} does not fit the model: {text}{hint and f"; {hint}"}')
        level = logging.WARNING if unset else logging.INFO
        MMLogger.get_current_instance().log(level, f'{source}: {text}', extra=dict(on_console=True))


def _counted(names: Iterable[str]) -> list[str]:
    return [name.removeprefix('module.') for name in names if not name.endswith('num_batches_tracked')]


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
        whole: See :meth:`Fit.report`.
        hint: The remedy in the message.

    Raises:
        LaunchError: The file cannot be read, or it does not fit.
    """
    if path is None or osp.isdir(path):
        return
    source, model = f'{argument} {path}', _unwrap(model)
    weights = state_dict_of(read_whole(path, argument) if content is None else content, source)
    fit = Fit(model)
    checkpoint._load_checkpoint_to_model(model, dict(state_dict=weights), logger='silent')
    fit.report(weights, source, whole, hint)


def watch_pretrained(model: nn.Module) -> None:
    """Check the files of each ``init_cfg=dict(type='Pretrained')``, and let ``init_weights`` log how much fits.

    ``init_weights`` will raise LaunchError for a file of which no tensor of the module, or of its backbone, fits.

    Raises:
        LaunchError: A local file is missing or unreadable, or has no entry with the prefix.
    """
    for name, module in _unwrap(model).named_modules():
        configs = getattr(module, 'init_cfg', None) or ()
        for config in [configs] if isinstance(configs, dict) else configs:
            if 'Pretrained' in str(config.get('type')):
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
    started: list[tuple[Fit, list[str]]] = []
    done = []

    def begin(state_dict: dict, prefix: str, *_: Any) -> None:
        if not done:
            started.append((Fit(module), [name.removeprefix(prefix) for name in state_dict]))

    def end(loaded: nn.Module, _: Any) -> None:
        if loaded is module and not done:  # an EMAHook copies the model together with these hooks
            done.append(True)
            fit, entries = started[-1]
            fit.report(entries, source)

    module._register_load_state_dict_pre_hook(begin)
    module.register_load_state_dict_post_hook(end)
