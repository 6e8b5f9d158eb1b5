"""A tiny image tree, a config that trains on it in a moment, and the tools as modules."""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
CLASSES = ('n01440764', 'n01443537')

# What a user's own config for MMPretrain looks like, with a network that trains in a moment.
TINY_CONFIG = """
default_scope = 'mmpretrain'
data_preprocessor = dict(num_classes=2, mean=[127.5] * 3, std=[127.5] * 3, to_rgb=True)
model = dict(
    type='ImageClassifier',
    backbone=dict(type='MobileNetV2', widen_factor=0.1),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=2, in_channels=1280, topk=(1,),
              loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
pipeline = [dict(type='mmkron.LoadImageFromFile'), dict(type='Resize', scale=(32, 32)), dict(type='PackInputs')]
dataset = dict(type='ImageNet', data_root={root!r}, split='train', metainfo=dict(classes=('a', 'b')),
               pipeline=pipeline)
train_dataloader = dict(batch_size=4, num_workers=0, dataset=dataset,
                        sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(batch_size=4, num_workers=0, dataset=dict(dataset, split='val'),
                      sampler=dict(type='DefaultSampler', shuffle=False))
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=(1,))
test_evaluator = val_evaluator
train_cfg = dict(by_epoch=True, max_epochs=1, val_interval=1)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01, momentum=0.9))
param_scheduler = dict(type='StepLR', step_size=1)
auto_scale_lr = dict(base_batch_size=8)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1),
                     visualization=dict(type='VisualizationHook'))
visualizer = dict(type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
randomness = dict(seed=0)
"""


def make_image_tree(root: Path, with_meta: bool) -> Path:
    """Write 3 JPEGs of each of 2 classes for train and val in the layout in which MMPretrain reads ImageNet."""
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        lines = []
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                pixels = rng.integers(0, 128, (40, 48, 3), dtype=np.uint8) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f'{name}_{i}.JPEG')
                lines.append(f'{name}/{name}_{i}.JPEG {label}')
        if with_meta:
            (root / 'meta').mkdir(exist_ok=True)
            (root / 'meta' / f'{split}.txt').write_text('\n'.join(lines) + '\n')
    return root


class Touch:
    """Object that is pickled as a call that creates a folder, as a malicious checkpoint could run any other code."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def load_tool(name: str):
    """Return ``tools/{name}.py`` as a module."""
    spec = importlib.util.spec_from_file_location(f'mmkron_tools_{name}', ROOT / 'tools' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    path, sys.path = sys.path, [str(Path(spec.origin).parent), *sys.path]  # for modules in its folder, as in a program
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path = path
    return module


def run_training(args):
    """Train as ``tools/train.py`` does, and return the runner."""
    return load_tool('train').train(args)
