"""Segmentation head with Kronecker attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmcv.cnn import ConvModule
from torch import Tensor

from mmkron.layers.initialize import initialize
from mmkron.layers.kronecker_attention import KroneckerAttention2d, attention_scale
from mmkron.models.decode_heads.base import DecodeHead
from mmkron.ops.column_attention import NORMS
from mmkron.ops.kronecker import MODES
from mmkron.registry import MODELS
from mmkron.utils.checks import check_choice, check_int


@MODELS.register_module()
class KAOHead(DecodeHead):
    """Segmentation head that reduces the features, adds their Kronecker attention and classifies.

    From `Kronecker Attention Networks <https://arxiv.org/abs/2007.08442>`_ (KDD 2020), section 4.5: attention instead
    of ASPP, with linear maps on query, key and value. The paper does not specify the reducing convolution and the sum;
    they are choices of this project. The sum matters: every channel of KAO_QKV's output is a row term plus a column
    term, which alone cannot separate an object from others in its row and its column. The value map starts at zero, so
    the head starts as a plain convolutional one.

    Args:
        in_channels: Channels of the features.
        channels: Channels of the reduced map, to which the attention applies.
        mode: ``'kv'``, ``'qkv'``, ``'dense'`` or ``'pooled'``.
        maps: Which of q, k and v have a linear map.
        key_channels: Channels of the mapped query and key. Defaults to ``channels``.
        use_scale: Whether to divide the coefficients by the square root of ``key_channels``. The paper does not.
        attention_norm: Normalization of the coefficients: ``'softmax'``, ``'bn_softmax'`` or ``'bn'``.
        kernel_size: Size of the reducing convolution, odd.
        **kwargs: Other arguments of MMSegmentation's ``BaseDecodeHead``, such as ``num_classes`` and ``norm_cfg``.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If ``kernel_size`` is even, a number is less than 1, or ``mode``, ``maps``, ``attention_norm`` or
            ``input_transform`` is unknown.

    Examples:
        >>> import torch
        >>> head = KAOHead(64, 16, num_classes=21, in_index=1)
        >>> features = [torch.randn(2, 32, 40, 56), torch.randn(2, 64, 20, 28)]
        >>> head(features).shape
        torch.Size([2, 21, 20, 28])
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
        scale = attention_scale(use_scale, channels if key_channels is None else key_channels)
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
        self.attention = KroneckerAttention2d(
            channels, mode, maps, key_channels, norm=attention_norm, scale=scale, residual=True
        )
        initialize(self)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the logits (B, num_classes, H, W) of the features (B, in_channels, H, W) that ``in_index`` selects.

        Raises:
            ValueError: If the features have other channels.
        """
        x = self.reduce(self._transform_inputs(inputs))
        return self.cls_seg(self.attention(x))
