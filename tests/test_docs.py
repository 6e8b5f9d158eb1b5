"""README and docs: their Python runs, their commands name what exists and are accepted by the tools' parsers."""

import importlib.util
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from mmkron.registry import MODELS
from support.tools import ROOT

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
WITH_COMMANDS = [*PAGES, ROOT / 'CONTRIBUTING.md', ROOT / 'benchmarks/README.md']
WITH_COMMANDS += sorted((ROOT / 'configs').glob('*/README.md'))
# Blocks with such a first line are configs, which these modules build.
CONFIG_TESTS = {
    'mix': 'tests/test_mixing.py',
    'own data': 'tests/test_tools/test_own_data.py',
    'own events': 'tests/test_datasets/test_event_folder.py',
}
MARKER = re.compile(r'<!-- not run:(.*?)-->\s*$')


class Block(NamedTuple):
    language: str
    text: str
    line: int  # of its first line in the page
    marker: str = None  # what stands behind 'not run:'


def blocks(page, *languages):
    """The code blocks of a page in these languages; a marker comment stands directly above a block."""
    found, lines = [], page.read_text(encoding='utf-8').split('\n')
    start = None
    for number, line in enumerate(lines):
        fence = re.match(r'\s*```(\w*)\s*$', line)
        if fence and start is None:
            start, language = number, fence.group(1)
        elif fence:
            above = '\n'.join(lines[:start]).rstrip().rsplit('\n', 1)[-1]
            marker = MARKER.search(above)
            text = textwrap.dedent('\n'.join(lines[start + 1 : number])) + '\n'
            found.append(Block(language, text, start + 2, marker and marker.group(1)))
            start = None
    assert start is None, f'{page.name}: a code block that begins in line {start + 1} has no end'
    return [block for block in found if block.language in languages]


def config_of(block):
    """('mix', name), ('own data', path) or ('own events', path) of a block that is a config; None of others."""
    first = re.match(r'# ([\w ]+): ([^\n]+)\n', block.text)
    return first.groups() if first and first.group(1) in CONFIG_TESTS and first.group(2) != 'torch' else None


def own_configs(page):
    """Paths of the configs that a page has its reader write."""
    named = filter(None, map(config_of, blocks(page, 'python')))
    return {path for kind, path in named if kind in ('own data', 'own events')}


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def registered():
    """Takes out of the registry what a snippet registers, and nothing that it has the registry import."""
    yield
    for name, cls in list(MODELS.module_dict.items()):
        if cls.__module__ == 'page':
            del MODELS.module_dict[name]


@pytest.mark.parametrize('page', PAGES, ids=name_of)
def test_python(page, tmp_path, monkeypatch, registered):
    """In order, in one namespace for a page; configs are what other tests build."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope = {'__name__': 'page'}
    for block in blocks(page, 'python'):
        config = config_of(block)
        if config is not None:
            kind, name = config
            text = (ROOT / CONFIG_TESTS[kind]).read_text(encoding='utf-8')
            assert Path(name).stem.split()[0] in text, (
                f'{page.name}:{block.line}: {CONFIG_TESTS[kind]} does not build it'
            )
        elif block.marker is None:
            code = '\n' * (block.line - 1) + block.text  # so that a traceback names the page's line
            exec(compile(code, str(page), 'exec'), scope)


@pytest.mark.parametrize('page', WITH_COMMANDS, ids=name_of)
def test_markers(page):
    """What is not run says why."""
    for block in blocks(page, 'python', 'bash'):
        if block.marker is not None:
            assert len(block.marker.split()) >= 3, f'{page.name}:{block.line}: "not run:" needs a reason'


@pytest.mark.parametrize('page', WITH_COMMANDS, ids=name_of)
def test_commands(page, capsys):
    """Targets, files and configs exist; options are those that the tool's own parser takes."""
    for block in blocks(page, 'bash'):
        if block.marker is not None:
            continue
        for line in block.text.replace('\\\n', ' ').split('\n'):
            words = [word for word in shlex.split(line, comments=True) if word != '&']
            while words and re.match(r'[A-Z_]+=', words[0]):
                words.pop(0)
            if words:
                try:
                    check_command(words, own_configs(page))
                except (AssertionError, SystemExit) as error:
                    reason = capsys.readouterr().err.strip() if isinstance(error, SystemExit) else error
                    raise AssertionError(f'{page.name}:{block.line}: {line.strip()}: {reason}') from error


FREE = ('pip', 'git', 'cd', 'pre-commit', 'mim', 'ls', 'for', 'done', 'gunzip', 'mkdir', 'wait', 'sudo')  # not ours


def check_command(words, own):
    """Raises AssertionError or SystemExit (of argparse) for what does not exist."""
    program, *rest = words
    for word in words:
        path = word.split('=')[-1]
        if re.match(r'(configs|tools|tests|benchmarks|docs|requirements)/.*\.\w+$', path):
            assert path in own or (ROOT / path).is_file(), f'{path} does not exist'
    if program == 'make':
        targets = re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.M)
        for target in rest:
            assert target in targets, f'the Makefile has no target {target}'
    elif program == 'bash':
        check_launcher(*rest)
    elif re.fullmatch(r'(\S*/)?python3?', program):
        check_python(rest)
    else:
        assert program in FREE, f'{program} is no command that this test knows'


def check_python(words):
    if words[0] == '-m':
        assert words[1] in ('pip', 'pytest', 'venv') or importlib.util.find_spec(words[1]), f'no module {words[1]}'
    elif words[0] != '-c':
        assert words[0].endswith('.py'), f'{words[0]} is no script'
        parse(words[0], words[1:])


def check_launcher(script, *args):
    """Scripts that start tools/train.py or tools/test.py, and what they need in front of its arguments."""
    kind = {'train': 'train', 'test': 'test'}[Path(script).stem.split('_')[-1]]
    args = list(args)
    if 'slurm' in script:
        args = args[2:]  # partition and name of the job
        if kind == 'train':
            args.pop(1)  # the work dir
    else:
        processes = args.pop(1 if kind == 'train' else 2)
        assert processes.isdigit(), f'{script} needs the number of processes, got {processes}'
    parse(f'tools/{kind}.py', args)


def parse(script, args):
    """By the script's parse_args; a demo's are those of tools/train.py, benchmarks have few and are not parsed."""
    if script.startswith('benchmarks/'):
        source = (ROOT / script).read_text(encoding='utf-8')
        assert all(f"'{arg}'" in source for arg in args if arg.startswith('--')), f'{script} does not take {args}'
        return
    script = 'tools/train.py' if script == 'tools/demo.py' else script
    args = [re.sub(r'^[A-Z]$', '1', arg) for arg in args]  # what stands for a number
    spec = importlib.util.spec_from_file_location(f'docs_{Path(script).stem}', ROOT / script)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str((ROOT / script).parent))  # what a script finds beside itself
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    module.parse_args(args)


def test_links():
    """Files that the pages link to exist."""
    for page in WITH_COMMANDS:
        for target in re.findall(r'\]\(([^)#\s]+)', page.read_text(encoding='utf-8')):
            if '://' not in target:
                assert (page.parent / target).exists(), f'{page.name}: {target}'


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('make nothing', 'the Makefile has no target nothing'),
        ('python tools/lost.py', 'tools/lost.py does not exist'),
        ('python tools/train.py configs/kanet/lost.py', 'configs/kanet/lost.py does not exist'),
        ('python tools/train.py configs/kanet/kanet-kv_digits.py --fast', 'unrecognized arguments: --fast'),
        ('bash tools/dist_train.sh configs/kanet/kanet-kv_digits.py --amp', 'needs the number of processes'),
        ('frobnicate', 'no command that this test knows'),
    ],
)
def test_wrong_commands_are_found(text, message, capsys):
    with pytest.raises((AssertionError, SystemExit)) as found:
        check_command(text.split(), set())
    assert message in f'{found.value} {capsys.readouterr().err}'
