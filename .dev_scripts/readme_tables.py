#!/usr/bin/env python3
"""Write the tables of models in the READMEs from the metafiles.

A README marks a table by comments; what is between them is replaced:

    <!-- table: kao Semantic Segmentation -->
    <!-- end of table -->

A marker has folders of ``configs``, collections or models (names or aliases), separated by commas, and optionally a
task at the end.

    python .dev_scripts/readme_tables.py          # write
    python .dev_scripts/readme_tables.py --check  # exit with 1 if a table is out of date
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r'(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)', re.S)
TASKS = ('Image Classification', 'Semantic Segmentation', 'Object Detection', 'Instance Segmentation')
SHORT = {'Top 1 Accuracy': 'top-1'}


def load_models() -> list[dict]:
    """Return the models of all metafiles, in the order of ``model-index.yml``."""
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text(encoding='utf-8'))
    return [m for path in index['Import'] for m in yaml.safe_load((ROOT / path).read_text(encoding='utf-8'))['Models']]


def names_of(model: dict) -> set[str]:
    """Return the names by which a marker selects a model."""
    alias = model.get('Alias') or []
    aliases = [alias] if isinstance(alias, str) else alias
    return {Path(model['Config']).parent.name, model['In Collection'], model['Name'], *aliases}


def select(models: list[dict], marker: str) -> list[dict]:
    """Return the models of a marker, in its order.

    Raises:
        ValueError: A key of the marker selects no model.
    """
    task = next((task for task in TASKS if marker.endswith(task)), None)
    selected = []
    for key in (key.strip() for key in marker.removesuffix(task or '').split(',')):
        found = [m for m in models if key in names_of(m) and task in (None, *(r['Task'] for r in m['Results']))]
        if not found:
            raise ValueError(f'table {marker!r}: {key!r} selects no model')
        selected += [m for m in found if m not in selected]
    return selected


def shorten(value: float) -> str:
    """Return a number with two decimals, or three significant digits below 1."""
    return f'{value:.2f}' if value >= 1 else f'{value:.3g}'


def make_table(models: list[dict], folder: Path) -> str:
    """Return a Markdown table of models, with links relative to ``folder``. Columns without a value are omitted."""
    rows = []
    for model in models:
        result = model['Results'][0]
        metrics = {SHORT.get(k, k): str(v) for r in model['Results'] for k, v in (r.get('Metrics') or {}).items()}
        link = os.path.relpath(ROOT / model['Config'], folder)
        rows.append(
            {
                'model': f'[{model["Name"]}]({link})',
                'data': result['Dataset'],
                'parameters (M)': shorten(model['Metadata']['Parameters'] / 1e6),
                'FLOPs (G)': shorten(model['Metadata']['FLOPs'] / 1e9),
                **metrics,
            }
        )
    columns = list(dict.fromkeys(column for row in rows for column in row))
    rules = ['---' if column in ('model', 'data') else '--:' for column in columns]
    lines = [columns, None, *([row.get(column, '') for column in columns] for row in rows)]
    return ''.join(f'|{"|".join(rules)}|\n' if line is None else f'| {" | ".join(line)} |\n' for line in lines)


def update(text: str, models: list[dict], folder: Path) -> str:
    """Return a page with its marked tables rebuilt."""
    return MARKED.sub(lambda m: m.group(1) + make_table(select(models, m.group(2)), folder) + m.group(3), text)


def main() -> int:
    """Write or check the tables of all READMEs."""
    parser = argparse.ArgumentParser(description='Write the tables of models in the READMEs from the metafiles.')
    parser.add_argument('--check', action='store_true', help='write nothing; exit with 1 if a table is out of date')
    args = parser.parse_args()
    models, stale = load_models(), []
    for page in [ROOT / 'README.md', *sorted((ROOT / 'configs').glob('*/README.md'))]:
        text = page.read_text(encoding='utf-8')
        new = update(text, models, page.parent)
        if new != text:
            stale.append(str(page.relative_to(ROOT)))
            if not args.check:
                page.write_text(new, encoding='utf-8')
    for name in stale:
        print(f'{name}: {"out of date" if args.check else "updated"}')
    return int(args.check and bool(stale))


if __name__ == '__main__':
    sys.exit(main())
