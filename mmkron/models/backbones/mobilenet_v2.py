"""Parts that networks with the layout of MobileNetV2 share: the blocks of each stage, and their channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mmkron.models.backbones.base import Backbone
from mmkron.utils.checks import check_choice, check_int, check_sequence

# MobileNetV2's channels of the first and of the last convolution.
STEM_CHANNELS = 32
LAST_CHANNELS = 1280


class BlockSpec(NamedTuple):
    """Settings of one block.

    Attributes:
        module: Kind of the block.
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        expansion: Factor of the expansion.
        stride: 1 or 2.
        number: Position of the block in the network, from 1.
    """

    module: str
    in_channels: int
    out_channels: int
    expansion: int
    stride: int
    number: int


class MobileBackbone(Backbone):
    """Backbone whose stages are lists of :class:`BlockSpec`, followed by a 1 x 1 convolution as the last stage.

    Its blocks leave the initialization of their convolutions to the network's ``init_cfg``.
    """

    def finish_stages(self, stages: Sequence[Sequence[BlockSpec]], stem_stride: int, last_channels: int) -> None:
        """Publish the channels and strides of all stages, then initialize and freeze.

        The last line of a subclass's constructor.

        Args:
            stages: Blocks of each stage of the whole network.
            stem_stride: Stride of the first convolution.
            last_channels: Channels of the last convolution.
        """
        channels, strides = [], [stem_stride]
        for blocks in stages:
            channels.append(blocks[-1].out_channels)
            strides.append(strides[-1] * blocks[0].stride)
        self.finish([*channels, last_channels], [*strides[1:], strides[-1]])


def resolve_stages(layout: Sequence[Sequence], widen_factor: float) -> list[list[BlockSpec]]:
    """Return the blocks of each stage of a layout.

    Args:
        layout: Rows (module, expansion, channels, repeats, stride of the first block), see :func:`group_rows`.
        widen_factor: Factor on all channels, see :func:`scale_channels`.

    Raises:
        TypeError: If ``layout`` is not a sequence, or a number in a row is not an int.
        ValueError: If ``layout`` is empty, or a row has another length or a number out of range.
    """
    stages = []
    in_channels, number = scale_channels(STEM_CHANNELS, widen_factor), 0
    for rows in group_rows(layout):
        blocks = []
        for module, expansion, channels, repeats, first_stride in rows:
            out_channels = scale_channels(channels, widen_factor)
            for repeat in range(repeats):
                number += 1
                stride = first_stride if repeat == 0 else 1
                blocks.append(BlockSpec(module, in_channels, out_channels, expansion, stride, number))
                in_channels = out_channels
        stages.append(blocks)
    return stages


def group_rows(layout: Sequence[Sequence]) -> list[list[Sequence]]:
    """Group the rows of a layout by stage: each row of stride 2 begins a new one.

    Raises:
        TypeError: If ``layout`` is not a sequence, or a number in a row is not an int.
        ValueError: If ``layout`` is empty, or a row has another length or a number out of range.
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
    """Return the multiple of 8 nearest to ``channels * factor``, but at least 8 and at least 90 % of it.

    This is the rule of MobileNetV2's reference implementation.
    """
    exact = channels * factor
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * exact else rounded + 8
