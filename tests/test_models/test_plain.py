"""Select and Classifier: a backbone in plain PyTorch."""

import pytest
import torch

from mmkron.models import KANet, LambdaResNet, QKFormer
from mmkron.models.plain import Classifier, Select
from support.errors import raises


@pytest.mark.parametrize('index', [-1, 0, 1])
def test_select(index):
    backbone = KANet(widen_factor=0.25, out_indices=(1, 3)).eval()
    x = torch.randn(2, 3, 32, 48)
    assert torch.equal(torch.nn.Sequential(backbone, Select(index))(x), backbone(x)[index])


def test_select_errors():
    with raises(TypeError, 'index', '0'):
        Select('0')
    with raises(ValueError, 'index', 2):
        Select(2)((torch.zeros(1), torch.zeros(1)))


def test_classifier_is_that_of_mmpretrain():
    """A checkpoint of MMPretrain's classifier loads strictly and gives the same logits."""
    pytest.importorskip('mmpretrain')
    from mmpretrain.models import ImageClassifier

    torch.manual_seed(0)
    theirs = ImageClassifier(
        backbone=dict(type='mmkron.KANet', widen_factor=0.25),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=5, in_channels=1280),
    ).eval()
    ours = Classifier(KANet(widen_factor=0.25), num_classes=5).eval()
    x = torch.randn(2, 3, 64, 48)
    expected = theirs(x, mode='tensor')
    expected = theirs.head((expected[-1],)) if isinstance(expected, tuple) else expected
    assert not torch.allclose(ours(x), expected)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(x), expected)


def test_classifier_learns():
    """A classifier without init_weights learns random images within 30 steps."""
    torch.manual_seed(0)
    model = Classifier(LambdaResNet(stage_blocks=(1, 1, 1, 1), stage_layers='CCLL', base_channels=8), num_classes=4)
    x, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        losses.append(torch.nn.functional.cross_entropy(model(x), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]


def test_classifier_errors():
    backbone = KANet(widen_factor=0.25)
    with raises(ValueError, 'num_classes', 0):
        Classifier(backbone, 0)
    with raises(TypeError, 'num_classes', '3'):
        Classifier(backbone, '3')
    with raises(TypeError, 'backbone', 'Linear'):
        Classifier(torch.nn.Linear(2, 2), 3)
    with raises(ValueError, 'out_mode', 'folded'):
        Classifier(QKFormer('cifar', out_mode='folded'), 3)
