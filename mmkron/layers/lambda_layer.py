"""Lambda layer on feature maps, also registered as a plug-in layer for the host libraries."""

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
    """Lambda layer that applies content and position lambdas of a map to h queries per position.

    From `LambdaNetworks: Modeling Long-Range Interactions without Attention <https://arxiv.org/abs/2102.08602>`_,
    section 3: batch norm on queries and values, softmax on the keys over the positions of the whole map, no bias and
    no activation.

    Maps of any size are accepted. A global layer uses the center of its table on a map smaller than ``feat_size``; on a
    larger map, positions outside its table add nothing to the position lambda. When weights of a layer with another
    ``feat_size`` or a local layer are loaded into a global layer, their table is cropped or padded with zeros.

    Args:
        dim: Channels of the input.
        dim_out: Channels of the output, ``heads`` times the depth of the values. Defaults to ``dim``.
        dim_key: k, depth of queries and keys.
        heads: h, queries per position, which share keys and values. A divisor of ``dim_out``.
        intra_depth: u, the intra-depth dimension over which keys and values are summed.
        scope: r, odd. The position lambda of a query covers r x r positions. None for a global layer.
        feat_size: Side or (H, W) of the map that a global layer is built for. Only with ``scope=None``.
        dilation: Step between the positions of the scope.
        position_bias: Whether to add a learned k-vector to every lambda, as several public implementations do. Not in
            the paper.
        residual: Whether to add the input, as a plug-in layer of an existing network should. The values then start at
            zero, so that the layer starts as the identity and trained weights around it keep their meaning.
        norm_cfg: Config of the norm of queries and values. Defaults to batch norm.
        in_channels: Alias of ``dim``, used by ``plugins=[...]`` of a host's ResNet.
        init_cfg: Config of MMEngine's initialization, applied after the paper's.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If a number is out of range, ``scope`` is even, ``heads`` does not divide ``dim_out``, or
            ``residual`` is given with other output channels or with a norm without a weight.

    Attributes:
        position_table (Parameter): The embeddings (u, k, r, r). ``layer.position_table = other.position_table`` shares
            them.

    Examples:
        >>> layer = LambdaLayer(64, scope=7)
        >>> layer(torch.randn(2, 64, 14, 14)).shape
        torch.Size([2, 64, 14, 14])
        >>> layer = LambdaLayer(64, 128, scope=None, feat_size=14)
        >>> layer(torch.randn(2, 64, 14, 14)).shape
        torch.Size([2, 128, 14, 14])
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
        dim = resolve_dim(dim, in_channels)
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
        # One convolution, so that the input is read once: queries (h k), keys (u k), values (u v).
        self.widths = (heads * dim_key, intra_depth * dim_key, intra_depth * dim_out // heads)
        self.qkv_map = nn.Conv2d(dim, sum(self.widths), 1, bias=False)
        self.query_norm = build_norm(norm_cfg, self.widths[0])
        self.value_norm = build_norm(norm_cfg, self.widths[2])
        if residual and getattr(self.value_norm, 'weight', None) is None:
            raise ValueError(f'residual needs a normalization with a weight, got norm_cfg={norm_cfg!r}')
        self.position_table = nn.Parameter(torch.empty(intra_depth, dim_key, *sides))
        self.position_bias = nn.Parameter(torch.zeros(dim_key)) if position_bias else None
        self.reset_parameters()
        initialize(self)
        self._register_load_state_dict_pre_hook(self._fit_position_table)

    def reset_parameters(self) -> None:
        """Initialize as in the paper: normal, std ``(k d)^-1/2`` (queries), ``d^-1/2`` (keys, values), 1 (table)."""
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
        """Initialize by :meth:`reset_parameters`, then by ``init_cfg``."""
        self.reset_parameters()
        super().init_weights()

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Apply the lambdas of a map (B, dim, H, W) to its queries.

        Args:
            x: The map. An empty batch, as for regions of an image without objects, returns an empty batch.
            key_mask: Bool mask (B, H, W), true where a position takes part in the content lambda. All positions by
                default.

        Returns:
            The map (B, dim_out, H, W).

        Raises:
            TypeError: If ``x`` is not a floating-point tensor, or the mask is not bool.
            ValueError: If ``x`` is not a map of ``dim`` channels, or the mask has another shape or leaves a sample
                without a position.
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
        """Crop or zero-pad the table of a state dict to the size of a global layer."""
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


def resolve_dim(dim: int | None, in_channels: int | None) -> int:
    """Return the number of input channels, given as either ``dim`` or ``in_channels``.

    Raises:
        TypeError: If the number is not an int.
        ValueError: If both or none are given, or the number is below 1.
    """
    if (dim is None) == (in_channels is None):
        raise ValueError(f'give dim or in_channels, one of the two; got {dim!r} and {in_channels!r}')
    check_int('in_channels' if dim is None else 'dim', in_channels if dim is None else dim)
    return in_channels if dim is None else dim


def table_sides(scope: int | None, feat_size: int | Sequence[int] | None) -> tuple[int, int]:
    """Return the sides of the position table of a local or a global layer.

    Raises:
        TypeError: If ``scope`` or a side is not an int.
        ValueError: If ``scope`` is even, a global layer has no ``feat_size``, or a local layer has one.
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
