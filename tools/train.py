"""Trains a config of MMPretrain, MMSegmentation or MMDetection."""

import argparse
import sys
from pathlib import Path
from typing import Optional

from mmengine.config import DictAction


def parse_args(argv: Optional[list] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--work-dir',
        help='folder for logs and checkpoints; default: work_dir of the config, else work_dirs/CONFIG_NAME',
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='PATH',
        help='go on from this checkpoint; without PATH from the latest one in the work dir',
    )
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by the batch size over auto_scale_lr.base_batch_size',
    )
    parser.add_argument('--no-validate', action='store_true', help='do not evaluate during training')
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
    launch.main(launch.train, args)


if __name__ == '__main__':
    main()
