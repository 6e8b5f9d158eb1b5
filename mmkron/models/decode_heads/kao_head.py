"""The attention operators as a segmentation head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmcv.cnn import ConvModule
from torch import Tensor

from mmkron.layers.initialize import initialize
from mmkron.layers.kronecker_attention import KroneckerAttention2d
from mmkron.models.decode_heads.base import DecodeHead
from mmkron.ops.column_attention import NORMS
from mmkron.ops.kronecker import MODES
from mmkron.registry import MODELS
from mmkron.utils.checks import check_choice, check_flags, check_int


@MODELS.register_module()
class KAOHead(DecodeHead):
    """Kronecker attention as the output part of a segmentation network: reduce, attend, add, classify.

    A convolution reduces the features, the attention of the reduced map is added to it, and a 1 x 1 convolution
    classifies. The sum matters: the output of KAO_QKV is a row term plus a column term in every channel, so without the
    map itself beside it no object could be told from its row and its column. The value map starts at zero, so the head
    starts as a plain convolutional one.

    Source: Kronecker Attention Networks (KDD 2020), section 4.5: attention in the place of ASPP, with linear maps on
    query, key and value. The text does not fix the reduction and the sum; they are this project's.

    Args:
        in_channels: channels of the features.
        channels: channels of the reduced map, on which the attention works.
        mode: ``kv``, ``qkv``, ``dense`` or ``pooled``.
        maps: which of q, k and v get a linear map.
        key_channels: width of the mapped query and key. Defaults to ``channels``.
        use_scale: divide the coefficients by the square root of ``key_channels``. The paper does not.
        attention_norm: ``softmax``, ``bn_softmax`` or ``bn``, how the coefficients are normalised.
        kernel_size: of the reducing convolution, odd.
        **kwargs: the others of MMSegmentation's ``BaseDecodeHead``: ``num_classes``, ``norm_cfg``, ``in_index``, ...

    Raises:
        TypeError, ValueError: an argument outside these choices.
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        channels: int,
        *,
        mode: str = 'kv',
        maps: str = 'qkv',
        key_channels: int | None = None,
        use_scale: bool = False,
        attention_norm: str = 'softmax',
        kernel_size: int = 3,
        **kwargs: Any,
    ) -> None:
        check_int('channels', channels)
        check_int('kernel_size', kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(f'kernel_size must be odd, got {kernel_size!r}')
        check_choice('mode', mode, MODES)
        check_flags(use_scale=use_scale)
        check_choice('attention_norm', attention_norm, NORMS)
        super().__init__(in_channels, channels, **kwargs)
        self.reduce = ConvModule(
            self.in_channels,
            channels,
            kernel_size,
            padding=kernel_size // 2,
            conv_cfg=self.conv_cfg,
            norm_cfg=self.norm_cfg,
            act_cfg=self.act_cfg,
        )
        width = channels if key_channels is None else key_channels
        check_int('key_channels', width)
        scale = width**-0.5 if use_scale else 1.0
        self.attention = KroneckerAttention2d(
            channels, mode, maps, key_channels, norm=attention_norm, scale=scale, residual=True
        )
        initialize(self)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Features of a backbone, of which ``in_index`` picks (B, in_channels, H, W) -> logits (B, num_classes, H, W).

        Raises:
            ValueError: features of other channels.
        """
        x = self.reduce(self._transform_inputs(inputs))
        return self.cls_seg(self.attention(x))
