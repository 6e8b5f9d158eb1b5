"""Test a checkpoint with a config of MMPretrain, MMSegmentation or MMDetection."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from mmkron.engine import cli


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_common_arguments(parser)
    parser.add_argument('checkpoint', help='checkpoint file or URL')
    parser.add_argument('--out', help='.pkl file for the predictions; with MMSegmentation a folder for label maps')
    parser.add_argument(
        '--allow-partial', action='store_true', help='accept a checkpoint that does not set all tensors of the model'
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help='use test-time augmentation: tta_model and tta_pipeline of the config; default with MMPretrain: flipping',
    )
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument('--show-dir', help='folder for images with the predictions')
    parser.add_argument(
        '--wait-time', type=float, default=2, help='seconds for which --show shows an image; default: %(default)s'
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from mmkron.engine import runner  # imports PyTorch, which --help does not need

    cli.main(runner.test, args)


if __name__ == '__main__':
    main()
