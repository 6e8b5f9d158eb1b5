"""Data preprocessor for MMPretrain. Importing this module imports MMPretrain."""

from __future__ import annotations

from mmpretrain.models.utils import ClsDataPreprocessor
from torch import Tensor

from mmkron.registry import MODELS
from mmkron.utils.checks import check_int, check_keys


@MODELS.register_module()
class EventDataPreprocessor(ClsDataPreprocessor):
    """Data preprocessor that batches event frames to (B, T, C, H, W) and, in training, mixes them along H and W.

    MMPretrain's ``CutMix`` and ``ResizeMix`` cut dimensions 2 and 3 of a batch, which in (B, T, C, H, W) are C and H.
    Here they get frames folded into channels, (B, T C, H, W), so that all frames of a sample are cut in the same place.
    ``Mixup`` has the same result in both layouts.

    Args:
        num_classes: Number of classes, needed to mix labels.
        batch_augments: Arguments of MMPretrain's ``RandomBatchAugment``. A classifier passes its ``train_cfg``.
        pad_size_divisor: Multiple to which H and W are padded with zeros.

    Raises:
        TypeError: If a number is not an int, or ``batch_augments`` is neither None nor a dict.
        ValueError: If a number is below 1, or ``batch_augments`` has unknown keys.
    """

    def __init__(
        self, num_classes: int | None = None, batch_augments: dict | None = None, pad_size_divisor: int = 1
    ) -> None:
        if num_classes is not None:
            check_int('num_classes', num_classes)
        check_keys('batch_augments', batch_augments, ('augments', 'probs'))
        check_int('pad_size_divisor', pad_size_divisor)
        super().__init__(
            pad_size_divisor=pad_size_divisor, num_classes=num_classes, batch_augments=batch_augments or None
        )

    def forward(self, data: dict, training: bool = False) -> dict:
        """Collate ``inputs`` of a batch to (B, T, C, H, W), float32, and set up ``data_samples``.

        Raises:
            TypeError: If the inputs are not tensors.
            ValueError: If the inputs are not (T, C, H, W), or differ in T or C.
        """
        inputs = data['inputs']
        frames = list(inputs) if isinstance(inputs, (list, tuple, Tensor)) else [inputs]
        for each in frames:
            if not isinstance(each, Tensor):
                raise TypeError(f'inputs must be tensors (T, C, H, W), got {type(each).__name__}')
            if each.dim() != 4 or each.shape[:2] != frames[0].shape[:2]:
                shapes = [tuple(item.shape) for item in frames]
                raise ValueError(
                    f'inputs must be frames (T, C, H, W) of the same T and C, got shapes {shapes}; mmkron.PadFrames '
                    'makes T equal'
                )
        batch = super().forward(dict(data, inputs=[each.flatten(0, 1) for each in frames]), training)
        batch['inputs'] = batch['inputs'].unflatten(1, tuple(frames[0].shape[:2]))
        return batch
