"""The converter in docs/add_a_converter.md: its checkpoint gives the logits of the source."""

import importlib.util
import sys

import pytest
import torch
import torchvision
from mmengine.runner import load_checkpoint
from mmpretrain.registry import MODELS

from support.docs import read_blocks
from support.tools import ROOT


@pytest.fixture
def tool(tmp_path, monkeypatch):
    (block,) = [b for b in read_blocks(ROOT / 'docs/add_a_converter.md', 'python') if b.key == 'converter']
    (tmp_path / 'mobilenet_weights.py').write_text(block.text)
    monkeypatch.setattr(sys, 'path', [str(ROOT / 'tools/model_converters'), *sys.path])
    spec = importlib.util.spec_from_file_location('mobilenet_weights', tmp_path / 'mobilenet_weights.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_converter(tool, tmp_path):
    torch.manual_seed(0)
    theirs = torchvision.models.mobilenet_v2().eval()
    torch.save(theirs.state_dict(), tmp_path / 'source.pth')
    tool.main([str(tmp_path / 'source.pth'), str(tmp_path / 'out.pth')])
    meta = torch.load(tmp_path / 'out.pth', weights_only=True)['meta']
    head = dict(type='LinearClsHead', num_classes=1000, in_channels=1280)
    neck = dict(type='GlobalAveragePooling')
    ours = MODELS.build(dict(type='ImageClassifier', backbone=meta['backbone'], neck=neck, head=head)).eval()
    load_checkpoint(ours, str(tmp_path / 'out.pth'), map_location='cpu', strict=True)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_another_network(tool, tmp_path):
    torch.save(torchvision.models.mobilenet_v2(width_mult=0.5).state_dict(), tmp_path / 'source.pth')
    with pytest.raises(SystemExit, match='SRC'):
        tool.main([str(tmp_path / 'source.pth'), str(tmp_path / 'out.pth')])
    assert not (tmp_path / 'out.pth').exists()
