"""Check the data of a config: print a table of all checks, and exit with 1 if something is wrong."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

from mmkron.data_checks import SLOW, find_problems
from mmkron.data_checks.common import describe
from mmkron.engine.runner import environment
from mmkron.utils import cli
from mmkron.utils.errors import LaunchError

SPLITS = ('train', 'val', 'test')


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_common_arguments(parser, distributed=False)
    return parser.parse_args(argv)


def check(args: Namespace) -> None:
    """Print the table of checks and all problems.

    Raises:
        LaunchError: If data is missing or does not fit the config.
    """
    cfg = cli.load_config(args)
    splits = [split for split in SPLITS if cfg.get(f'{split}_dataloader')]
    problems, missing = [], set()  # missing: keys of the datasets whose files do not exist
    with environment(cfg, args):
        print_row('check', 'dataset', 'result')
        for check, data, found in find_problems(cfg, splits, SLOW):
            errors = sum(not problem.warning for problem in found)
            counts = [f'{errors} wrong'] * bool(errors) + [f'{len(found) - errors} suspicious'] * (len(found) > errors)
            missing |= {data.key} if found and check.name == 'files' else set()
            unread = data.key in missing and check.dataset != 'any'
            print_row(check.name, data.key or 'config', ', '.join(counts) or ('not read' if unread else 'ok'))
            problems += found
    if problems:
        print('\n' + describe(problems, f'the data of {args.config}:'))
    if any(not problem.warning for problem in problems):
        raise LaunchError('the data is missing or does not fit the config')


def print_row(check: str, dataset: str, result: str) -> None:
    print(f'{check:18}{dataset:42}{result}', flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    cli.main(check, parse_args(argv))


if __name__ == '__main__':
    main()
