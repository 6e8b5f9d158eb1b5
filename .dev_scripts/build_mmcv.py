#!/usr/bin/env python
"""Build a wheel of mmcv with its compiled operators in minutes: python .dev_scripts/build_mmcv.py mmcv==2.1.0

Run it with the Python of the environment that the wheel is for, in which torch, setuptools<82, wheel and ninja are
installed; then `pip install --no-deps WHEEL`. It serves `mmcv` and `onedl-mmcv`, and needs a C++17 compiler and
Python's headers.

mmcv compiles about 80 small C++ files, each of which spends its time on torch's headers. Here a few large files include
them instead ("unity build"), which takes a sixth of the CPU time; mmcv's own setup.py does the rest. If that fails, the
package is built as it comes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path('mmcv/ops/csrc/pytorch')
# Define macros or names that other files use as well, so each stays a translation unit of its own.
ALONE = ('pybind.cpp', 'psamask.cpp', 'roi_align_rotated.cpp', 'rotated_feature_align.cpp')
UNITS = {'.': 3, 'cpu': 2}  # folder below SOURCES -> number of units


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('requirement', help='mmcv==VERSION or onedl-mmcv==VERSION')
    parser.add_argument('--wheel-dir', type=Path, default=Path('.'), help='where the wheel goes; default: here')
    parser.add_argument('--log', type=Path, default=Path('mmcv-build.log'), help='where the output of the build goes')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = fetch(args.requirement, Path(scratch), args.log)
        group(source / SOURCES)
        done = build(str(source), args.wheel_dir, args.log)
    if not done:
        print('the quick build failed; building the package as it comes, a quarter of an hour on two cores', flush=True)
        options = ('--no-cache-dir', '--no-binary', args.requirement.split('=')[0])
        done = build(args.requirement, args.wheel_dir, args.log, *options)
    if not done:
        tail = args.log.read_text(errors='replace').splitlines()[-40:]
        raise SystemExit('\n'.join([*(line[:300] for line in tail), f'building {args.requirement} failed: {args.log}']))


def fetch(requirement: str, folder: Path, log: Path) -> Path:
    """Download the source distribution of a requirement and return the folder where it is unpacked."""
    options = ['--no-deps', '--no-build-isolation', '--no-binary', ':all:', '--dest', str(folder)]
    if run(['download', *options, requirement], log):
        raise SystemExit(f'the source distribution of {requirement} cannot be downloaded: {log}')
    (archive,) = folder.glob('*.tar.gz')
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter='data')
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    return source


def group(sources: Path) -> None:
    """Replace the C++ files below ``sources`` with a few that include them."""
    for name, count in UNITS.items():
        folder = sources / name
        files = sorted(path for path in folder.glob('*.cpp') if path.name not in ALONE)
        for path in files:
            path.rename(path.with_suffix('.inc'))
        size = -(-len(files) // count)
        for i in range(count):
            includes = (f'#include "{path.stem}.inc"\n' for path in files[i * size : (i + 1) * size])
            (folder / f'unit_{i}.cpp').write_text(''.join(includes))


def build(what: str, wheel_dir: Path, log: Path, *options: str) -> bool:
    """Build the wheel of a folder or requirement; return whether that worked."""
    env = dict(os.environ, MMCV_WITH_OPS='1')
    # The default flags, -g and -O3, take three times as long.
    env.setdefault('CFLAGS', '-g0 -O1 -w')
    env.setdefault('MAX_JOBS', str(os.cpu_count() or 1))
    if shutil.which('nvcc') is None:
        env['CUDA_VISIBLE_DEVICES'] = ''  # a GPU without the CUDA compiler would stop the build
    command = ['wheel', '--verbose', '--no-deps', '--no-build-isolation', '--wheel-dir', str(wheel_dir)]
    return run([*command, *options, what], log, env) == 0


def run(command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> int:
    """Run pip, append its output to ``log`` and print how far ninja is; return the exit code."""
    begin = shown = time.monotonic()
    with (
        open(log, 'a') as file,
        subprocess.Popen(
            [sys.executable, '-m', 'pip', *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors='replace',
            env=env,
        ) as process,
    ):
        for line in process.stdout:
            file.write(line)
            step = re.match(r'\s*\[(\d+)/(\d+)\] ', line)
            now = time.monotonic()
            if step and (now - shown > 10 or step[1] == step[2]):
                shown = now
                print(f'compiling mmcv: {step[1]}/{step[2]}, {now - begin:.0f} s', flush=True)
    return process.returncode


if __name__ == '__main__':
    main()
