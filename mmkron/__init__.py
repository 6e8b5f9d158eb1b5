"""Efficient long-range operators as components of OpenMMLab: Kronecker attention, lambda layers, spiking attention."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mmkron.version import __version__

if TYPE_CHECKING:
    from mmkron.model_zoo import get_config, list_configs, register_models
    from mmkron.utils.collect_env import compat_report
    from mmkron.utils.weights import allow_checkpoint_globals

__all__ = [
    '__version__',
    'allow_checkpoint_globals',
    'compat_report',
    'get_config',
    'list_configs',
    'register_models',
]

# Imported lazily: `import mmkron` alone loads neither MMEngine nor a host library.
_MODULES = {
    'allow_checkpoint_globals': 'mmkron.utils.weights',
    'compat_report': 'mmkron.utils.collect_env',
    'get_config': 'mmkron.model_zoo',
    'list_configs': 'mmkron.model_zoo',
    'register_models': 'mmkron.model_zoo',
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
