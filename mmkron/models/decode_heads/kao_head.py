"""A segmentation head with Kronecker attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmcv.cnn import ConvModule
from torch import Tensor

from mmkron.layers.initialize import initialize
from mmkron.layers.kronecker_attention import REDUCTIONS, KroneckerAttention2d
from mmkron.models.decode_heads.base import DecodeHead
from mmkron.ops.kronecker import NORMS
from mmkron.registry import MODELS
from mmkron.utils.checks import check_choice, check_flags, check_int


@MODELS.register_module()
class KAOHead(DecodeHead):
    """Segmentation head that reduces the features, adds the attention of the reduced map to it, and classifies.

    From `Kronecker Attention Networks <https://arxiv.org/abs/2007.08442>`_ (KDD 2020), section 4.5: attention instead
    of ASPP, with linear maps on query, key and value. The text does not specify the reduction and the sum; they are
    choices of this project. The sum matters: in every channel, the output of KAO_QKV is a row term plus a column term,
    which alone cannot separate an object from its row and its column. The value map starts at zero, so the head starts
    as a plain convolutional head.

    Args:
        in_channels: Channels of the features.
        channels: Channels of the reduced map, on which the attention works.
        mode: ``'kv'``, ``'qkv'``, ``'dense'`` or ``'pooled'``.
        maps: Which of q, k and v have a linear map, as a string of these letters.
        key_channels: Channels of the mapped query and key. Defaults to ``channels``.
        use_scale: Whether to divide the coefficients by the square root of ``key_channels``. The paper does not.
        attention_norm: Normalization of the coefficients: ``'softmax'``, ``'bn_softmax'`` or ``'bn'``.
        kernel_size: Kernel size of the reducing convolution, odd.
        **kwargs: Other arguments of MMSegmentation's ``BaseDecodeHead``, such as ``num_classes`` and ``norm_cfg``.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``mode`` or ``attention_norm`` is unknown, ``kernel_size`` is even, or the channels do not match
            ``maps``.

    Examples:
        >>> import torch
        >>> head = KAOHead(64, 16, mode='qkv', num_classes=19)
        >>> head([torch.randn(2, 64, 9, 7)]).shape
        torch.Size([2, 19, 9, 7])
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
        check_choice('mode', mode, REDUCTIONS)
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
        """Return logits (B, num_classes, H, W) for the features (B, in_channels, H, W) at ``in_index``.

        Raises:
            ValueError: If the features do not have ``in_channels`` channels.
        """
        x = self.reduce(self._transform_inputs(inputs))
        return self.cls_seg(self.attention(x))
