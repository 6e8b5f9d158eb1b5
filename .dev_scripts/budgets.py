"""Print the lines of each room and what is too long; exit with 1 if a budget is exceeded."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {'mmkron/engine': 1200, 'mmkron/data_checks': 800}
FILE, FUNCTION, CONSTRUCTOR = 400, 50, 40  # lines; of a constructor, the lines of its body
TESTS_PER_LINE = 1.2


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding='utf-8').splitlines())


def python_files(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob('*.py')) if '.mim' not in path.parts]


def long_functions(path: Path) -> list[tuple[int, str]]:
    """Return (lines, name) of the functions of a file that are too long, docstrings not counted."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        is_constructor = node.name == '__init__'
        first = body[0].lineno if is_constructor or body is not node.body else node.lineno
        lines = node.end_lineno - first + 1
        if lines > (CONSTRUCTOR if is_constructor else FUNCTION):
            found.append((lines, f'{path.relative_to(ROOT)}: {node.name}'))
    return found


def main() -> int:
    """Print the table and return the exit code."""
    excess = []
    rooms = sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / 'mmkron').iterdir()
        if path.is_dir() and path.name[0] not in '._'
    )
    totals = {room: sum(map(count_lines, python_files(room))) for room in (*rooms, 'mmkron', 'tools', 'tests')}
    for room, lines in totals.items():
        print(f'{room:24}{lines:8,}' + (f' of {ROOMS[room]:,}' if room in ROOMS else ''))
        if lines > ROOMS.get(room, lines):
            excess.append(f'{room} has {lines} lines, more than {ROOMS[room]}')
    ratio = totals['tests'] / (totals['mmkron'] + totals['tools'])
    print(f'{"tests per line":24}{ratio:8.2f} of {TESTS_PER_LINE}')
    if ratio > TESTS_PER_LINE:
        excess.append(f'tests have {ratio:.2f} lines per line of mmkron and tools, more than {TESTS_PER_LINE}')
    for path in python_files('mmkron') + python_files('tools'):
        if count_lines(path) > FILE:
            excess.append(f'{path.relative_to(ROOT)} has {count_lines(path)} lines, more than {FILE}')
        excess += [f'{name} has {lines} lines' for lines, name in sorted(long_functions(path), reverse=True)]
    print('\n'.join(excess))
    return bool(excess)


if __name__ == '__main__':
    sys.exit(main())
