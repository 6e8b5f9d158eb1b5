"""Count multiply-adds of a network without computing them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class FlopCounter(TorchDispatchMode):
    """Counter for fake tensors that gives the same results as MMEngine's ``FlopAnalyzer``, which cannot trace them."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = function(*args, **(kwargs or {}))
        packet = function._overloadpacket
        if packet in flop_registry:  # a multiply-add is two operations there
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=out) // 2
        elif packet is aten.native_batch_norm:
            self.total += args[0].numel() * (1 if args[1] is None else 2)
        elif packet is aten.upsample_nearest2d:
            self.total += out.numel()
        elif packet is aten.upsample_bilinear2d:
            self.total += 4 * out.numel()
        elif packet is aten._adaptive_avg_pool2d or (packet is aten.mean and list(args[1:2]) == [[-1, -2]]):
            self.total += args[0].numel()
        return out


def count_flops(network: nn.Module, *shape: int) -> int:
    """Return the multiply-adds of a network on the device ``meta`` for an input of a shape."""
    # Operators take the forms of a traced graph.
    with patch('torch.jit.is_tracing', lambda: True), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        network.to_empty(device='cpu')
        with FlopCounter() as counter:
            network.eval()(torch.empty(shape))
    return counter.total
