"""README and docs: their Python runs, the files that they name exist, their tables are those of the metafiles."""

import re
import subprocess
import sys

import pytest
import torch

from mmkron.registry import MODELS
from support.docs import read_blocks
from support.tools import ROOT

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
ALL_PAGES = [*PAGES, ROOT / 'CONTRIBUTING.md', ROOT / 'benchmarks/README.md', *(ROOT / 'configs').glob('*/README.md')]
# Markers of blocks that test_docs does not run: configs that other tests build, and code that needs the reader's files.
ELSEWHERE = {
    'mix': 'tests/test_mixing.py',
    'own data': 'tests/test_tools/test_own_data.py',
    'own events': 'tests/test_datasets/test_event_folder.py',
    'converter': 'tests/test_tools/test_converter_page.py',
    'head': 'tests/test_models/test_decode_heads.py',
    'dataset': 'tests/test_datasets/test_dataset_page.py',
}


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def registered():
    """Remove from the registry what a snippet registers."""
    yield
    for name, cls in list(MODELS.module_dict.items()):
        if cls.__module__ == 'page':
            del MODELS.module_dict[name]


@pytest.mark.parametrize('page', PAGES, ids=name_of)
def test_python(page, tmp_path, monkeypatch, registered):
    """The blocks of a page run in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope = {'__name__': 'page'}
    for block in read_blocks(page, 'python'):
        assert block.key in ('', 'not run', *ELSEWHERE), f'{page.name}:{block.line}: unknown marker {block.key!r}'
        if not block.key or (block.key, block.value) == ('mix', 'torch'):
            code = '\n' * (block.line - 1) + block.text  # so that a traceback names the line of the page
            exec(compile(code, str(page), 'exec'), scope)
        elif block.key in ELSEWHERE:
            name = block.value.split('/')[-1].split()[0].removesuffix('.py')
            assert name in (ROOT / ELSEWHERE[block.key]).read_text(encoding='utf-8')


@pytest.mark.parametrize('page', ALL_PAGES, ids=name_of)
def test_files(page):
    """Links, paths in commands and targets of make exist."""
    text = page.read_text(encoding='utf-8')
    for target in re.findall(r'\]\(([^)#\s]+)', text):
        assert '://' in target or (page.parent / target).exists(), target
    own = {block.value for name in PAGES for block in read_blocks(name, 'python')}
    for block in read_blocks(page, 'bash'):
        for path in re.findall(
            r'(?<![\w/.])(?:configs|tools|tests|benchmarks|docs|requirements)/[\w./-]*\.\w+', block.text
        ):
            assert path in own or (ROOT / path).is_file(), f'{page.name}:{block.line}: {path} does not exist'
        for target in re.findall(r'^make ([a-z-]+)', block.text, re.M):
            assert re.search(f'^{target}:', (ROOT / 'Makefile').read_text(), re.M), f'make has no target {target}'


def test_tables():
    """``.dev_scripts/readme_tables.py`` changes nothing."""
    command = [sys.executable, str(ROOT / '.dev_scripts/readme_tables.py'), '--check']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
