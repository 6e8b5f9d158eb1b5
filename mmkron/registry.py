"""Child registries of MMEngine's roots under the scope ``mmkron``.

MMEngine imports this module when it meets the prefix, so ``type='mmkron.KANet'`` resolves in any host config
without ``custom_imports``.
"""

from __future__ import annotations

import pkgutil
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from mmengine.registry import DATASETS as MMENGINE_DATASETS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import RUNNERS as MMENGINE_RUNNERS
from mmengine.registry import STRATEGIES as MMENGINE_STRATEGIES
from mmengine.registry import TRANSFORMS as MMENGINE_TRANSFORMS
from mmengine.registry import Registry as MMEngineRegistry

ROOT = Path(__file__).resolve().parent


class Registry(MMEngineRegistry):
    """Registry that lets a class replace itself, when its module is reloaded or a notebook's cell runs again.

    Another class of a registered name is an error, as in MMEngine.
    """

    def _register_module(self, module: Any, module_name: str | list[str] | None = None, force: bool = False) -> None:
        names = module_name if isinstance(module_name, list) else [module_name or getattr(module, '__name__', None)]
        taken = [self._module_dict[name] for name in names if name in self._module_dict]
        same = all(_origin(other) == _origin(module) for other in taken)
        super()._register_module(module, module_name, force or same)


def _origin(module: Any) -> tuple[Any, Any]:
    return getattr(module, '__module__', None), getattr(module, '__qualname__', None)


class PackageRegistry(Registry):
    """Registry whose locations are packages: a look-up imports every module in them, so a new file needs no list."""

    def import_from_location(self) -> None:
        if self._imported:
            return
        super().import_from_location()
        try:
            for location in self._locations:
                for module in pkgutil.iter_modules(import_module(location).__path__):
                    import_module(f'{location}.{module.name}')
        except Exception:
            self._imported = False  # so that the next look-up tells the cause again
            raise


class ModelRegistry(Registry):
    """Registry that imports components which subclass a host library's class only when they are looked up."""

    # file or folder of mmkron -> the host library that its modules import
    HOSTS = {'models/decode_heads': 'mmseg', 'models/data_preprocessors.py': 'mmpretrain'}

    @cached_property
    def NEEDS_HOST(self) -> dict[str, tuple[str, str]]:  # noqa: N802
        """Name -> module and host of each component in :attr:`HOSTS`, read from the sources without the host."""
        found = {}
        for place, host in self.HOSTS.items():
            path = ROOT / place
            for file in sorted(path.glob('*.py')) if path.is_dir() else [path]:
                module = '.'.join(('mmkron', *file.relative_to(ROOT).with_suffix('').parts))
                for name in re.findall(r'^@MODELS\.register_module\(\)\nclass (\w+)', file.read_text('utf-8'), re.M):
                    found[name] = module, host
        return found

    def get(self, key: str) -> type | None:
        """Return the class registered as ``key``.

        Raises:
            ImportError: If the host library that the class needs cannot be imported.
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
DATASETS = PackageRegistry('dataset', parent=MMENGINE_DATASETS, locations=['mmkron.datasets'])
TRANSFORMS = PackageRegistry('transform', parent=MMENGINE_TRANSFORMS, locations=['mmkron.datasets'])
RUNNERS = Registry('runner', parent=MMENGINE_RUNNERS, locations=['mmkron.engine.flexible'])
STRATEGIES = Registry('strategy', parent=MMENGINE_STRATEGIES, locations=['mmkron.engine.flexible'])
HOOKS = Registry('hook', parent=MMENGINE_HOOKS, locations=['mmkron.engine.hooks'])
