"""Child registries of MMEngine's roots under the scope ``mmkron``.

MMEngine imports this module when it meets the prefix, so ``type='mmkron.KANet'`` resolves in any host config
without ``custom_imports``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmengine.registry import DATASETS as MMENGINE_DATASETS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import RUNNERS as MMENGINE_RUNNERS
from mmengine.registry import STRATEGIES as MMENGINE_STRATEGIES
from mmengine.registry import TRANSFORMS as MMENGINE_TRANSFORMS
from mmengine.registry import Registry as MMEngineRegistry


class Registry(MMEngineRegistry):
    """Registry that lets a class replace itself: its module is reloaded, or a notebook's cell runs again.

    Another class of a registered name is an error, as in MMEngine.
    """

    def _register_module(self, module: Any, module_name: str | list[str] | None = None, force: bool = False) -> None:
        names = module_name if isinstance(module_name, list) else [module_name or getattr(module, '__name__', None)]
        taken = [self._module_dict[name] for name in names if name in self._module_dict]
        same = all(_origin(other) == _origin(module) for other in taken)
        super()._register_module(module, module_name, force or same)


def _origin(module: Any) -> tuple[Any, Any]:
    return getattr(module, '__module__', None), getattr(module, '__qualname__', None)


class ModelRegistry(Registry):
    """Registry that imports what derives from a host library's class only when it is asked for."""

    # name -> module that registers it, and the host library that the module imports
    NEEDS_HOST = {
        'ASPPV2Head': ('mmkron.models.decode_heads', 'mmseg'),
        'EventDataPreprocessor': ('mmkron.models.data_preprocessors', 'mmpretrain'),
        'KAOHead': ('mmkron.models.decode_heads', 'mmseg'),
    }

    def get(self, key: str) -> type | None:
        """The class registered as ``key``.

        Raises:
            ImportError: the host library that the class needs cannot be imported.
        """
        name = key.removeprefix('mmkron.') if isinstance(key, str) else key
        if name in self.NEEDS_HOST:
            module, host = self.NEEDS_HOST[name]
            try:
                import_module(module)
            except (ImportError, AssertionError) as error:  # hosts assert the versions that they work with
                raise ImportError(f'mmkron.{name} needs {host}, which cannot be imported: {error}') from error
        return super().get(key)


MODELS = ModelRegistry('model', parent=MMENGINE_MODELS, locations=['mmkron.models'])
DATASETS = Registry('dataset', parent=MMENGINE_DATASETS, locations=['mmkron.datasets'])
TRANSFORMS = Registry('transform', parent=MMENGINE_TRANSFORMS, locations=['mmkron.datasets'])
RUNNERS = Registry('runner', parent=MMENGINE_RUNNERS, locations=['mmkron.engine.flexible'])
STRATEGIES = Registry('strategy', parent=MMENGINE_STRATEGIES, locations=['mmkron.engine.flexible'])
HOOKS = Registry('hook', parent=MMENGINE_HOOKS, locations=['mmkron.engine.hooks'])
