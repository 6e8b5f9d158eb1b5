"""Measure the forms of the position lambda on random problems, fit the rates of ops/lambdas/heuristics.py, and report
how much time the choice between the forms loses.

Writes lambda_forms.md next to this script and prints the rates. float32 on a CPU, one and two threads, without a graph
("forward") and with the gradients of all inputs ("both"). The rates are fitted to one half of the problems (least
squares of relative errors, none below zero); the choices are judged on the other half.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from mmengine.utils import ProgressBar
from scipy.optimize import nnls

from mmkron.ops.lambdas import heuristics
from mmkron.ops.lambdas.heuristics import (
    CONV_CHANNELS,
    CONV_MAX_LAMBDAS,
    WORK,
    Problem,
    Rates,
    candidates,
    fastest_form,
)
from mmkron.ops.lambdas.position import FORMS, position_lambda
from timing import machine, medians, table

FOLDER = Path(__file__).resolve().parent
THREADS = (1, 2)
LARGEST = 10**9  # multiply-adds of a convolution: larger ones take too long
Figures = dict[tuple[int, bool, str], float]  # (threads, backward, form) -> seconds


def problems() -> Iterator[Problem]:
    """Yield random problems of sizes that occur in networks."""
    chance = random.Random(0)
    while True:
        height = chance.choice((7, 10, 14, 16, 20, 28, 40, 56, 64))
        problem = Problem(
            batch=chance.choice((1, 1, 2, 4, 8, 16, 32)),
            heads=chance.choice((1, 2, 4, 4, 8, 16)),
            depth=chance.choice((8, 16, 16, 32)),
            width=chance.choice((4, 8, 16, 32, 64, 128)),
            intra=chance.choice((1, 1, 1, 4)),
            size=(height, chance.choice((height, height, height // 2 + 1))),
            scope=(chance.choice((3, 5, 7, 9, 11, 15, 23, 23, 31)),) * 2,
        )
        if conv_macs(problem) <= LARGEST:
            yield problem


def conv_macs(problem: Problem) -> int:
    """Return the multiply-adds of the form ``conv``."""
    work = heuristics.conv_work(problem)
    return work.macs + work.slow_macs


def by_thresholds(problem: Problem) -> str:
    """Choose by three thresholds (positions, multiply-adds, their ratio to tiles), the best of a grid on 120 problems.

    Read only by this script, to show what the fitted rates are worth.
    """
    p = problem
    if p.size[0] * p.size[1] <= 100:
        return 'dense'
    ratio = p.width * max(p.depth, CONV_CHANNELS) / (p.heads * (p.depth + p.width))
    is_small = conv_macs(p) <= 3e6 or ratio <= 3
    return 'conv' if is_small and p.lambdas <= CONV_MAX_LAMBDAS else 'tiled'


def measure(problem: Problem) -> Figures:
    """Return the medians of three rounds in which the forms take turns."""
    p, figures = problem, {}
    query = torch.randn(p.batch, p.heads, p.depth, *p.size)
    value = torch.randn(p.batch, p.intra, p.width, *p.size)
    embeddings = torch.randn(p.intra, p.depth, *p.scope)

    def run(form: str, backward: bool) -> None:
        operands = [x.detach().requires_grad_(backward) for x in (query, value, embeddings)]
        out = position_lambda(*operands, form=form)
        if backward:
            out.backward(torch.ones_like(out))

    for threads in THREADS:
        torch.set_num_threads(threads)
        for backward in (False, True):
            steps = {form: partial(run, form, backward) for form in {'conv', *candidates(problem)}}
            for form, seconds in medians(steps, rounds=3, least=0).items():
                figures[threads, backward, form] = seconds
    return figures


def fit(times: dict[Problem, Figures], backward: bool) -> dict[str, Rates]:
    """Fit the rates of each form without or with a backward pass."""
    rates = {}
    for form, work in WORK.items():
        amounts, seconds = [], []
        for problem, figures in times.items():
            if form in candidates(problem):
                amounts += [work(problem)] * len(THREADS)
                seconds += [figures[threads, backward, form] for threads in THREADS]
        units = np.array([1e-6] * (len(amounts[0]) - 1) + [1.0])
        relative = 1e-6 * np.array(amounts, float) * units / np.array(seconds)[:, None]
        solution, _ = nnls(relative, np.ones(len(seconds)))
        solution *= np.exp(np.median(-np.log(relative @ solution)))  # as often too high as too low
        rates[form] = Rates(*(float(f'{rate:.3g}') for rate in solution))
    return rates


def judge(times: dict[Problem, Figures]) -> str:
    """Compare the chosen form, a choice by thresholds, and each form alone with the fastest form."""
    choices = {
        'the choice': fastest_form,
        'three thresholds': lambda p, _: by_thresholds(p),
        'always conv': lambda p, _: 'conv',
        'always tiled': lambda p, _: 'tiled',
    }
    rows = []
    for name, choose in choices.items():
        for threads in THREADS:
            for backward in (False, True):
                losses = []
                for problem, figures in times.items():
                    mine = {form: time for (*of, form), time in figures.items() if of == [threads, backward]}
                    losses.append(mine[choose(problem, backward)] / min(mine.values()))
                loss = np.array(losses)
                figures = (np.mean(loss), np.quantile(loss, 0.9), loss.max())
                rows.append([name, str(threads), 'both' if backward else 'forward', *(f'{x:.2f}' for x in figures)])
    return table(['form', 'threads', 'step', 'mean', '90 %', 'worst'], rows)


def compare_forms() -> str:
    """Measure examples at h 4 and k 16."""
    rows = []
    cases = [(1, 64, 56), (8, 64, 56), (1, 128, 28), (8, 128, 28), (1, 256, 14), (8, 256, 14)]
    cases = [(*case, scope) for case in cases for scope in (3, 9, 23)]
    cases += [(batch, 256, size, 23) for batch in (1, 8) for size in (7, 10, 12)]
    for batch, channels, size, scope in cases:
        query = torch.randn(batch, 4, 16, size, size)
        value = torch.randn(batch, 1, channels // 4, size, size)
        weights = torch.randn(1, 16, scope, scope, requires_grad=True)
        names = [form for form in FORMS if form != 'dense' or size <= 14]

        def run(form: str | None, backward: bool, operands: tuple = (query, value, weights)) -> None:
            query, value, weights = (x.detach().requires_grad_(backward) for x in operands)
            out = position_lambda(query, value, weights, form=form)
            if backward:
                out.backward(torch.ones_like(out))

        row = [f'({batch}, {channels}, {size}, {size})', str(scope)]
        for backward in (False, True):
            seconds = medians({name: partial(run, name, backward) for name in names}, rounds=5, least=0.01)
            row += [f'{1e3 * seconds[name]:.2f}' if name in seconds else '' for name in FORMS]
            problem = Problem(batch, 4, 16, channels // 4, 1, (size, size), (scope, scope))
            row.append(fastest_form(problem, backward))
        rows.append(row)
    header = [[*(f'{form}, {step}' for form in FORMS), 'chosen'] for step in ('forward', 'both')]
    return table(['map', 'scope', *header[0], *header[1]], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--count', type=int, default=240, help='problems; default: %(default)s')
    args = parser.parse_args()
    times, progress = {}, ProgressBar(args.count)
    for problem, _ in zip(problems(), range(args.count)):
        times[problem] = measure(problem)
        progress.update()
    items = list(times.items())
    for name, backward in (('FORWARD_RATES', False), ('TRAINING_RATES', True)):
        rates = fit(dict(items[::2]), backward)
        print(f'\n{name} = {rates}')
        getattr(heuristics, name).update(rates)
    heuristics.estimate.cache_clear()
    torch.set_num_threads(1)
    text = f"""# Forms of the position lambda

{machine()} and 2 threads. float32.

## Time lost by the choice

Time divided by the time of the fastest form, on {len(items) // 2} random problems; the rates are fitted to
{len(items[::2])} others.

{judge(dict(items[1::2]))}

## Examples, milliseconds, one thread, h 4, k 16

{compare_forms()}
"""
    (FOLDER / 'lambda_forms.md').write_text(text)
    print(text)


if __name__ == '__main__':
    main()
