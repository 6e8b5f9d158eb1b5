"""Trains a classifier (arguments as of train.py), then says how good it got and draws some of its predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from mmengine.runner import Runner, load_checkpoint

import train as train_tool
from mmkron.engine import launch

GRID = (4, 8)


@torch.no_grad()
def predict(runner: Runner) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores (N, classes), labels (N,) and images (N, H, W) or (N, H, W, 3) in 0..255 of the validation set."""
    model = runner.model.eval()
    scores, labels, images = [], [], []
    for batch in runner.val_dataloader:
        images += [image.permute(1, 2, 0).squeeze(-1).numpy() for image in batch['inputs']]
        samples = model.val_step(batch)
        scores += [sample.pred_score.cpu().numpy() for sample in samples]
        labels += [int(sample.gt_label) for sample in samples]
    return np.stack(scores), np.array(labels), np.stack(images)


def draw(scores: np.ndarray, labels: np.ndarray, images: np.ndarray, classes: tuple[str, ...], path: Path) -> None:
    """The predictions the model is least sure of beside the same number of others; wrong ones in red."""
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
        f'{len(labels) - wrong} of {len(labels)} right; the {half} least certain first, then others; wrong ones in red'
    )
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    runner = launch.train(train_tool.parse_args(argv))
    best = runner.message_hub.get_info('best_ckpt')
    load_checkpoint(runner.model, best, map_location='cpu')
    scores, labels, images = predict(runner)
    picture = Path(runner.work_dir) / 'predictions.png'
    draw(scores, labels, images, runner.val_dataloader.dataset.metainfo['classes'], picture)
    lines = {
        'best top-1': f'{100 * (scores.argmax(1) == labels).mean():.2f} % on {len(labels)} validation images',
        'checkpoint': best,
        'log': Path(runner.log_dir) / f'{runner.timestamp}.log',
        'picture': picture,
    }
    print()
    for name, value in lines.items():
        print(f'{name:<11} {value}')


if __name__ == '__main__':
    main()
