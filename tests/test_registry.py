"""Names resolve by prefix from every host, from any folder, and without the hosts."""

import importlib
import subprocess
import sys
import textwrap

import pytest
from mmengine.registry import DATASETS, MODELS, TRANSFORMS, DefaultScope

import mmkron.datasets
import mmkron.models
import mmkron.registry

NAMES = {
    MODELS: [*mmkron.models.__all__, *mmkron.models.MODELS.NEEDS_HOST],
    DATASETS: ['Digits'],
    TRANSFORMS: ['LoadImageFromFile'],
}
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('mmpretrain', 'mmseg', 'mmdet'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
"""


def run(code, cwd):
    """Runs code in a fresh process outside the checkout."""
    done = subprocess.run([sys.executable, '-c', textwrap.dedent(code)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize('scope', ['mmpretrain', 'mmseg', 'mmdet'])
@pytest.mark.parametrize('registry', NAMES, ids=lambda registry: registry.name)
def test_prefix_resolves_in_each_scope(scope, registry):
    with DefaultScope.overwrite_default_scope(scope), registry.switch_scope_and_registry(None) as host:
        assert host.scope == scope
        for name in NAMES[registry]:
            cls = host.get(f'mmkron.{name}')
            assert cls is getattr(mmkron.models if registry is MODELS else mmkron.datasets, name)


def test_builds_from_another_folder_without_an_import(tmp_path):
    """In a fresh process, elsewhere, through the registry of a host that knows nothing of mmkron."""
    code = """
    from mmdet.registry import MODELS
    from mmengine.registry import init_default_scope
    init_default_scope('mmdet')
    print(MODELS.build(dict(type='mmkron.KANet', widen_factor=0.25, out_indices=(1, 2))).out_channels)
    """
    assert run(code, tmp_path) == '(8, 8)'


def test_works_without_the_hosts(tmp_path):
    code = BLOCK + textwrap.dedent("""
    import torch
    import mmkron, mmkron.ops, mmkron.layers, mmkron.models, mmkron.datasets
    from mmengine.registry import MODELS
    model = MODELS.build(dict(type='mmkron.KANet', widen_factor=0.25)).eval()
    print(tuple(model(torch.zeros(1, 3, 32, 32))[0].shape))
    """)
    assert run(code, tmp_path) == '(1, 1280, 1, 1)'


def test_heads_without_their_host(tmp_path):
    """One error that names the class and the host; a star import and dir do not need the host."""
    code = BLOCK + textwrap.dedent("""
    from mmengine.registry import MODELS
    from mmkron.models import *
    import mmkron.models
    messages = ['KAOHead' in dir(mmkron.models), 'KAOHead' in globals()]
    for look in (lambda: MODELS.get('mmkron.KAOHead'), lambda: mmkron.models.KAOHead):
        try:
            look()
        except ImportError as error:
            messages.append(str(error))
    print(messages)
    """)
    message = 'mmkron.KAOHead needs mmseg, which cannot be imported: mmseg'
    assert run(code, tmp_path) == str([True, False, message, message])


def test_registry_names():
    assert mmkron.models.MODELS.get('KAOHead') is mmkron.models.MODELS.get('mmkron.KAOHead') is mmkron.models.KAOHead
    assert mmkron.models.MODELS.get('mmkron.Nothing') is None
    with pytest.raises(TypeError, match='must be a str'):
        mmkron.models.MODELS.get(3)
    with pytest.raises(AttributeError, match='has no attribute'):
        mmkron.models.Nothing  # noqa: B018


def test_what_an_import_loads(tmp_path):
    """mmkron alone loads neither torch nor a host, ops nothing of OpenMMLab, and recordings are read with NumPy."""
    events = "import sys, mmkron.datasets.events; print([m for m in ('torch', 'mmcv') if m in sys.modules])"
    assert run(events, tmp_path) == '[]'
    light = "import sys, mmkron; print([m for m in ('torch', 'mmengine', 'mmcv', 'mmdet') if m in sys.modules])"
    assert run(light, tmp_path) == '[]'
    ops = "import sys, mmkron.ops; print([m for m in ('mmengine', 'mmcv', 'mmkron.layers') if m in sys.modules])"
    assert run(ops, tmp_path) == '[]'
    layers = "import sys, mmkron.layers; print([m for m in ('mmcv', 'mmdet', 'mmkron.models') if m in sys.modules])"
    assert run(layers, tmp_path) == '[]'


def test_custom_imports_are_harmless(tmp_path):
    (tmp_path / 'config.py').write_text("custom_imports = dict(imports=['mmkron'])\n")
    code = "from mmengine.config import Config; Config.fromfile('config.py'); Config.fromfile('config.py'); print('ok')"
    assert run(code, tmp_path) == 'ok'


@pytest.fixture
def modules(monkeypatch):
    """Modules of mmkron that are put back, with what they registered, after they were reloaded."""
    for registry in vars(mmkron.registry).values():
        if isinstance(registry, mmkron.registry.Registry):
            registry.import_from_location()  # now, because what is registered later would be lost
            monkeypatch.setattr(registry, '_module_dict', dict(registry.module_dict))
    return lambda name: keep(monkeypatch, name)


def keep(monkeypatch, name):
    module = importlib.import_module(name)
    for key, value in list(vars(module).items()):
        monkeypatch.setattr(module, key, value)
    return module


@pytest.mark.parametrize(
    ('registry', 'module', 'name'),
    [
        ('MODELS', 'mmkron.models.backbones.kanet', 'KANet'),
        ('MODELS', 'mmkron.layers.lambda_layer', 'LambdaLayer'),
        ('DATASETS', 'mmkron.datasets.digits', 'Digits'),
        ('TRANSFORMS', 'mmkron.datasets.event_transforms', 'EventFlip'),
        ('STRATEGIES', 'mmkron.engine.flexible', 'FSDPStrategy'),
        ('HOOKS', 'mmkron.engine.hooks.preemption', 'PreemptionHook'),
    ],
)
def test_reload(modules, registry, module, name):
    """The new class takes the old one's place, as often as its module is reloaded."""
    module = modules(module)
    registry = getattr(mmkron.registry, registry)
    for _ in range(2):
        before = registry.get(name)
        importlib.reload(module)
        assert registry.get(name) is getattr(module, name) is not before


def test_clash(modules):
    """Another class of a registered name is refused, whether its module or its place in the module differs."""
    before = modules('mmkron.models.backbones.kanet').KANet
    for origin in (dict(), dict(__module__=before.__module__), dict(__qualname__='KANet')):
        other = type('KANet', (), {'__qualname__': 'outer.KANet', **origin})
        with pytest.raises(KeyError, match='KANet is already registered in model'):
            mmkron.registry.MODELS.register_module()(other)
    with pytest.raises(KeyError, match='KANet is already registered'):
        mmkron.registry.MODELS.register_module(name=['New', 'KANet'])(type('New', (), {}))
    assert mmkron.registry.MODELS.get('KANet') is before
    mmkron.registry.MODELS.register_module(force=True)(other)
    assert mmkron.registry.MODELS.get('KANet') is other
