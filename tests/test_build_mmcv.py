"""The quick build of mmcv compiles each of its C++ files exactly once."""

import importlib.util
import re
from collections import Counter

from support.tools import ROOT


def test_units_hold_every_source_once(tmp_path):
    spec = importlib.util.spec_from_file_location('build_mmcv', ROOT / '.dev_scripts/build_mmcv.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    names = {
        '.': [f'op{i}' for i in range(7)] + ['pybind', 'psamask'],
        'cpu': [f'op{i}_cpu' for i in range(5)] + ['psamask'],
    }
    for folder, stems in names.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        for stem in stems:
            (tmp_path / folder / f'{stem}.cpp').write_text(f'// {folder}/{stem}\n')
    script.group(tmp_path)
    for folder, stems in names.items():
        compiled = Counter()
        for unit in (tmp_path / folder).glob('*.cpp'):
            included = re.findall(r'#include "(\S+)"', unit.read_text())
            compiled.update([(tmp_path / folder / name).read_text() for name in included] or [unit.read_text()])
        assert compiled == Counter(f'// {folder}/{stem}\n' for stem in stems)
    assert len(list((tmp_path / 'cpu').glob('*.cpp'))) < len(names['cpu'])
