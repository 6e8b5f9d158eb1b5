"""Normalisation by the names of MMCV."""

from __future__ import annotations

import torch.nn as nn

from mmkron.layers.configs import check_norm_cfg


def build_norm(norm_cfg: dict | None, channels: int) -> nn.Module:
    """Return batch norm, or what ``norm_cfg`` says by the names of MMCV.

    Raises:
        TypeError, ValueError: ``norm_cfg`` is neither None nor the config of a norm.
    """
    if norm_cfg is None:
        return nn.BatchNorm2d(channels)
    check_norm_cfg(norm_cfg)
    from mmcv.cnn import build_norm_layer  # MMCV knows the names; a layer without norm_cfg needs no MMCV

    return build_norm_layer(norm_cfg, channels)[1]
