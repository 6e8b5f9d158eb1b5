"""Base class of the decode heads, with clear errors for features or labels that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.utils import SampleList
from torch import Tensor

from mmkron.ops.checks import check_map
from mmkron.utils.checks import check_choice, check_int, check_ints, check_sequence


class DecodeHead(BaseDecodeHead):
    """Base class that checks the channels of the features and the values of the labels.

    The arguments are those of MMSegmentation's ``BaseDecodeHead``. ``input_transform`` must be None or
    ``'resize_concat'``, since these heads work on one map.

    Raises:
        TypeError: If ``in_channels`` is not an int, or with ``'resize_concat'`` not a sequence of ints.
        ValueError: If ``input_transform`` is another one.
    """

    def _init_inputs(
        self, in_channels: int | Sequence[int], in_index: int | Sequence[int], input_transform: str | None
    ) -> None:
        check_choice('input_transform', input_transform, (None, 'resize_concat'))
        if input_transform is None:
            check_int('in_channels', in_channels)
        else:
            check_ints('in_channels', in_channels)
        super()._init_inputs(in_channels, in_index, input_transform)

    # Every head calls this first, so features that do not fit raise this error instead of one of a convolution.
    def _transform_inputs(self, inputs: Sequence[Tensor]) -> Tensor:
        check_sequence('inputs', inputs)
        for index in [self.in_index] if isinstance(self.in_index, int) else self.in_index:
            if not -len(inputs) <= index < len(inputs):
                raise ValueError(f'in_index must select one of the {len(inputs)} inputs, got {index!r}')
            check_map('inputs', inputs[index])
        x = super()._transform_inputs(inputs)
        if x.shape[1] != self.in_channels:
            raise ValueError(
                f'in_channels of {type(self).__name__} is {self.in_channels}, but the features of '
                f'in_index={self.in_index!r} have {x.shape[1]} channels'
            )
        return x

    def loss_by_feat(self, seg_logits: Tensor, batch_data_samples: SampleList) -> dict[str, Tensor]:
        """Return the losses of logits (B, num_classes, h, w) with respect to the labels of ``batch_data_samples``.

        Raises:
            ValueError: If a label is neither a class nor ``ignore_index``.
        """
        labels = self._stack_batch_gt(batch_data_samples)
        # One logit separates two classes, whether num_classes counts the background or not.
        classes = max(self.num_classes, 2) if self.out_channels == 1 else self.num_classes
        wrong = (labels < 0) | (labels >= classes)
        if self.ignore_index is not None:
            wrong &= labels != self.ignore_index
        if wrong.any():
            sample = batch_data_samples[int(wrong.flatten(1).any(1).nonzero()[0])]
            raise ValueError(
                f'label {int(labels[wrong][0])} in {sample.get("seg_map_path", "a label map")} must be in '
                f'[0, {classes - 1}] (num_classes={self.num_classes}) or ignore_index={self.ignore_index}'
            )
        return super().loss_by_feat(seg_logits, batch_data_samples)
