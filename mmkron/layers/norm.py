"""Normalisation by the names of MMCV."""

from __future__ import annotations

import torch.nn as nn


def build_norm(norm_cfg: dict | None, channels: int) -> nn.Module:
    """Batch norm, or what ``norm_cfg`` says by the names of MMCV."""
    if norm_cfg is None:
        return nn.BatchNorm2d(channels)
    from mmcv.cnn import build_norm_layer  # MMCV knows the names; a layer without norm_cfg needs no MMCV

    return build_norm_layer(norm_cfg, channels)[1]
