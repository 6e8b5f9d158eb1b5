"""What the command lines share: common options, and the conversion of a LaunchError into an exit code."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from typing import Any

from mmengine.config import DictAction

from mmkron.engine.errors import LaunchError

_LOCAL_RANKS = ('LOCAL_RANK', 'SLURM_LOCALID', 'OMPI_COMM_WORLD_LOCAL_RANK')


def add_common_arguments(parser: argparse.ArgumentParser, distributed: bool = True) -> None:
    """Add the options that all tools share.

    Args:
        parser: The parser of the tool. The config is its first positional argument.
        distributed: Whether the tool has a work dir and may run in several processes.
    """
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='override settings of the config: a.b=1 a.c="[1,2]" a.0.d=x; a value must not contain white space',
    )
    if not distributed:
        parser.set_defaults(launcher='none', local_rank=0, work_dir=None)
        return
    parser.add_argument(
        '--work-dir', help='folder for logs and results; default: work_dir of the config, else work_dirs/CONFIG_NAME'
    )
    launchers = ['none', 'pytorch', 'slurm', 'mpi']
    parser.add_argument('--launcher', choices=launchers, default='none', help='launcher of a distributed run')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def main(run: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> None:
    """Call ``run(args)`` as a program: a LaunchError ends it with its message and exit code 1.

    Only the first process on a machine prints and warns.
    """
    first = all(os.environ.get(name, '0') == '0' for name in _LOCAL_RANKS)
    with ExitStack() as stack:
        if not first:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, 'w'))))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter('ignore')
        try:
            run(args)
        except LaunchError as error:
            if first:
                raise SystemExit(f'error: {error}') from None
            time.sleep(3)  # torch.distributed.run kills all processes when one ends; let the first one print
            raise SystemExit(1) from None
