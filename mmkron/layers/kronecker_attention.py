"""Kronecker, dense and pooled attention on feature maps as a layer, also registered as a plug-in for the hosts."""

from __future__ import annotations

import torch
import torch.nn as nn
from mmengine.model import BaseModule
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mmkron.layers.configs import check_init_cfg
from mmkron.layers.empty import empty_map
from mmkron.layers.initialize import initialize
from mmkron.ops.checks import check_map
from mmkron.ops.coefficient_bn import CoefficientBN
from mmkron.ops.column_attention import NORMS, attend, attention_coefficients
from mmkron.ops.kronecker import MODES
from mmkron.registry import MODELS
from mmkron.utils.checks import check_choice, check_flags, check_int, check_number


class CoefficientNorm(nn.BatchNorm2d):
    """Batch norm of the attention coefficients as one channel, whose ``forward`` is the attention that uses them.

    FSDP in mixed precision wraps batch norms separately, and such a wrapper has the weights only during its call.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, norm: str, scale: float) -> Tensor:
        """Return :func:`mmkron.ops.attend` (B, p, n) of columns (B, d, n), (B, d, m) and (B, p, m)."""
        state = coefficient_state(self)
        out = attend(query, key, value, norm, scale, state)
        for buffer, updated in ((self.running_mean, state.running_mean), (self.running_var, state.running_var)):
            if buffer is not None and buffer.dtype != updated.dtype:
                limits = torch.finfo(buffer.dtype)
                buffer.copy_(updated.clamp(limits.min, limits.max))
        return out


def coefficient_state(bn: _BatchNorm, look: bool = False) -> CoefficientBN:
    """Return the parameters and statistics of a batch norm as the operators take them, in float32 or wider.

    In training, count the batch, or leave out the running statistics if ``look``.
    """
    momentum = bn.momentum
    if bn.training and not look:
        bn.num_batches_tracked.add_(1)
        if momentum is None:  # a plain average, as in torch's batch norm
            momentum = 1 / float(bn.num_batches_tracked)
    tensors = (bn.weight, bn.bias, bn.running_mean, bn.running_var)
    tensors = [x if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    if bn.training and look:
        tensors[2:] = None, None
    return CoefficientBN(*tensors, bn.training, momentum, bn.eps)


@MODELS.register_module()
class KroneckerAttention2d(BaseModule):
    """Kronecker, dense or pooled attention with linear maps on the query, the key and the value.

    From `Kronecker Attention Networks <https://arxiv.org/abs/2007.08442>`_ (KDD 2020), sections 2.1 and 3.4. The paper
    maps only the value in classification and all three in segmentation.

    The maps act on the columns that the operator uses, so maps of means cost ``(H + W) C^2`` instead of ``H W C^2``,
    and the query map of KV is merged into the key map (hooks on it are then not called).

    Args:
        channels: Channels of the input map, and of the context unless ``context_channels`` is given.
        mode: ``'kv'``, ``'qkv'``, ``'dense'`` or ``'pooled'``.
        maps: Which of q, k and v have a linear map (1 x 1, no bias), as a string of these letters.
        key_channels: Channels of the mapped query and key. Defaults to ``channels``.
        out_channels: Channels of the mapped value and the output. Defaults to ``channels``.
        context_channels: Channels of the context map of cross-attention. Defaults to ``channels``.
        norm: ``'softmax'``, ``'bn_softmax'`` or ``'bn'`` (see :func:`mmkron.ops.dense_attention`). Batch statistics are
            taken per process, even if other norms are synchronized.
        scale: Factor on the coefficients before their normalization.
        residual: Whether to add the input, as a plug-in layer of an existing network should. The value map then starts
            at zero, so that the layer starts as the identity and trained weights around it keep their meaning.
        in_channels: Alias of ``channels``, used by ``plugins=[...]`` of a host's ResNet.
        init_cfg: Initialization. Defaults to Xavier uniform, as in the paper.

    Raises:
        TypeError: If a number of channels is not an int or ``scale`` is not a number.
        ValueError: If both or neither of ``channels`` and ``in_channels`` are given, ``mode`` or ``norm`` is unknown,
            ``maps`` has other or repeated letters, or channels differ where no map changes them.

    Examples:
        >>> import torch
        >>> layer = KroneckerAttention2d(16, mode='qkv', residual=True)
        >>> layer(torch.randn(2, 16, 20, 28)).shape
        torch.Size([2, 16, 20, 28])
        >>> layer.coefficients(torch.randn(2, 16, 20, 28)).shape
        torch.Size([2, 48, 48])
    """

    _abbr_ = 'kronecker_attention'

    def __init__(
        self,
        channels: int | None = None,
        mode: str = 'kv',
        maps: str = 'v',
        key_channels: int | None = None,
        out_channels: int | None = None,
        context_channels: int | None = None,
        norm: str = 'softmax',
        scale: float = 1.0,
        residual: bool = False,
        in_channels: int | None = None,
        init_cfg: dict | list | None = None,
    ) -> None:
        channels = _resolve_channels(channels, in_channels)
        key_channels = channels if key_channels is None else key_channels
        out_channels = channels if out_channels is None else out_channels
        context_channels = channels if context_channels is None else context_channels
        check_int('key_channels', key_channels)
        check_int('out_channels', out_channels)
        check_int('context_channels', context_channels)
        check_choice('mode', mode, MODES)
        check_choice('norm', norm, NORMS)
        check_number('scale', scale)
        check_flags(residual=residual)
        check_init_cfg(init_cfg)
        _check_maps(maps, channels, key_channels, out_channels, context_channels)
        if residual and out_channels != channels:
            raise ValueError(f'residual needs out_channels == channels, got {out_channels} and {channels}')

        starts_at_zero = residual and 'v' in maps
        super().__init__(_default_init(starts_at_zero) if init_cfg is None else init_cfg)
        self.channels, self.out_channels, self.context_channels = channels, out_channels, context_channels
        self.mode = mode
        self.norm = norm
        self.scale = scale
        self.residual = residual
        self.query_map = nn.Conv1d(channels, key_channels, 1, bias=False) if 'q' in maps else nn.Identity()
        self.key_map = nn.Conv1d(context_channels, key_channels, 1, bias=False) if 'k' in maps else nn.Identity()
        self.value_map = nn.Conv1d(context_channels, out_channels, 1, bias=False) if 'v' in maps else nn.Identity()
        # Faster for any map size unless the mapped query has fewer channels.
        means_for_positions = MODES[mode].context.means and not MODES[mode].query.means
        self.query_map_on_keys = means_for_positions and 'q' in maps and key_channels >= channels
        if starts_at_zero:
            # A host may load pretrained weights and initialize nothing else.
            nn.init.zeros_(self.value_map.weight)
        self.coefficient_bn = None if norm == 'softmax' else CoefficientNorm(1)
        if norm == 'bn_softmax':
            # Softmax cancels a shift.
            self.coefficient_bn.register_parameter('bias', None)
        initialize(self)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the attention of ``x`` to ``context``, or to itself.

        Args:
            x: Map (B, channels, H, W). An empty batch, such as of regions in an image without any, is allowed.
            context: Map (B, context_channels, H', W') for cross-attention. Defaults to ``x``.

        Returns:
            Map (B, out_channels, H, W).

        Raises:
            TypeError: If an input is not a floating-point tensor.
            ValueError: If an input is not a map, has an empty side, or has other channels or another batch size.
        """
        self._check(x, context, empty_batch=True)
        if not torch.jit.is_tracing() and x.shape[0] == 0:
            return empty_map(self, self.out_channels, *(map_ for map_ in (x, context) if map_ is not None))
        reduction = MODES[self.mode].query
        out = reduction.restore(self._attend(*self._columns(x, context)), x.shape[2:])
        if not self.residual:
            return out
        # No gradient needs the outer sum of means, so adding in place is safe and halves the memory.
        return out.add_(x) if reduction.means and out.dtype == x.dtype else out + x

    def coefficients(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the normalized coefficients that :meth:`forward` would use, without updating running statistics.

        Arguments and errors are as in :meth:`forward`.

        Returns:
            (B, m, n). n queries: every position, row by row; in mode ``'qkv'`` the means of the W columns, then of the
            H rows. m keys: in modes ``'kv'`` and ``'qkv'`` the means of the W' columns, then of the H' rows of the
            context; otherwise its (pooled) positions.
        """
        self._check(x, context)
        query, key, _ = self._columns(x, context)
        bn = self.coefficient_bn
        state = None if bn is None else coefficient_state(bn, look=True)
        return attention_coefficients(query, key, self.norm, self.scale, state)

    def _check(self, x: Tensor, context: Tensor | None, empty_batch: bool = False) -> None:
        check_map('x', x, self.channels, empty_batch=empty_batch)
        if context is not None:
            check_map('context', context, self.context_channels, like=x, empty_batch=empty_batch)

    def _columns(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mapped columns of query, key and value."""
        mode = MODES[self.mode]
        query = mode.query.apply(x)
        if context is None and mode.context is mode.query:
            columns = query
        else:
            columns = mode.context.apply(x if context is None else context)
        # Means of half precision are float32, which the maps do not take.
        key = columns if type(self.key_map) is nn.Identity else self.key_map(columns.to(x.dtype))
        value = self.value_map(columns.to(x.dtype))
        if self.query_map_on_keys and _is_plain(self.query_map):
            # K^T (W X) = (W^T K)^T X, and there are only H + W keys.
            return query, torch.matmul(self.query_map.weight[:, :, 0].t(), key.to(x.dtype)), value
        query = query if type(self.query_map) is nn.Identity else self.query_map(query.to(x.dtype))
        return query, key, value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bn = self.coefficient_bn
        if bn is None:
            return attend(query, key, value, self.norm, self.scale)
        if isinstance(bn, _BatchNorm):
            # Called on the class, because a host may have replaced this norm by its synchronized one.
            return CoefficientNorm.forward(bn, query, key, value, self.norm, self.scale)
        return bn(query, key, value, self.norm, self.scale)

    def extra_repr(self) -> str:
        return f'{self.channels}, mode={self.mode!r}, norm={self.norm!r}, scale={self.scale}, residual={self.residual}'


def attention_scale(use_scale: bool, key_channels: int) -> float:
    """Return ``key_channels ** -0.5`` if ``use_scale``, else the paper's 1.

    Raises:
        TypeError: If ``key_channels`` is not an int.
        ValueError: If ``use_scale`` is not a bool or ``key_channels`` is less than 1.
    """
    check_flags(use_scale=use_scale)
    check_int('key_channels', key_channels)
    return key_channels**-0.5 if use_scale else 1.0


def _resolve_channels(channels: int | None, in_channels: int | None) -> int:
    if (channels is None) == (in_channels is None):
        raise ValueError(f'either channels or in_channels must be given, got {channels!r} and {in_channels!r}')
    name, value = ('in_channels', in_channels) if channels is None else ('channels', channels)
    check_int(name, value)
    return value


def _check_maps(maps: str, channels: int, key_channels: int, out_channels: int, context_channels: int) -> None:
    """Raise ValueError unless ``maps`` is valid and every change of channels has a map."""
    if not isinstance(maps, str) or set(maps) - set('qkv') or len(set(maps)) != len(maps):
        raise ValueError(f"maps must name some of q, k and v once each, as in 'v' or 'qkv'; got {maps!r}")
    for letter, width, name, mapped in (
        ('q', channels, 'key_channels', key_channels),
        ('k', context_channels, 'key_channels', key_channels),
        ('v', context_channels, 'out_channels', out_channels),
    ):
        if letter not in maps and width != mapped:
            raise ValueError(f'{letter} has {width} channels but {name} is {mapped}: add {letter!r} to maps')


def _default_init(starts_at_zero: bool) -> dict:
    init_cfg = dict(type='Xavier', layer='Conv1d', distribution='uniform')
    if starts_at_zero:
        init_cfg['override'] = dict(type='Constant', name='value_map', val=0)
    return init_cfg


def _is_plain(conv: nn.Module) -> bool:
    """Return whether ``conv`` only applies its weight: not an adapter, and no weight that each call computes."""
    return type(conv) is nn.Conv1d and 'weight' in dict(conv.named_parameters(recurse=False))
