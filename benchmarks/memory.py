"""Peak memory of one call on the CPU, for the scripts in this folder. Linux only.

It is what Linux reports as the growth of the resident set at its highest (VmHWM) over that before the call, in a
process of its own for each figure. The running sum of torch.profiler's memory events agrees with it but for the buffers
of libraries (README.md).
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

Case = TypeVar('Case')


def memory_of(form: Callable[[], object]) -> int:
    """Bytes by which the resident set at its highest during the call exceeds that before it."""
    status, reset = Path('/proc/self/status'), Path('/proc/self/clear_refs')

    def read(field: str) -> int:
        return 1024 * int(re.search(rf'{field}:\s+(\d+) kB', status.read_text())[1])

    reset.write_text('5')  # sets the highest value to the present one
    before = read('VmRSS')
    form()
    return read('VmHWM') - before


def check_memory() -> None:
    """Raises RuntimeError unless a known allocation is measured as what it is."""
    size = 4 * 10**8
    measured = memory_of(lambda: torch.ones(size // 4))
    if abs(measured - size) > 0.01 * size:
        raise RuntimeError(f'{size} bytes were measured as {measured}')


def in_own_processes(peak: Callable[[Case], int], cases: Iterable[Case]) -> Iterator[tuple[Case, int]]:
    """Each case with its figure, by ``peak`` (a function of a module) in a fresh process a case."""
    # A block of memory that is freed goes back to the system at once, so that the resident set is what is in use.
    os.environ['MALLOC_MMAP_THRESHOLD_'] = '65536'
    cases = list(cases)
    with multiprocessing.get_context('spawn').Pool(1, maxtasksperchild=1) as pool:
        yield from zip(cases, pool.imap(peak, cases, chunksize=1))
