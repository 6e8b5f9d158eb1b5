"""Check the data of a config: print a table of all checks, and exit with 1 if something is wrong."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

from mmkron.data_checks import CHECKS
from mmkron.data_checks.common import check_fields, describe
from mmkron.data_checks.files import describe_missing, find_missing
from mmkron.engine.runner import environment
from mmkron.utils.cli import add_common_arguments, load_config
from mmkron.utils.cli import main as run_as_program
from mmkron.utils.errors import LaunchError

SPLITS = ('train', 'val', 'test')


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser, distributed=False)
    return parser.parse_args(argv)


def check(args: Namespace) -> None:
    """Print the table of checks.

    Raises:
        LaunchError: If data is missing or does not fit the config.
    """
    cfg = load_config(args)
    splits = [split for split in SPLITS if cfg.get(f'{split}_dataloader')]
    with environment(cfg, args):
        wrong = list(check_fields(cfg, splits))
        if wrong:
            raise LaunchError(describe(wrong, f'{args.config}:'))
        missing = find_missing(cfg, splits)
        print_row('files and folders', len(missing), 'missing')
        if missing:
            raise LaunchError(describe_missing(missing, args.config))
        problems = []
        for find, subject in CHECKS:
            found = list(find(cfg, splits))
            print_row(subject, len(found), 'wrong or suspicious')
            problems += found
    if problems:
        print(describe(problems, f'the data of {args.config}:'))
    if any(not problem.warning for problem in problems):
        raise LaunchError('the data does not fit the config')


def print_row(subject: str, count: int, what: str) -> None:
    print(f'{subject:42}{f"{count} {what}" if count else "ok"}', flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    run_as_program(check, parse_args(argv))


if __name__ == '__main__':
    main()
