"""Tests a checkpoint with a config of MMPretrain, MMSegmentation or MMDetection."""

import argparse
import sys
from pathlib import Path
from typing import Optional

from mmengine.config import DictAction


def parse_args(argv: Optional[list] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file or URL')
    parser.add_argument(
        '--work-dir', help='folder for logs and metrics; default: work_dir of the config, else work_dirs/CONFIG_NAME'
    )
    parser.add_argument('--out', help='keep the predictions: a .pkl file; with MMSegmentation a folder for label maps')
    parser.add_argument(
        '--allow-partial',
        action='store_true',
        help='test a checkpoint that leaves tensors of the model unset; else it is refused',
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help='test-time augmentation: tta_model and tta_pipeline of the '
        'config, which default to flipping with MMPretrain and MMDetection',
    )
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument(
        '--show-dir',
        help='folder for images with the predictions drawn in',
    )
    parser.add_argument('--wait-time', type=float, default=2, help='seconds that --show keeps an image; default: 2')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='change the config: a.b=1 a.c="[1,2]" a.0.d=x; no white space in a value',
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='what started the processes of a distributed run',
    )
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Optional[list] = None) -> None:
    args = parse_args(argv)
    try:
        from mmkron.engine import runner as launch
    except ModuleNotFoundError as error:
        if error.name != 'mmkron':
            raise
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
        from mmkron.engine import runner as launch
    launch.main(launch.test, args)


if __name__ == '__main__':
    main()
