"""The configs of docs/train_on_your_data.md, trained on data of the layouts that it shows."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image

from mmkron.engine import launch

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs/train_on_your_data.md').read_text(encoding='utf-8')
CONFIGS = dict(re.findall(r'```python\n# own data: configs/my/(\w+)\.py\n(.*?)```', PAGE, re.S))


def picture(path, rng, size=(96, 80), high=256):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if high == 256 else (size[1], size[0])
    Image.fromarray(rng.integers(0, high, shape, dtype=np.uint8)).save(path)


def make_flowers(root, rng):
    for split, count in (('train', 2), ('val', 1)):
        for name in ('daisy', 'rose', 'tulip'):
            for i in range(count):
                picture(root / split / name / f'{i}.jpg', rng)


def make_fields(root, rng):
    for split, count in (('train', 4), ('val', 2)):
        for i in range(count):
            picture(root / 'images' / split / f'{i}.jpg', rng, (128, 128))
            picture(root / 'labels' / split / f'{i}.png', rng, (128, 128), high=3)


def make_parts(root, rng):
    categories = [dict(id=7, name='bolt'), dict(id=9, name='nut'), dict(id=11, name='washer')]
    for split, count in (('train', 4), ('val', 2)):
        images, annotations = [], []
        for i in range(count):
            name = f'{split}{i}.jpg'
            picture(root / 'images' / name, rng, (128, 128))
            images.append(dict(id=i, file_name=name, width=128, height=128))
            for category in (7, 9, 11):
                x, y, w, h = 10 * i + 5, 2 * category, 40, 30
                polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
                annotations.append(
                    dict(
                        id=len(annotations) + 1,
                        image_id=i,
                        category_id=category,
                        bbox=[x, y, w, h],
                        area=w * h,
                        iscrowd=0,
                        segmentation=[polygon],
                    )
                )
        (root / f'{split}.json').write_text(
            json.dumps(dict(images=images, annotations=annotations, categories=categories))
        )


# How the data is made, options that shorten the training to two steps, a metric, and the number of classes.
CASES = {
    'kanet_flowers': (make_flowers, ['train_cfg.max_epochs=1', 'train_dataloader.batch_size=3'], 'accuracy/top1', 3),
    'kao_fields': (
        make_fields,
        ['train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'train_dataloader.batch_size=2'],
        'mIoU',
        3,
    ),
    'lambda_parts': (
        make_parts,
        ['train_cfg.max_epochs=1', 'train_dataloader.batch_size=2'],
        'coco/segm_mAP',
        2,
    ),
}


@pytest.mark.parametrize('name', list(CASES))
def test_configs(name, tmp_path, monkeypatch, train_args):
    make, options, metric, classes = CASES[name]
    monkeypatch.chdir(tmp_path)
    make(tmp_path / 'data' / name.split('_')[1], np.random.default_rng(0))
    config = tmp_path / f'{name}.py'
    config.write_text(CONFIGS[name].replace("'../", f"'{ROOT}/configs/"))
    options += ['train_dataloader.num_workers=0', 'val_dataloader.num_workers=0']
    runner = launch.train(train_args(config, '--cfg-options', *options))
    assert runner.iter == 2
    assert len(runner.val_dataloader.dataset.metainfo['classes']) == classes
    values = runner.message_hub.log_scalars[f'val/{metric}'].data[0]
    assert len(values) == 1
    assert np.isfinite(values).all()


def test_learning_rate_falls(tmp_path):
    """Within the epochs of the config, which are fewer than the base's."""
    path = tmp_path / 'kanet_flowers.py'
    path.write_text(CONFIGS['kanet_flowers'].replace("'../", f"'{ROOT}/configs/"))
    cfg = Config.fromfile(path)
    assert cfg.param_scheduler.type == 'MultiStepLR'
    assert max(cfg.param_scheduler.milestones) < cfg.train_cfg.max_epochs == 30


def test_every_config_is_tried():
    assert CONFIGS.keys() == CASES.keys()
