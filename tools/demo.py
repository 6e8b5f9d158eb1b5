"""Train a classifier or a detector with the arguments of train.py, print its scores and draw its predictions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from mmengine.runner import Runner, load_checkpoint

import train as train_tool  # makes a checkout that is not installed importable
from mmkron.utils import cli
from mmkron.utils.errors import LaunchError

GRID = (4, 8)  # rows and columns of the picture for a classifier
SCENES = (3, 2)  # rows and columns of the picture for a detector
ENLARGED = 640  # pixels of the longer side of a scene, so that boxes and names can be read
SCORE = 0.4  # detections with a lower score are not drawn


@torch.no_grad()
def predict(runner: Runner) -> Iterator[tuple[dict, list]]:
    """Yield each batch of the validation set with the samples that contain its predictions."""
    model = runner.model.eval()
    for batch in runner.val_dataloader:
        yield batch, model.val_step(batch)


def draw(scores: np.ndarray, labels: np.ndarray, images: np.ndarray, classes: tuple[str, ...], path: Path) -> None:
    """Draw the least certain predictions and as many others, with wrong ones in red."""
    rows, columns = GRID
    predicted, confidence = scores.argmax(1), scores.max(1)
    by_confidence = np.argsort(confidence)
    half = rows * columns // 2
    rest = by_confidence[half:]
    chosen = np.concatenate([by_confidence[:half], rest[:: max(1, len(rest) // half)][:half]])
    figure = Figure(figsize=(1.5 * columns, 1.9 * rows), layout='constrained')
    axes = figure.subplots(rows, columns)
    for axis in axes.flat:
        axis.axis('off')
    for axis, i in zip(axes.flat, chosen):
        axis.imshow(images[i], cmap='gray_r', vmin=0, vmax=255)
        right = predicted[i] == labels[i]
        text = f'{classes[predicted[i]]}  ({confidence[i]:.0%})'
        text += '' if right else f'\ntrue: {classes[labels[i]]}'
        axis.set_title(text, color='black' if right else 'crimson', fontsize=10)
    wrong = int((predicted != labels).sum())
    figure.suptitle(
        f'{len(labels) - wrong} of {len(labels)} correct: the {half} least certain first, then others; wrong in red'
    )
    figure.savefig(path, dpi=120)


def report_classifier(runner: Runner, picture: Path) -> dict[str, str]:
    """Draw ``picture`` and return the top-1 accuracy on the validation set."""
    scores, labels, images = [], [], []
    for batch, samples in predict(runner):
        images += [image.permute(1, 2, 0).squeeze(-1).numpy() for image in batch['inputs']]
        scores += [sample.pred_score.cpu().numpy() for sample in samples]
        labels += [int(sample.gt_label) for sample in samples]
    scores, labels = np.stack(scores), np.array(labels)
    draw(scores, labels, np.stack(images), runner.val_dataloader.dataset.metainfo['classes'], picture)
    return {'best top-1': f'{100 * (scores.argmax(1) == labels).mean():.2f} % on {len(labels)} validation images'}


def enlarge(image: np.ndarray, sample: Any) -> tuple[np.ndarray, Any]:
    """Enlarge an image and its sample, with predicted and true instances, so that boxes and names can be read."""
    import mmcv

    sample = sample.cpu()
    height, width = image.shape[:2]
    factor = ENLARGED / max(height, width)
    size = round(height * factor), round(width * factor)
    truth, found = sample.gt_instances, sample.pred_instances
    truth.bboxes, found.bboxes = truth.bboxes * factor, found.bboxes * factor
    if 'masks' in truth:
        truth.masks = truth.masks.resize(size)
    if 'masks' in found:
        smooth = torch.nn.functional.interpolate(found.masks[None].float(), size, mode='bilinear')[0]
        found.masks = smooth > 0.5
    return mmcv.imresize(image, size[::-1], interpolation='bicubic'), sample


def report_detector(runner: Runner, picture: Path) -> dict[str, str]:
    """Draw ``picture`` with the visualizer of MMDetection and return the average precisions."""
    import mmcv

    evaluator, dataset, visualizer = runner.val_evaluator, runner.val_dataloader.dataset, runner.visualizer
    visualizer.dataset_meta = dataset.metainfo
    rows, columns = SCENES
    drawn = []
    for batch, samples in predict(runner):
        evaluator.process(data_samples=samples, data_batch=batch)
        for sample in samples[: rows * columns - len(drawn)]:
            name = Path(sample.img_path).stem
            image, sample = enlarge(mmcv.imread(sample.img_path, channel_order='rgb'), sample)
            visualizer.add_datasample(name, image, sample, pred_score_thr=SCORE)
            drawn.append((name, visualizer.get_image()))
    metrics = evaluator.evaluate(len(dataset))
    figure = Figure(figsize=(10.3 * columns, 5.5 * rows), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis('off')
    for axis, (name, image) in zip(axes.flat, drawn):
        axis.imshow(image)
        axis.set_title(f'{name}: ground truth | predictions with score > {SCORE}', fontsize=16)
    figure.savefig(picture, dpi=120)
    return {
        f'best {kind}': f'mAP {metrics[f"coco/{kind}_mAP"]:.3f}, mAP50 {metrics[f"coco/{kind}_mAP_50"]:.3f} '
        f'on {len(dataset)} validation images'
        for kind in ('bbox', 'segm')
        if f'coco/{kind}_mAP' in metrics
    }


REPORTS = {'mmpretrain': report_classifier, 'mmdet': report_detector}


def check_config(args: Namespace) -> None:
    """Raise LaunchError unless a demo can report on a training with this config."""
    cfg = train_tool.merge_args(cli.load_config(args), args)
    scope = cfg.get('default_scope')
    if scope not in REPORTS:
        raise LaunchError(f'default_scope must be one of {tuple(REPORTS)} for a demo, got {scope!r}')
    hook = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    if cfg.get('val_evaluator') is None or not hook.get('save_best'):
        raise LaunchError(f'{args.config} needs val_evaluator and default_hooks.checkpoint.save_best for a demo')


def run(args: Namespace) -> None:
    """Train a model and report on its best checkpoint."""
    check_config(args)
    runner = train_tool.train(args)
    best = runner.message_hub.get_info('best_ckpt')
    load_checkpoint(runner.model, best, map_location='cpu')
    picture = Path(runner.work_dir) / 'predictions.png'
    lines = REPORTS[runner.cfg.default_scope](runner, picture)
    lines.update(checkpoint=best, log=Path(runner.log_dir) / f'{runner.timestamp}.log', picture=picture)
    print()
    for name, value in lines.items():
        print(f'{name:<11} {value}')


def main(argv: list[str] | None = None) -> None:
    cli.main(run, train_tool.parse_args(argv))


if __name__ == '__main__':
    main()
