"""Efficient long-range operators as components of OpenMMLab: Kronecker attention, lambda layers, spiking attention."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mmkron.version import __version__

if TYPE_CHECKING:
    from mmkron.engine.checkpoints import allow_checkpoint_globals
    from mmkron.engine.compat import compat_report
    from mmkron.engine.model_index import get_config, list_configs, register_models

__all__ = [
    '__version__',
    'allow_checkpoint_globals',
    'compat_report',
    'get_config',
    'list_configs',
    'register_models',
]

# Imported when asked for: `import mmkron` alone loads neither MMEngine nor a host library.
_MODULES = {
    'allow_checkpoint_globals': 'mmkron.engine.checkpoints',
    'compat_report': 'mmkron.engine.compat',
    'get_config': 'mmkron.engine.model_index',
    'list_configs': 'mmkron.engine.model_index',
    'register_models': 'mmkron.engine.model_index',
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
