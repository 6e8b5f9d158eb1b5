"""Checks of the host libraries' configs in the constructor, so that an error names the argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmengine.registry import WEIGHT_INITIALIZERS


def check_norm_cfg(norm_cfg: Any) -> None:
    """Raise TypeError or ValueError unless ``norm_cfg`` is None or a config from which MMCV can build a norm."""
    if norm_cfg is not None:
        from mmcv.cnn import build_norm_layer  # a layer without norm_cfg needs no MMCV

        _try('norm_cfg', norm_cfg, lambda cfg: build_norm_layer(cfg, cfg.get('num_groups', 8)))


def check_act_cfg(act_cfg: Any) -> None:
    """Raise TypeError or ValueError unless ``act_cfg`` is None or a config from which MMCV can build an activation."""
    if act_cfg is not None:
        from mmcv.cnn import build_activation_layer

        _try('act_cfg', act_cfg, build_activation_layer)


def check_init_cfg(init_cfg: Any) -> None:
    """Raise TypeError or ValueError unless ``init_cfg`` is None, an initializer's config or a list of such configs."""
    if init_cfg is None:
        return
    if not isinstance(init_cfg, (Mapping, list, tuple)) or not init_cfg:
        raise TypeError(f'init_cfg must be None, a dict or a list of dicts, not empty, got {init_cfg!r}')
    for cfg in [init_cfg] if isinstance(init_cfg, Mapping) else init_cfg:
        _try('init_cfg', cfg, lambda cfg: WEIGHT_INITIALIZERS.build({k: v for k, v in cfg.items() if k != 'override'}))


def _try(name: str, cfg: Any, build: Callable[[dict], Any]) -> None:
    """Raise TypeError or ValueError unless ``build`` succeeds with ``cfg``."""
    if not isinstance(cfg, Mapping):
        raise TypeError(f'{name} must be a dict, got {cfg!r}')
    try:
        build(dict(cfg))
    except Exception as error:  # registries and classes raise errors of many types
        raise ValueError(f'{name} must be the config of a class that can be built, got {cfg!r}: {error}') from error
