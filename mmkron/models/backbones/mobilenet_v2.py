"""The skeleton of MobileNetV2: rows of blocks between a first convolution and a last one of 1 x 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn as nn
from mmcv.cnn import ConvModule
from mmengine.model import ModuleList, Sequential

from mmkron.models.backbones.base import Backbone
from mmkron.utils.checks import check_choice, check_int, check_sequence


class MobileBackbone(Backbone):
    """A backbone that calls :meth:`build` at the end of its init.

    Its blocks leave the initialisation of their convolutions to the network's ``init_cfg``.
    """

    def build(
        self,
        rows: Sequence[Sequence[Sequence]],
        widen_factor: float,
        stem_stride: int,
        make_block: Callable[..., nn.Module],
        norms: Mapping[str, Any],
    ) -> None:
        """Makes stem, stages and last convolution.

        Args:
            rows: those of each stage, see :func:`group_rows`.
            widen_factor: factor on all channels but the last ones, which are never narrowed.
            stem_stride: stride of the first convolution.
            make_block: from module, channels of input and output, expansion, stride and the block's number from 1.
            norms: normalisation and activation, as ``norm_cfg`` and ``act_cfg``.
        """
        width = scale_channels(32, widen_factor)
        self.stem = nn.Sequential(ConvModule(self.in_channels, width, 3, stem_stride, 1, **norms))
        # MMEngine's containers: through them it reaches the init_weights of the blocks.
        self.stages = ModuleList()
        stride, number, channels, strides = stem_stride, 0, [], []
        for stage_rows in rows[: self.last_stage + 1]:
            blocks = []
            for module, expansion, out_width, repeats, first_stride in stage_rows:
                out_width = scale_channels(out_width, widen_factor)
                for repeat in range(repeats):
                    block_stride = first_stride if repeat == 0 else 1
                    number += 1
                    blocks.append(make_block(module, width, out_width, expansion, block_stride, number))
                    width, stride = out_width, stride * block_stride
            self.stages.append(Sequential(*blocks))
            channels.append(width)
            strides.append(stride)
        if self.last_stage == len(rows):
            last_width = scale_channels(1280, max(1.0, widen_factor))
            self.stages.append(nn.Sequential(ConvModule(width, last_width, 1, **norms)))
            channels.append(last_width)
            strides.append(stride)
        self.finish(channels, strides)


def group_rows(layout: Sequence[Sequence]) -> list[list[Sequence]]:
    """The rows of a layout by stage: each row of stride 2 begins one.

    Raises:
        TypeError, ValueError: no rows, or a row that is not module, expansion, channels, repeats, stride.
    """
    check_sequence('layout', layout)
    stages: list[list[Sequence]] = [[]]
    for row in layout:
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 5:
            raise ValueError(f'a row of layout must be (module, expansion, channels, repeats, stride), got {row!r}')
        check_int('channels of a row', row[2])
        check_int('repeats of a row', row[3])
        check_choice('stride', row[4], (1, 2))
        if row[4] == 2 and stages[-1]:
            stages.append([])
        stages[-1].append(row)
    return stages


def scale_channels(channels: int, factor: float) -> int:
    """The multiple of 8 next to ``channels * factor``, at least 8 and at most a tenth below it (MobileNetV2's rule)."""
    exact = channels * factor
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * exact else rounded + 8
