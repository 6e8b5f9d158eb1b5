"""Imports point downward, there is no circle, and a backbone imports no other backbone."""

import ast

import pytest

from support.tools import ROOT

# package or module of mmkron -> what it may import of mmkron besides itself, at any place in a file
MAY_IMPORT = {
    'version': (),
    'utils': ('version',),
    'registry': ('utils',),
    'ops': ('utils',),
    'converters': ('utils',),
    'datasets': ('registry', 'utils'),
    'layers': ('ops', 'registry', 'utils'),
    'models': ('layers', 'ops', 'registry', 'utils'),
    'analysis': ('converters', 'layers', 'ops', 'utils'),
    'data_checks': ('datasets', 'registry', 'utils'),
    'model_zoo': ('registry', 'utils', 'version'),
    'engine': ('data_checks', 'datasets', 'layers', 'models', 'registry', 'utils', 'version'),
}
FILES = {
    '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): path
    for path in sorted((ROOT / 'mmkron').rglob('*.py'))
    if '.mim' not in path.parts
}


def imports_of(module: str, nested: bool = True) -> set[str]:
    """Return the modules of mmkron that ``module`` imports, those inside functions included if ``nested``."""
    tree = ast.parse(FILES[module].read_text(encoding='utf-8'))
    nodes = ast.walk(tree) if nested else tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f'{module} has a relative import'
            names = {f'{node.module}.{alias.name}' for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return {name for name in found if name.split('.')[0] == 'mmkron'}


@pytest.mark.parametrize('module', [name for name in FILES if name not in ('mmkron', 'mmkron.__main__')])
def test_imports_point_downward(module):
    room = module.split('.')[1]
    rooms = {name.split('.')[1] if '.' in name else '' for name in imports_of(module)}
    assert rooms <= {room, *MAY_IMPORT[room]}


def test_no_file_is_part_of_a_circle():
    # A package's __init__ collects names of its modules, which import each other by their files.
    arrows = {module: imports_of(module) for module in FILES if FILES[module].name != '__init__.py'}
    while True:
        leaves = {module for module, targets in arrows.items() if not targets & arrows.keys()}
        if not leaves:
            break
        arrows = {module: targets for module, targets in arrows.items() if module not in leaves}
    assert not arrows


@pytest.mark.parametrize('module', [name for name in FILES if name.startswith('mmkron.models.backbones.')])
def test_backbones_import_no_other_backbone(module):
    shared = {'mmkron.models.backbones.base', 'mmkron.models.backbones.mobilenet_v2'}
    assert {name for name in imports_of(module) if name.startswith('mmkron.models.backbones')} <= shared
