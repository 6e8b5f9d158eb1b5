"""The shipped configs by name, and their entries in MMPretrain's model index."""

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
    """The folder of ``model-index.yml`` and ``configs``: ``mmkron/.mim`` of an install, else the source tree.

    Raises:
        FileNotFoundError: mmkron was copied without them.
    """
    for root in (PACKAGE / '.mim', PACKAGE.parent):
        if (root / 'model-index.yml').is_file():
            return root
    raise FileNotFoundError(
        f'{PACKAGE / ".mim" / "model-index.yml"} is missing: install mmkron by pip, which puts the configs there'
    )


@cache
def load_metafiles() -> tuple[list[dict], list[dict]]:
    """The collections and the models of all metafiles, as they are written there."""
    root = index_root()
    collections, models = [], []
    for name in yaml.safe_load((root / 'model-index.yml').read_text(encoding='utf-8'))['Import']:
        content = yaml.safe_load((root / name).read_text(encoding='utf-8'))
        collections += content['Collections']
        models += content['Models']
    return collections, models


@cache
def _config_paths() -> dict[str, str]:
    """Path below :func:`index_root` by each name that a config goes by, in lower case."""
    paths = {}
    for model in load_metafiles()[1]:
        path = model['Config']
        aliases = model.get('Alias') or []
        for name in (model['Name'], Path(path).stem, *([aliases] if isinstance(aliases, str) else aliases)):
            if paths.setdefault(name.lower(), path) != path:
                raise ValueError(f'the metafiles give the name {name!r} to both {paths[name.lower()]} and {path}')
    return paths


def list_configs(pattern: str = '*') -> list[str]:
    """The names that :func:`get_config` takes: models of the metafiles, their aliases, and file names without ``.py``.

    Args:
        pattern: a wildcard pattern for the whole name, such as ``'*kanet*'``, in any case.

    Raises:
        TypeError: ``pattern`` is no string.
    """
    if not isinstance(pattern, str):
        raise TypeError(f'pattern must be a str, got {pattern!r}')
    return sorted(name for name in _config_paths() if fnmatch(name, pattern.lower()))


def get_config(name: str) -> Config:
    """A shipped config by name, such as ``'kanet-kv_8xb64_in1k'``.

    ``mmpretrain.get_model``, ``mmdet.apis.DetInferencer`` and ``mmseg.apis.MMSegInferencer`` take it as ``model``. A
    runner needs a ``work_dir`` besides, and what ``tools/train.py`` adds for MMPretrain. It is the caller's to change.

    Args:
        name: one of :func:`list_configs`, in any case.

    Raises:
        TypeError: ``name`` is no string.
        ValueError: there is no such config.
    """
    if not isinstance(name, str):
        raise TypeError(f'name must be a str, got {name!r}')
    paths = _config_paths()
    path = paths.get(name.lower())
    if path is None:
        close = get_close_matches(name.lower(), paths, n=5, cutoff=0.5)
        hint = f'close to it: {", ".join(close)}' if close else 'nothing is close to it'
        raise ValueError(f'name must be one of mmkron.list_configs(), got {name!r}; {hint}')
    from mmengine.config import Config

    return Config.fromfile(index_root() / path)


def register_models() -> list[str]:
    """Puts the classifiers of this project into MMPretrain's model index, where it only looks for its own.

    Then ``mmpretrain.list_models('*kanet*')`` lists them; ``mmpretrain.get_model`` and MMPretrain's inferencers take
    their names. A second call changes nothing. There are no released weights: give ``pretrained`` a checkpoint.

    Returns:
        The names of all these classifiers.

    Raises:
        ImportError: MMPretrain cannot be imported.
    """
    try:
        from mmpretrain.apis.model import ModelHub
    except (ImportError, AssertionError) as error:  # it asserts the versions that it works with
        from mmkron.utils.collect_env import remedy_of

        remedy = remedy_of(error) or 'docs/install.md says how to install it'
        raise ImportError(f'register_models() needs mmpretrain, which cannot be imported: {error}\n{remedy}') from error
    collections, models = load_metafiles()
    models = [
        model for model in models if any(result['Task'] == 'Image Classification' for result in model['Results'] or ())
    ]
    new = [model for model in models if not ModelHub.has(model['Name'].lower())]
    if new:
        # The hub reads whole files and takes every model for a classifier, so it gets a file of those.
        with TemporaryDirectory() as folder:
            index = Path(folder) / 'model-index.yml'
            index.write_text(yaml.safe_dump(dict(Collections=collections, Models=new)), encoding='utf-8')
            ModelHub.register_model_index(index, config_prefix=index_root())
    return [model['Name'] for model in models]
