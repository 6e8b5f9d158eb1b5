"""A trained classifier is published and becomes the backbone of dense models of both hosts."""

import hashlib
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner, load_checkpoint
from mmpretrain.structures import DataSample

import mmkron
from support.tools import load_tool

pytest.importorskip('mmcv._ext', reason='mmdet and mmseg need the compiled operators of mmcv')

QKFORMER = dict(
    dims=(8, 16, 32, 64), depths=(1, 1, 1, 1), heads=4, mlp_ratio=2, steps=2,
    attentions=('qkta', 'qkta', 'qkca', 'ssa'),
    stem=dict(widths=(8, 8, 8), pools=(True, True, False), shortcut_from=1), pools=(True, False),
)  # fmt: skip

# type -> arguments, the stages that a pyramid takes, their channels, the last stage's channels
BACKBONES = {
    'KANet': (dict(arch='kanet-kv', widen_factor=0.25), (1, 2, 3, 4), [8, 8, 24, 80], 1280),
    'LambdaMobileNetV2': (dict(widen_factor=0.25), (1, 2, 3, 4), [8, 8, 24, 80], 1280),
    'LambdaResNet': (
        dict(base_channels=8, stage_blocks=(1, 1, 2, 1), stage_layers='CLLC', lambda_cfg=dict(scope=5)),
        (0, 1, 2, 3),
        [32, 64, 128, 256],
        256,
    ),
    'QKFormer': (dict(arch=QKFORMER), (0, 1, 2, 3), [8, 16, 32, 64], 64),
}


@contextmanager
def nothing_allowed():
    """Restore the state of a new process, in which torch.load reads only what PyTorch itself allows."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def classifier(name):
    kwargs, _, _, channels = BACKBONES[name]
    return dict(
        type='ImageClassifier',
        data_preprocessor=dict(type='ClsDataPreprocessor', mean=[127.5] * 3, std=[60.0] * 3),
        backbone=dict(type=f'mmkron.{name}', **kwargs),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=3, in_channels=channels, topk=(1,)),
    )


@pytest.fixture(scope='module', params=BACKBONES)
def trained(request, tmp_path_factory):
    """Return the name of a backbone, a checkpoint of two steps of training, and its averaged weights."""
    folder = tmp_path_factory.mktemp(request.param)
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    samples = [dict(inputs=x, data_samples=DataSample().set_gt_label(i % 3)) for i, x in enumerate(images)]
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        runner = Runner(
            model=classifier(request.param),
            work_dir=str(folder),
            train_dataloader=dict(
                dataset=samples,
                batch_size=2,
                collate_fn=dict(type='default_collate'),
                sampler=dict(type='DefaultSampler', shuffle=False),
            ),
            train_cfg=dict(by_epoch=True, max_epochs=1),
            optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1, momentum=0.9)),
            default_hooks=dict(logger=dict(type='LoggerHook')),
            custom_hooks=[dict(type='EMAHook', momentum=0.5)],
            visualizer=dict(type='Visualizer', vis_backends=[]),
            default_scope='mmpretrain',
            experiment_name=f'weights-flow-{request.param}',
            log_level='ERROR',
            randomness=dict(seed=0),
        )
        runner.train()
    averaged = runner._hooks[[type(hook).__name__ for hook in runner.hooks].index('EMAHook')].ema_model.module
    return request.param, folder / 'epoch_1.pth', averaged.state_dict()


def dense(host, name, checkpoint):
    kwargs, out_indices, channels, _ = BACKBONES[name]
    init_cfg = dict(type='Pretrained', checkpoint=str(checkpoint), prefix='backbone.')
    backbone = dict(type=f'mmkron.{name}', **kwargs, out_indices=out_indices, init_cfg=init_cfg)
    neck = dict(type='FPN', in_channels=channels, out_channels=16, num_outs=4 if host == 'mmseg' else 5)
    if host == 'mmseg':
        head = dict(type='FPNHead', in_channels=[16] * 4, in_index=[0, 1, 2, 3], feature_strides=[4, 8, 16, 32])
        head.update(channels=16, num_classes=4)
        return dict(type='EncoderDecoder', backbone=backbone, neck=neck, decode_head=head, test_cfg=dict(mode='whole'))
    head = dict(type='RetinaHead', num_classes=4, in_channels=16, stacked_convs=1, feat_channels=16)
    return dict(type='RetinaNet', backbone=backbone, neck=neck, bbox_head=head)


@pytest.mark.parametrize('host', ['mmdet', 'mmseg'])
def test_backbone_of_a_dense_model(trained, host):
    """No key of the backbone is missing or unexpected, and every tensor equals the classifier's."""
    name, path, averaged = trained
    mmkron.allow_checkpoint_globals()
    with DefaultScope.overwrite_default_scope(host):
        torch.manual_seed(1)
        model = revert_sync_batchnorm(MODELS.build(dense(host, name, path)))
        fresh = {key: value.clone() for key, value in model.backbone.state_dict().items()}
        model.init_weights()
    mmkron.allow_checkpoint_globals()  # OneDL's MMEngine revokes its permissions after a load, HistoryBuffer's too
    weights = torch.load(path, weights_only=True)['state_dict']
    backbone = {key.removeprefix('backbone.'): v for key, v in weights.items() if key.startswith('backbone.')}
    for key, value in model.backbone.state_dict().items():
        assert torch.equal(value, backbone[key]), key
        assert torch.equal(value, averaged[f'backbone.{key}']), key
    changed = [key for key, value in fresh.items() if not torch.equal(value, backbone[key])]
    assert {key for key, p in model.backbone.named_parameters() if p.ndim > 1} <= set(changed)
    assert model.backbone.load_state_dict(backbone, strict=False) == ([], [])


@pytest.fixture(scope='module')
def tool():
    return load_tool('model_converters/publish_model')


def test_publish(trained, tool, tmp_path, capsys):
    """The file has only weights and meta, its name the hash; torch.load reads it with nothing allowed."""
    name, path, averaged = trained
    tool.main([str(path), str(tmp_path / 'new' / 'small.pth')])
    (published,) = (tmp_path / 'new').iterdir()
    assert published.name == f'small-{hashlib.sha256(published.read_bytes()).hexdigest()[:8]}.pth'
    assert str(published) in capsys.readouterr().out
    with nothing_allowed():
        content = torch.load(published, weights_only=True)
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            model = MODELS.build(classifier(name))
            load_checkpoint(model, str(published), map_location='cpu', strict=True)
    mmkron.allow_checkpoint_globals()
    source = torch.load(path, weights_only=True)
    assert set(content) == {'meta', 'state_dict'} < set(source)
    assert content['meta'] == source['meta']
    assert content['state_dict'].keys() == averaged.keys()
    assert all(torch.equal(value, averaged[key]) for key, value in model.state_dict().items())
    with pytest.raises(SystemExit, match=f'error: .*{published.name}'):
        tool.main([str(path), str(tmp_path / 'new' / 'small.pth')])
    assert list((tmp_path / 'new').iterdir()) == [published]


def test_publish_numpy(tool, tmp_path):
    """Arrays in the meta, such as the palette of a dataset, could not be loaded without permission."""
    palette = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint8)
    meta = dict(dataset_meta=dict(classes=('a', 'b'), palette=palette), best=np.float64(0.5), more=[palette[0]])
    mmkron.allow_checkpoint_globals()
    torch.save(dict(meta=meta, state_dict=dict(w=torch.ones(1))), tmp_path / 'a.pth')
    with nothing_allowed():
        published = torch.load(tool.publish(tmp_path / 'a.pth', tmp_path / 'b.pth'), weights_only=True)
    plain = dict(classes=('a', 'b'), palette=[[1, 2, 3], [4, 5, 6]])
    assert published['meta'] == dict(dataset_meta=plain, best=0.5, more=[[1, 2, 3]])


def test_publish_spares_other_files(tool, tmp_path):
    torch.save(dict(meta={}, state_dict={}), tmp_path / 'a.pth')
    (tmp_path / 'b.part').write_text('kept')
    tool.main([str(tmp_path / 'a.pth'), str(tmp_path / 'b.pth')])
    assert (tmp_path / 'b.part').read_text() == 'kept'
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path / 'a.pth'), str(tmp_path / 'a.pth')])
    assert torch.load(tmp_path / 'a.pth', weights_only=True) == dict(meta={}, state_dict={})


def test_disk_full(tool, tmp_path):
    """The tool ends with one message and leaves no partial file."""
    resource = pytest.importorskip('resource', reason='Windows has no limit on the size of files')
    torch.save(dict(meta={}, state_dict=dict(w=torch.zeros(10_000))), tmp_path / 'a.pth')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SystemExit, match='error: .*File too large'):
            tool.main([str(tmp_path / 'a.pth'), str(tmp_path / 'b.pth')])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ['a.pth']


def test_publish_refuses(tool, tmp_path):
    (tmp_path / 'damaged.pth').write_bytes(b'PK no archive')
    torch.save(dict(w=torch.zeros(1)), tmp_path / 'weights.pth')
    torch.save([1], tmp_path / 'list.pth')
    for name, message in dict(
        damaged='is damaged', weights='state_dict', list='state_dict', absent='not a file'
    ).items():
        with pytest.raises(SystemExit, match=f'error: .*{message}'):
            tool.main([str(tmp_path / f'{name}.pth'), str(tmp_path / 'out' / 'out.pth')])
    assert not (tmp_path / 'out').exists()
