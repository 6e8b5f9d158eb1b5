"""Normalization layers built from MMCV's configs."""

from __future__ import annotations

import torch.nn as nn

from mmkron.layers.configs import check_norm_cfg


def build_norm(norm_cfg: dict | None, channels: int) -> nn.Module:
    """Build a normalization layer from MMCV's ``norm_cfg``, or batch norm if it is None.

    Raises:
        TypeError: If ``norm_cfg`` is neither None nor a dict.
        ValueError: If MMCV cannot build a norm from ``norm_cfg``.
    """
    if norm_cfg is None:
        return nn.BatchNorm2d(channels)
    check_norm_cfg(norm_cfg)
    from mmcv.cnn import build_norm_layer  # a layer without norm_cfg needs no MMCV

    return build_norm_layer(norm_cfg, channels)[1]
