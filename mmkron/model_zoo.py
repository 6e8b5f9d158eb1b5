"""Find the shipped configs by name, and register them in MMPretrain's model index."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from mmengine.config import Config

PACKAGE = Path(__file__).resolve().parent


def index_root() -> Path:
    """Return the folder of ``model-index.yml`` and ``configs``: ``mmkron/.mim`` when installed, else the source tree.

    Raises:
        FileNotFoundError: The package was copied without them.
    """
    for root in (PACKAGE / '.mim', PACKAGE.parent):
        if (root / 'model-index.yml').is_file():
            return root
    raise FileNotFoundError(
        f'{PACKAGE / ".mim" / "model-index.yml"} is missing: install mmkron by pip, which puts the configs there'
    )


@cache
def load_metafiles() -> tuple[list[dict], list[dict]]:
    """Return the collections and the models of all metafiles."""
    root = index_root()
    collections, models = [], []
    for name in yaml.safe_load((root / 'model-index.yml').read_text(encoding='utf-8'))['Import']:
        content = yaml.safe_load((root / name).read_text(encoding='utf-8'))
        collections += content['Collections']
        models += content['Models']
    return collections, models


@cache
def _config_paths() -> dict[str, str]:
    """Return the path of each config relative to :func:`index_root`, by all its names in lower case."""
    paths: dict[str, str] = {}
    for model in load_metafiles()[1]:
        path = model['Config']
        aliases = model.get('Alias') or []
        aliases = [aliases] if isinstance(aliases, str) else aliases
        for name in (model['Name'], Path(path).stem, *aliases):
            if paths.setdefault(name.lower(), path) != path:
                raise ValueError(f'the metafiles give the name {name!r} to both {paths[name.lower()]} and {path}')
    return paths


def list_configs(pattern: str = '*') -> list[str]:
    """List the names that :func:`get_config` takes: models, their aliases, and file names without ``.py``.

    Args:
        pattern: A wildcard pattern for the whole name, such as ``'*kanet*'``. The case does not matter.

    Raises:
        TypeError: ``pattern`` is not a string.
    """
    if not isinstance(pattern, str):
        raise TypeError(f'pattern must be a str, got {pattern!r}')
    return sorted(name for name in _config_paths() if fnmatch(name, pattern.lower()))


def get_config(name: str) -> Config:
    """Load a shipped config by name.

    ``mmpretrain.get_model``, ``mmdet.apis.DetInferencer`` and ``mmseg.apis.MMSegInferencer`` take it as ``model``. A
    runner also needs a ``work_dir``, and with MMPretrain the settings of data loaders that ``tools/train.py`` adds.

    Args:
        name: One of :func:`list_configs`, such as ``'kanet-kv_8xb64_in1k'``. The case does not matter.

    Returns:
        A new config at each call.

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: There is no such config.
    """
    if not isinstance(name, str):
        raise TypeError(f'name must be a str, got {name!r}')
    paths = _config_paths()
    path = paths.get(name.lower())
    if path is None:
        similar = ', '.join(get_close_matches(name.lower(), paths, n=5, cutoff=0.5)) or 'none'
        raise ValueError(f'name must be one of mmkron.list_configs(), got {name!r}; similar names: {similar}')
    from mmengine.config import Config

    return Config.fromfile(index_root() / path)


def register_models() -> list[str]:
    """Register the classifiers of mmkron in MMPretrain's model index.

    Then ``mmpretrain.list_models('*kanet*')`` lists them, and ``mmpretrain.get_model`` and MMPretrain's inferencers
    take their names. A second call changes nothing. There are no released weights: pass a checkpoint as
    ``pretrained``.

    Returns:
        The names of all classifiers.

    Raises:
        ImportError: MMPretrain cannot be imported.
    """
    try:
        from mmpretrain.apis.model import ModelHub
    except (ImportError, AssertionError) as error:  # it asserts the versions that it supports
        from mmkron.utils.collect_env import remedy_of

        remedy = remedy_of(error) or 'docs/install.md says how to install it'
        raise ImportError(f'register_models() needs mmpretrain, which cannot be imported: {error}\n{remedy}') from error
    collections, models = load_metafiles()
    models = [
        model for model in models if any(result['Task'] == 'Image Classification' for result in model['Results'] or ())
    ]
    new = [model for model in models if not ModelHub.has(model['Name'].lower())]
    if new:
        # The hub reads whole files and takes every model for a classifier, so it gets a file of classifiers only.
        with TemporaryDirectory() as folder:
            index = Path(folder) / 'model-index.yml'
            index.write_text(yaml.safe_dump(dict(Collections=collections, Models=new)), encoding='utf-8')
            ModelHub.register_model_index(index, config_prefix=index_root())
    return [model['Name'] for model in models]
