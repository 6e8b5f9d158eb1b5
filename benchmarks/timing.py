"""Timing of alternatives side by side, for every script in this folder."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def medians(forms: dict[str, Callable[[], object]], rounds: int = 15, least: float = 0.03) -> dict[str, float]:
    """Median seconds per call. The forms take turns, so that what else the machine does hits all of them alike.

    Args:
        forms: name -> function to call.
        rounds: measurements of each form.
        least: seconds that one measurement lasts at least; calls are repeated for it.
    """
    for form in forms.values():
        form()
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            begin, calls = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - begin) < least or calls == 0:
                form()
                calls += 1
            seconds[name].append(elapsed / calls)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> str:
    """Processor, threads and torch, in words."""
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(':')[1].strip() for line in lines if line.startswith('model name')), platform.processor())
    return f'{model}, {torch.get_num_threads()} thread(s), torch {torch.__version__.split("+")[0]}, CPU'


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [header, ['---', *['--:'] * (len(header) - 1)], *rows]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)
