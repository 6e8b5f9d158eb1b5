"""The four attention operators on feature maps with their linear maps, as a layer and as a host's plug-in layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from mmengine.model import BaseModule
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mmkron.layers.configs import check_init_cfg
from mmkron.layers.empty import empty_map
from mmkron.layers.initialize import initialize
from mmkron.ops.checks import check_map
from mmkron.ops.kronecker import (
    NORMS,
    CoefficientBN,
    attend,
    attention_coefficients,
    full_means,
    outer_sum,
    pool_context,
)
from mmkron.registry import MODELS
from mmkron.utils.checks import check_choice, check_flags, check_int, check_number


def _columns(x: Tensor) -> Tensor:
    return x.flatten(2)


# mode -> how a map becomes the columns of the query, and those of the key and the value
REDUCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    'kv': (_columns, full_means),
    'qkv': (full_means, full_means),
    'dense': (_columns, _columns),
    'pooled': (_columns, pool_context),
}


class CoefficientNorm(nn.BatchNorm2d):
    """Batch norm of the attention coefficients as one channel, whose ``forward`` is the attention that uses them.

    A wrapper of the batch norms alone, as FSDP puts around them in mixed precision, has their weights only while it is
    called.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, norm: str, scale: float) -> Tensor:
        """Columns (B, d, n), (B, d, m) and (B, p, m) -> (B, p, n); see :func:`mmkron.ops.kronecker.attend`."""
        state = coefficient_state(self)
        out = attend(query, key, value, norm, scale, state)
        for buffer, updated in ((self.running_mean, state.running_mean), (self.running_var, state.running_var)):
            if buffer is not None and buffer.dtype != updated.dtype:
                limits = torch.finfo(buffer.dtype)
                buffer.copy_(updated.clamp(limits.min, limits.max))
        return out


def coefficient_state(bn: _BatchNorm, look: bool = False) -> CoefficientBN:
    """Return what the operators take of a batch norm, in float32 or wider.

    In training the batch is counted, or, to ``look`` only, the running statistics are left out.
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

    The maps act on the columns that the operator uses, so those of the means cost ``(H + W) C^2`` and not
    ``H W C^2``, and the query map of KV joins the key map (hooks on it are not called then). Source: Kronecker
    Attention Networks (KDD 2020), sections 2.1 and 3.4; the paper maps only the value in classification and all three
    in segmentation.

    Args:
        channels: channels of the input map, and of the context unless ``context_channels`` is given.
        mode: ``kv``, ``qkv``, ``dense`` or ``pooled``.
        maps: which of q, k and v get a linear map (1 x 1, no bias), as a string of these letters.
        key_channels: width of the mapped query and key. Defaults to ``channels``.
        out_channels: width of the mapped value, so of the output. Defaults to ``channels``.
        context_channels: channels of the context map of cross-attention. Defaults to ``channels``.
        norm: ``softmax``, ``bn_softmax`` or ``bn`` (see :func:`mmkron.ops.dense_attention`). The batch statistics are
            those of one process, also where other norms are synchronised.
        scale: factor on the coefficients before they are normalised.
        residual: add the input, as a plug-in layer of an existing network should. The value map then starts at zero,
            so that the layer starts as the identity and trained weights around it keep their meaning.
        in_channels: another name of ``channels``, by which ``plugins=[...]`` of a host's ResNet passes it.
        init_cfg: initialisation; Xavier uniform (the paper's) by default.

    Raises:
        TypeError, ValueError: a value outside these choices, or widths that do not fit.
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
        if (channels is None) == (in_channels is None):
            raise ValueError(f'give channels or in_channels, one of the two; got {channels!r} and {in_channels!r}')
        name = 'in_channels' if channels is None else 'channels'
        channels = in_channels if channels is None else channels
        check_int(name, channels)
        key_channels = channels if key_channels is None else key_channels
        out_channels = channels if out_channels is None else out_channels
        context_channels = channels if context_channels is None else context_channels
        for name, width in (
            ('key_channels', key_channels),
            ('out_channels', out_channels),
            ('context_channels', context_channels),
        ):
            check_int(name, width)
        check_choice('mode', mode, REDUCTIONS)
        check_choice('norm', norm, NORMS)
        check_number('scale', scale)
        check_flags(residual=residual)
        check_init_cfg(init_cfg)
        if not isinstance(maps, str) or set(maps) - set('qkv') or len(set(maps)) != len(maps):
            raise ValueError(f"maps must name some of q, k and v once each, as in 'v' or 'qkv'; got {maps!r}")
        widths = {'q': (channels, key_channels), 'k': (context_channels, key_channels)}
        for letter, (width, wanted) in widths.items():
            if letter not in maps and width != wanted:
                raise ValueError(f'{letter} has {width} channels but key_channels is {wanted}: add {letter!r} to maps')
        if 'v' not in maps and context_channels != out_channels:
            raise ValueError(f"v has {context_channels} channels but out_channels is {out_channels}: add 'v' to maps")
        if residual and out_channels != channels:
            raise ValueError(f'residual needs out_channels == channels, got {out_channels} and {channels}')

        if init_cfg is None:
            init_cfg = dict(type='Xavier', layer='Conv1d', distribution='uniform')
            if residual and 'v' in maps:
                init_cfg['override'] = dict(type='Constant', name='value_map', val=0)
        super().__init__(init_cfg)
        self.channels, self.out_channels = channels, out_channels
        self.context_channels = context_channels
        self.mode = mode
        self.norm = norm
        self.scale = scale
        self.residual = residual
        self.query_map = nn.Conv1d(channels, key_channels, 1, bias=False) if 'q' in maps else nn.Identity()
        self.key_map = nn.Conv1d(context_channels, key_channels, 1, bias=False) if 'k' in maps else nn.Identity()
        self.value_map = nn.Conv1d(context_channels, out_channels, 1, bias=False) if 'v' in maps else nn.Identity()
        # Worth it for any map size unless the mapped query is the narrower one.
        self.query_map_on_keys = mode == 'kv' and 'q' in maps and key_channels >= channels
        if residual and 'v' in maps:
            # Also where a host loads pretrained weights and initialises nothing else.
            nn.init.zeros_(self.value_map.weight)
        self.coefficient_bn = None if norm == 'softmax' else CoefficientNorm(1)
        if norm == 'bn_softmax':
            # Softmax cancels a shift.
            self.coefficient_bn.register_parameter('bias', None)
        initialize(self)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Maps (B, C, H, W) and, for cross-attention, (B, C', H', W') -> (B, out_channels, H, W).

        A batch of none, as of regions where nothing was found, gives one of none.

        Raises:
            TypeError: an input that is no floating-point tensor.
            ValueError: an input that is empty, no map, or of other channels or batch size.
        """
        self._check(x, context, empty_batch=True)
        if not torch.jit.is_tracing() and x.shape[0] == 0:
            return empty_map(self, self.out_channels, *(map_ for map_ in (x, context) if map_ is not None))
        out = self._attend(*self._columns(x, context))
        means = self.mode == 'qkv'
        out = outer_sum(out, x.shape[2:]) if means else out.reshape(*out.shape[:2], *x.shape[2:])
        if not self.residual:
            return out
        # No gradient needs the outer sum, so it can take the input: half the memory.
        return out.add_(x) if means and out.dtype == x.dtype else out + x

    def coefficients(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The normalised coefficients that :meth:`forward` would use, to look at; running statistics stay as they are.

        Arguments and errors are those of :meth:`forward`.

        Returns:
            (B, m, n). n queries: every position, row by row; in mode ``qkv`` the means of the W columns, then those of
            the H rows. m keys: in modes ``kv`` and ``qkv`` the means of the W columns and of the H rows of the
            context, else its (pooled) positions.
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
        """The mapped columns of query, key and value."""
        reduce_query, reduce_context = REDUCTIONS[self.mode]
        query = reduce_query(x)
        if context is None:
            columns = query if reduce_context is reduce_query else reduce_context(x)
        else:
            columns = reduce_context(context)
        # Means of half precision are float32, which the maps do not take.
        key = columns if type(self.key_map) is nn.Identity else self.key_map(columns.to(x.dtype))
        value = self.value_map(columns.to(x.dtype))
        query_map = self.query_map
        # An adapter in the map's place has to be called, and so has a map whose call makes its weight (spectral norm).
        plain = type(query_map) is nn.Conv1d and 'weight' in query_map._parameters
        if not (self.query_map_on_keys and plain):
            return query if type(query_map) is nn.Identity else query_map(query.to(x.dtype)), key, value
        # K^T (W X) = (W^T K)^T X, and there are only H + W keys.
        return query, torch.matmul(query_map.weight[:, :, 0].t(), key.to(x.dtype)), value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bn = self.coefficient_bn
        if bn is None:
            return attend(query, key, value, self.norm, self.scale)
        if isinstance(bn, _BatchNorm):
            # By the class: a host may have put its synchronized batch norm in this one's place.
            return CoefficientNorm.forward(bn, query, key, value, self.norm, self.scale)
        return bn(query, key, value, self.norm, self.scale)

    def extra_repr(self) -> str:
        return f'{self.channels}, mode={self.mode!r}, norm={self.norm!r}, scale={self.scale}, residual={self.residual}'
