"""Networks learn a few real digits."""

import torch
import torch.nn.functional as F

from mmkron.datasets import Digits
from mmkron.models import KANet


def test_learns_digits_by_heart():
    samples = Digits('train').load_data_list()[:32]
    images = torch.stack([torch.from_numpy(sample['img']) for sample in samples])[:, None].float() / 127.5 - 1
    images = F.interpolate(images, size=(32, 32), mode='bilinear')
    labels = torch.tensor([sample['gt_label'] for sample in samples])
    torch.manual_seed(0)
    backbone = KANet('kanet-kv', widen_factor=0.25, in_channels=1, stem_stride=1)
    backbone.init_weights()
    head = torch.nn.Linear(1280, 10)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=0.005)
    for _ in range(40):
        scores = head(backbone(images)[0].mean((2, 3)))
        optimizer.zero_grad()
        F.cross_entropy(scores, labels).backward()
        optimizer.step()
    assert (scores.argmax(1) == labels).float().mean() >= 0.95
