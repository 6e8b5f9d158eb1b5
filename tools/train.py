"""Train a model with a config of MMPretrain, MMSegmentation or MMDetection."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from mmkron.engine import cli
from mmkron.engine import runner as launch


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_common_arguments(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='PATH',
        help='resume from PATH, or from the latest checkpoint in the work dir',
    )
    parser.add_argument('--amp', action='store_true', help='train with automatic mixed precision')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='multiply the learning rate by the total batch size over auto_scale_lr.base_batch_size',
    )
    parser.add_argument('--no-validate', action='store_true', help='do not evaluate during training')
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    cli.main(launch.train, parse_args(argv))


if __name__ == '__main__':
    main()
