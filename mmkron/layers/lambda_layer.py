"""The lambda layer on feature maps, as a layer and as a host's plug-in layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor

from mmkron.layers.configs import check_init_cfg
from mmkron.layers.empty import empty_map
from mmkron.layers.initialize import initialize
from mmkron.layers.norm import build_norm
from mmkron.ops.checks import check_map
from mmkron.ops.lambdas import content_matrix, position_lambda
from mmkron.registry import MODELS
from mmkron.utils.checks import check_flags, check_int, resolve_size


@MODELS.register_module()
class LambdaLayer(BaseModule):
    """Content and position lambdas of a map, applied to h queries a position.

    Any map size goes. A global layer sees the whole map up to ``feat_size``, by the centre of its table where the map
    is smaller; on a larger map, positions further away than its table reaches add nothing to the position lambda.
    Weights of a global layer for another ``feat_size`` load in the same way: cropped, or extended by zeros. So do
    those of a local layer, whose table is a global one's with zeros beyond the scope.

    Source: Bello, LambdaNetworks, ICLR 2021 (arXiv 2102.08602), section 3: batch normalisation on queries and values,
    softmax on the keys over the positions of the whole map, no bias, no activation.

    Args:
        dim: channels of the input.
        dim_out: channels of the output, h times the value depth. Defaults to ``dim``.
        dim_key: k, depth of queries and keys.
        heads: h, queries a position; they share keys and values. Divides ``dim_out``.
        intra_depth: u, over which keys and values are summed.
        scope: r, odd: a query's position lambda sees r x r positions. None for a global layer.
        feat_size: side or (H, W) of the map that a global layer is made for; only with ``scope=None``.
        dilation: step between the positions that the scope sees.
        position_bias: a learned k-vector in every lambda, as several public implementations have it. Not in the paper.
        residual: add the input, as a plug-in layer of an existing network should. The values then start at zero, so
            that the layer starts as the identity and trained weights around it keep their meaning.
        norm_cfg: normalisation of queries and values; None (the default) is batch norm.
        in_channels: another name of ``dim``, by which ``plugins=[...]`` of a host's ResNet passes it.
        init_cfg: initialisation that comes after the paper's.

    Raises:
        TypeError, ValueError: a value outside these choices, or widths that do not fit; weights of another scope.

    Attributes:
        position_table (Parameter): the embeddings (u, k, r, r). ``layer.position_table = other.position_table`` shares
            them.
    """

    _abbr_ = 'lambda_layer'

    def __init__(
        self,
        dim: int | None = None,
        dim_out: int | None = None,
        dim_key: int = 16,
        heads: int = 4,
        intra_depth: int = 1,
        scope: int | None = 23,
        feat_size: int | Sequence[int] | None = None,
        dilation: int = 1,
        position_bias: bool = False,
        residual: bool = False,
        norm_cfg: dict | None = None,
        in_channels: int | None = None,
        init_cfg: dict | list | None = None,
    ) -> None:
        if (dim is None) == (in_channels is None):
            raise ValueError(f'give dim or in_channels, one of the two; got {dim!r} and {in_channels!r}')
        name = 'in_channels' if dim is None else 'dim'
        dim = in_channels if dim is None else dim
        check_int(name, dim)
        dim_out = dim if dim_out is None else dim_out
        numbers = dict(dim_out=dim_out, dim_key=dim_key, heads=heads, intra_depth=intra_depth, dilation=dilation)
        for name, number in numbers.items():
            check_int(name, number)
        check_flags(position_bias=position_bias, residual=residual)
        check_init_cfg(init_cfg)
        if dim_out % heads:
            raise ValueError(f'heads must divide dim_out, got heads={heads} and dim_out={dim_out}')
        if residual and dim_out != dim:
            raise ValueError(f'residual needs dim_out == dim, got {dim_out} and {dim}')
        sides = table_sides(scope, feat_size)
        super().__init__(init_cfg)
        self.dim, self.dim_out, self.dim_key = dim, dim_out, dim_key
        self.heads, self.intra_depth, self.dilation = heads, intra_depth, dilation
        self.scope, self.residual = scope, residual
        # One convolution, because the input is read once: queries (h k), keys (u k), values (u v).
        self.widths = (heads * dim_key, intra_depth * dim_key, intra_depth * dim_out // heads)
        self.qkv_map = nn.Conv2d(dim, sum(self.widths), 1, bias=False)
        self.query_norm = build_norm(norm_cfg, self.widths[0])
        self.value_norm = build_norm(norm_cfg, self.widths[2])
        if residual and getattr(self.value_norm, 'weight', None) is None:
            raise ValueError(f'residual needs a normalisation with a weight, got norm_cfg={norm_cfg!r}')
        self.position_table = nn.Parameter(torch.empty(intra_depth, dim_key, *sides))
        self.position_bias = nn.Parameter(torch.zeros(dim_key)) if position_bias else None
        self.reset_parameters()
        initialize(self)
        self._register_load_state_dict_pre_hook(self._fit_position_table)

    def reset_parameters(self) -> None:
        """The paper's initialisation: normal, std ``(k d)^-1/2`` (queries), ``d^-1/2`` (keys, values), 1 (table)."""
        queries, *others = self.qkv_map.weight.split(self.widths)
        nn.init.normal_(queries, std=(self.dim_key * self.dim) ** -0.5)
        for weight in others:
            nn.init.normal_(weight, std=self.dim**-0.5)
        nn.init.normal_(self.position_table)
        if self.position_bias is not None:
            nn.init.zeros_(self.position_bias)
        if self.residual:
            nn.init.zeros_(self.value_norm.weight)

    def init_weights(self) -> None:
        """:meth:`reset_parameters`, then what ``init_cfg`` says."""
        self.reset_parameters()
        super().init_weights()

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Map (B, dim, H, W) -> (B, dim_out, H, W).

        Args:
            x: the map. A batch of none, as of regions where nothing was found, gives one of none.
            key_mask: bool (B, H, W), true where a position takes part in the content lambda; all by default.

        Raises:
            TypeError: an input that is no floating-point tensor, a mask that is not bool.
            ValueError: an input that is empty, no map, or of other channels; a mask of another shape, or without a
                position for some sample.
        """
        check_map('x', x, self.dim, empty_batch=True)
        if not torch.jit.is_tracing() and x.shape[0] == 0:
            return empty_map(self, self.dim_out, x)
        batch, _, *size = x.shape
        query, key, value = self.qkv_map(x).split(self.widths, 1)
        query = self.query_norm(query).reshape(batch, self.heads, self.dim_key, *size)
        key = key.reshape(batch, self.intra_depth, self.dim_key, *size)
        value = self.value_norm(value).reshape(batch, self.intra_depth, self.dim_out // self.heads, *size)
        content = content_matrix(key.to(value.dtype), value, key_mask)
        if self.position_bias is not None:
            content = content + self.position_bias[:, None]
        out = position_lambda(query, value, self.position_table, content, dilation=self.dilation)
        out = out.reshape(batch, self.dim_out, *size)
        return out + x if self.residual else out

    def _fit_position_table(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        table = state_dict.get(f'{prefix}position_table')
        own = self.position_table.shape
        if table is None or table.dim() != 4 or table.shape[2:] == own[2:]:
            return
        if self.scope is not None:
            raise ValueError(
                f'{prefix}position_table has scope {tuple(table.shape[2:])}, but this layer has {tuple(own[2:])}'
            )
        rows, columns = (own[axis] // 2 - table.shape[axis] // 2 for axis in (2, 3))
        state_dict[f'{prefix}position_table'] = F.pad(table, (columns, columns, rows, rows))

    def extra_repr(self) -> str:
        return f'{self.dim}, {self.dim_out}, dim_key={self.dim_key}, heads={self.heads}, scope={self.scope}'


def table_sides(scope: int | None, feat_size: int | Sequence[int] | None) -> tuple[int, int]:
    """Sides of the position table of a local or a global layer.

    Raises:
        TypeError, ValueError: an even scope, a global layer without ``feat_size``, or a local one with it.
    """
    if scope is not None:
        check_int('scope', scope)
        if scope % 2 == 0:
            raise ValueError(f'scope must be odd (or None for a global layer), got {scope}')
        if feat_size is not None:
            raise ValueError(
                f'feat_size must be None unless scope is None (global), got {feat_size!r} and scope={scope}'
            )
        return scope, scope
    if feat_size is None:
        raise ValueError('feat_size must be given for a global layer (scope=None), as a side or (H, W); got None')
    sides = resolve_size('feat_size', feat_size)
    return 2 * sides[0] - 1, 2 * sides[1] - 1
