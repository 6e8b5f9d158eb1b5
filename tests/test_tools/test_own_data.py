"""The configs of docs/train_on_your_data.md, trained on data of the page's layouts."""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from support.tools import ROOT, run_training

PAGE = (ROOT / 'docs/train_on_your_data.md').read_text(encoding='utf-8')
SUFFIXES = ('.jpg', '.png')
CONFIGS = dict(re.findall(r'<!-- own data: configs/my/(\w+)\.py -->\n```python\n(.*?)```', PAGE, re.S))


def picture(path, rng, size=(96, 80), high=256):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if high == 256 else (size[1], size[0])
    Image.fromarray(rng.integers(0, high, shape, dtype=np.uint8)).save(path)


def make_flowers(root, rng, _):
    for split, count in (('train', 2), ('val', 1)):
        for name in ('daisy', 'rose', 'tulip'):
            for i in range(count):
                picture(root / split / name / f'{i}{SUFFIXES[i]}', rng, (96 - 10 * i, 80))


def make_fields(root, rng, suffix):
    for split, count in (('train', 4), ('val', 3)):
        for i in range(count):
            size = ((128, 128), (150, 90), (70, 200), (64, 64))[i]
            picture(root / 'images' / split / f'{i}{suffix}', rng, size)
            picture(root / 'labels' / split / f'{i}.png', rng, size, high=3)


def make_parts(root, rng, _):
    categories = [dict(id=7, name='bolt'), dict(id=9, name='nut'), dict(id=11, name='washer')]
    for split, count in (('train', 4), ('val', 2)):
        images, annotations = [], []
        for i in range(count):
            name, (width, height) = f'{split}{i}{SUFFIXES[i % 2]}', ((128, 128), (200, 120), (90, 160), (128, 96))[i]
            picture(root / 'images' / name, rng, (width, height))
            images.append(dict(id=i, file_name=name, width=width, height=height))
            for category in (7, 9, 11):
                x, y, w, h = 10 * i + 5, 2 * category, 40, 30
                polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
                ids = dict(id=len(annotations) + 1, image_id=i, category_id=category, iscrowd=0)
                annotations.append(dict(ids, bbox=[x, y, w, h], area=w * h, segmentation=[polygon]))
        coco = dict(images=images, annotations=annotations, categories=categories)
        (root / f'{split}.json').write_text(json.dumps(coco))


class Case(NamedTuple):
    make: Callable
    options: list[str]  # shorten the training to two steps and, for the large networks, narrow them
    metric: str
    classes: int


def small_train(width, height):
    """Return options that scale down the images of an ADE20K or COCO pipeline."""
    steps = {'train': 2, 'val': 1}
    return [f'{split}_dataloader.dataset.pipeline.{i}.scale=({width},{height})' for split, i in steps.items()]


FIELDS = ['train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'train_dataloader.batch_size=2']
NARROW = ['model.backbone.depth=18', 'model.backbone.init_cfg=None']
NARROW += [f'model.backbone.{name}=8' for name in ('base_channels', 'stem_channels')]
NARROW += ['model.decode_head.in_channels=64', 'model.auxiliary_head.in_channels=32', 'model.decode_head.channels=16']
NARROW += ['train_dataloader.dataset.pipeline.3.crop_size=(64,64)', 'model.data_preprocessor.size=(64,64)']
PARTS = ['train_cfg.max_epochs=1', 'train_dataloader.batch_size=2']
FEW = ['train_dataloader.dataset.indices=2', 'train_dataloader.batch_size=1', 'val_dataloader.dataset.indices=1']
FEW += ['model.backbone.base_channels=16', 'model.neck.in_channels=[64,128,256,512]']

CASES = {
    'kanet_flowers': Case(
        make_flowers, ['train_cfg.max_epochs=1', 'train_dataloader.batch_size=3'], 'accuracy/top1', 3
    ),
    'kao_fields': Case(make_fields, FIELDS, 'mIoU', 3),
    'kao_fields_large': Case(make_fields, FIELDS + NARROW + small_train(256, 64), 'mIoU', 3),
    'lambda_parts': Case(make_parts, PARTS, 'coco/segm_mAP', 2),
    'lambda_parts_large': Case(make_parts, PARTS + FEW + small_train(160, 96), 'coco/segm_mAP', 2),
}


@pytest.mark.parametrize(('name', 'suffix'), [*((name, '.jpg') for name in CASES), ('kao_fields', '.png')])
def test_configs(name, suffix, tmp_path, monkeypatch, train_args):
    """Each config of the page trains and validates on images of different sizes and of both suffixes."""
    assert CONFIGS.keys() == CASES.keys()
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    case.make(tmp_path / 'data' / name.split('_')[1], np.random.default_rng(0), suffix)
    config, text = tmp_path / f'{name}.py', CONFIGS[name].replace("'../", f"'{ROOT}/configs/")
    config.write_text(text.replace("img_suffix='.jpg'", f'img_suffix={suffix!r}'))
    options = case.options + [f'{split}_dataloader.num_workers=0' for split in ('train', 'val')]
    options += [f'{split}_dataloader.persistent_workers=False' for split in ('train', 'val')]
    runner = run_training(train_args(config, '--cfg-options', *options))
    assert runner.iter == 2
    assert len(runner.val_dataloader.dataset.metainfo['classes']) == case.classes
    (value,) = runner.message_hub.log_scalars[f'val/{case.metric}'].data[0]
    assert np.isfinite(value)
