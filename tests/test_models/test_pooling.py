"""GlobalAveragePoolingDropout: means and dropout."""

import pytest
import torch

from mmkron.models import GlobalAveragePoolingDropout


def test_values():
    neck = GlobalAveragePoolingDropout(0.2)
    x = torch.randn(4, 1000, 5, 7)
    neck.eval()
    torch.testing.assert_close(neck((x,))[0], x.mean((2, 3)))
    torch.testing.assert_close(neck(x)[0], x.mean((2, 3)))
    neck.train()
    torch.manual_seed(0)
    out, mean = neck((x,))[0], x.mean((2, 3))
    kept = out != 0
    assert kept.float().mean().item() == pytest.approx(0.8, abs=0.03)
    torch.testing.assert_close(out[kept], mean[kept] / 0.8)
