"""The arguments of both tools, merged into a config of each host."""

import os
import uuid
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import HOOKS, VISUALIZERS, DefaultScope
from mmengine.structures import PixelData
from PIL import Image

from mmkron.utils import cli
from mmkron.utils.errors import LaunchError
from support.errors import raises
from support.tools import load_tool

tool = load_tool('test')

FLIPS = [{'type': 'RandomFlip', 'prob': 1.0}, {'type': 'RandomFlip', 'prob': 0.0}]


def host_config(scope: str, **changes) -> Config:
    """Return the sections of a config of a host that the arguments change."""
    hook = {'mmpretrain': 'VisualizationHook', 'mmseg': 'SegVisualizationHook', 'mmdet': 'DetVisualizationHook'}
    dataset = {'type': 'Data', 'pipeline': [{'type': 'LoadImageFromFile'}, {'type': 'Pack', 'meta_keys': ('a',)}]}
    loader = {'batch_size': 2, 'num_workers': 2, 'dataset': dataset}
    cfg = {
        'default_scope': scope,
        'model': {'type': 'Model'},
        'train_dataloader': loader,
        'test_dataloader': loader,
        'test_evaluator': {'type': 'Metric'},
        'test_cfg': {},
        'val_dataloader': loader,
        'val_cfg': {},
        'val_evaluator': {'type': 'Metric'},
        'train_cfg': {},
        'optim_wrapper': {'type': 'OptimWrapper', 'optimizer': {'type': 'SGD'}},
        'default_hooks': {'visualization': {'type': hook[scope]}},
        'visualizer': {'type': 'Visualizer'},
        **changes,
    }
    return Config(cfg)


@pytest.fixture
def merge_test(test_args, tmp_path):
    checkpoint = tmp_path / 'some.pth'
    checkpoint.touch()

    def merge(cfg, *argv):
        args = test_args('folder/name.py', checkpoint, *argv)
        return tool.merge_args(cli.merge_common_args(cfg, args), args)

    return merge


@pytest.fixture
def merge_train(train_args):
    def merge(cfg, *argv):
        args = train_args('folder/name.py', *argv)
        return load_tool('train').merge_args(cli.merge_common_args(cfg, args), args)

    return merge


# ------------------------------------------------------------------------------------------ arguments of both tools


def test_work_dir_priority(merge_train):
    assert merge_train(host_config('mmdet')).work_dir == os.path.join('work_dirs', 'name')
    assert merge_train(host_config('mmdet', work_dir='a')).work_dir == 'a'
    assert merge_train(host_config('mmdet', work_dir='a'), '--cfg-options', 'work_dir=b').work_dir == 'b'
    assert merge_train(host_config('mmdet', work_dir='a'), '--work-dir', 'c').work_dir == 'c'


def test_cfg_options(merge_train):
    key = 'train_dataloader.dataset.pipeline.{}.type=Other'
    cfg = merge_train(host_config('mmseg'), '--cfg-options', key.format(0), 'a.b=[1,2]')
    assert cfg.train_dataloader.dataset.pipeline[0].type == 'Other'
    assert cfg.a.b == [1, 2]
    with raises(LaunchError, '--cfg-options'):
        merge_train(host_config('mmseg'), '--cfg-options', key.format(7))


@pytest.mark.parametrize(
    ('key', 'value'),
    [('train_dataloader', 3), ('optim_wrapper', 'x'), ('train_cfg', [1]), ('auto_scale_lr', True), ('model', 3)],
)
def test_sections_of_another_type(merge_train, key, value):
    with raises(LaunchError, key, value):
        merge_train(host_config('mmpretrain', **{key: value}))


@pytest.mark.parametrize('model', [None, {}, {'backbone': {'type': 'KANet'}}])
def test_config_without_a_model(merge_train, model):
    with raises(LaunchError, 'model', 'folder/name.py'):
        merge_train(host_config('mmseg', model=model))


def test_loader_defaults_only_for_mmpretrain(merge_train):
    loader = merge_train(host_config('mmpretrain')).train_dataloader
    assert loader.collate_fn == {'type': 'default_collate'}
    assert loader.persistent_workers is True
    assert loader.pin_memory is torch.cuda.is_available()
    for scope in ('mmseg', 'mmdet'):
        cfg = merge_train(host_config(scope))
        assert cfg.train_dataloader.keys() == {'batch_size', 'num_workers', 'dataset'}


def test_loader_defaults_leave_the_configured(merge_train):
    loader = {'num_workers': 2, 'collate_fn': {'type': 'mine'}, 'persistent_workers': False, 'pin_memory': 'x'}
    assert merge_train(host_config('mmpretrain', train_dataloader=loader)).train_dataloader == loader


@pytest.mark.parametrize('scope', ['mmpretrain', 'mmseg', 'mmdet'])
def test_no_persistent_workers_without_workers(merge_train, scope):
    cfg = host_config(scope, val_dataloader={'num_workers': 2, 'persistent_workers': True})
    assert merge_train(cfg, '--cfg-options', 'val_dataloader.num_workers=0').val_dataloader.persistent_workers is False


def test_local_rank_in_both_spellings(train_args, test_args):
    for spelling in ('--local_rank', '--local-rank'):
        assert train_args('c', f'{spelling}=3').local_rank == 3
        assert test_args('c', 'k', f'{spelling}=3').local_rank == 3


# --------------------------------------------------------------------------------------------- arguments of training


@pytest.mark.parametrize('given', [{'type': 'OptimWrapper'}, {'optimizer': {}}])
def test_amp(merge_train, given):
    wrapper = merge_train(host_config('mmdet', optim_wrapper=given), '--amp').optim_wrapper
    assert (wrapper.type, wrapper.loss_scale) == ('AmpOptimWrapper', 'dynamic')


def test_amp_of_the_config(merge_train):
    given = {'type': 'AmpOptimWrapper', 'loss_scale': 512.0}
    assert merge_train(host_config('mmdet', optim_wrapper=given), '--amp').optim_wrapper == given
    with raises(LaunchError, '--amp', 'ApexOptimWrapper'):
        merge_train(host_config('mmdet', optim_wrapper={'type': 'ApexOptimWrapper'}), '--amp')


def test_auto_scale_lr(merge_train):
    cfg = merge_train(host_config('mmseg', auto_scale_lr={'base_batch_size': 16}), '--auto-scale-lr')
    assert cfg.auto_scale_lr == {'base_batch_size': 16, 'enable': True}
    for broken in ({}, {'auto_scale_lr': None}, {'auto_scale_lr': {'enable': False}}):
        with raises(LaunchError, 'auto_scale_lr.base_batch_size'):
            merge_train(host_config('mmseg', **broken), '--auto-scale-lr')


@pytest.mark.parametrize('key', ['train_dataloader', 'train_cfg', 'optim_wrapper'])
def test_training_needs_its_parts(merge_train, key):
    with raises(LaunchError, key, 'folder/name.py'):
        merge_train(host_config('mmseg', **{key: None}))


def test_no_validate(merge_train):
    cfg = merge_train(host_config('mmpretrain'), '--no-validate')
    assert cfg.val_dataloader is cfg.val_cfg is cfg.val_evaluator is None
    assert cfg.test_dataloader is not None


def test_resume_argument(merge_train, tmp_path):
    cfg = merge_train(host_config('mmdet', load_from='x'))
    assert (cfg.get('resume'), cfg.load_from) == (None, 'x')
    cfg = merge_train(host_config('mmdet', load_from='x'), '--resume')
    assert (cfg.resume, cfg.load_from) == (True, None)
    (tmp_path / 'a.pth').touch()
    cfg = merge_train(host_config('mmdet'), '--resume', tmp_path / 'a.pth')
    assert (cfg.resume, cfg.load_from) == (True, str(tmp_path / 'a.pth'))
    assert merge_train(host_config('mmdet'), '--resume', 's3://bucket/a.pth').load_from == 's3://bucket/a.pth'
    with raises(LaunchError, '--resume', 'nowhere.pth'):
        merge_train(host_config('mmdet'), '--resume', 'nowhere.pth')


# ---------------------------------------------------------------------------------------------- arguments of testing


def test_out_mmpretrain_and_mmdet(merge_test):
    metric = {'type': 'Metric'}
    dump = {'type': 'DumpResults', 'out_file_path': 'a.pkl'}
    det_dump = {'type': 'DumpDetResults', 'out_file_path': 'a.pkl'}
    assert merge_test(host_config('mmpretrain'), '--out', 'a.pkl').test_evaluator == [metric, dump]
    assert merge_test(host_config('mmdet'), '--out', 'a.pkl').test_evaluator == [metric, det_dump]
    two = host_config('mmdet', test_evaluator=[metric, metric])
    assert merge_test(two, '--out', 'a.pkl').test_evaluator == [metric, metric, det_dump]
    own = host_config('mmpretrain', test_evaluator={'type': 'Evaluator', 'metrics': metric})
    assert merge_test(own, '--out', 'a.pkl').test_evaluator == {'type': 'Evaluator', 'metrics': [metric, dump]}
    for scope in ('mmpretrain', 'mmdet'):
        with raises(LaunchError, '--out', 'a.json'):
            merge_test(host_config(scope), '--out', 'a.json')


def test_out_mmseg(merge_test):
    written = {'output_dir': 'maps', 'keep_results': True}
    assert merge_test(host_config('mmseg'), '--out', 'maps').test_evaluator == {'type': 'Metric', **written}
    metrics = [{'type': 'DumpResults'}, {'type': 'mmseg.IoUMetric'}, {'type': 'CityscapesMetric', 'output_dir': 'x'}]
    cfg = merge_test(host_config('mmseg', test_evaluator=metrics), '--out', 'maps')
    assert cfg.test_evaluator == [metrics[0], {**metrics[1], **written}, metrics[2]]


def test_show_mmpretrain(merge_test):
    cfg = merge_test(host_config('mmpretrain'), '--show', '--show-dir', 'vis', '--wait-time', '0.5')
    assert cfg.default_hooks.visualization == {
        'type': 'VisualizationHook',
        'enable': True,
        'show': True,
        'wait_time': 0.5,
        'out_dir': 'vis',
        'interval': 1,
    }


def test_show_mmpretrain_not_with_tta(merge_test):
    for option in (['--show'], ['--show-dir', 'vis']):
        with raises(LaunchError, '--tta'):
            merge_test(host_config('mmpretrain'), '--tta', *option)


def test_show_mmdet(merge_test):
    cfg = merge_test(host_config('mmdet'), '--show', '--show-dir', 'vis')
    assert cfg.default_hooks.visualization == {
        'type': 'DetVisualizationHook',
        'draw': True,
        'show': True,
        'wait_time': 2,
        'test_out_dir': os.path.abspath('vis'),  # the hook would put a relative one below the folder of the log
    }


def test_show_mmseg(merge_test):
    shown = merge_test(host_config('mmseg'), '--show')
    assert shown.default_hooks.visualization == {
        'type': 'SegVisualizationHook',
        'draw': True,
        'show': True,
        'wait_time': 2,
    }
    assert shown.visualizer == {'type': 'Visualizer'}
    local = {'type': 'LocalVisBackend', 'img_save_dir': os.path.abspath('vis')}
    for given, kept in (
        (None, []),
        ([{'type': 'mmengine.LocalVisBackend'}], []),
        ([{'type': 'LocalVisBackend'}, {'type': 'TensorboardVisBackend'}], [{'type': 'TensorboardVisBackend'}]),
    ):
        cfg = host_config('mmseg', visualizer={'type': 'SegLocalVisualizer', 'vis_backends': given})
        cfg = merge_test(cfg, '--show-dir', 'vis')
        assert cfg.default_hooks.visualization == {'type': 'SegVisualizationHook', 'draw': True, 'interval': 1}
        assert cfg.visualizer == {'type': 'SegLocalVisualizer', 'vis_backends': [*kept, local]}
    with raises(LaunchError, '--show-dir'):
        merge_test(host_config('mmseg', visualizer=None), '--show-dir', 'vis')
    with raises(LaunchError, '--show-dir'):  # the hook drops the backends when it shows, so the folder stays empty
        merge_test(host_config('mmseg'), '--show', '--show-dir', 'vis')


@pytest.mark.parametrize(('scope', 'kind'), [('mmseg', 'SegLocalVisualizer'), ('mmdet', 'DetLocalVisualizer')])
def test_show_dir_of_the_real_hooks(merge_test, tmp_path, monkeypatch, scope, kind):
    """The image is in the folder itself, relative to the working directory, and nothing is elsewhere."""
    pytest.importorskip('mmcv._ext', reason='the hosts need the compiled operators of mmcv')
    structures = pytest.importorskip(f'{scope}.structures')
    monkeypatch.chdir(tmp_path)
    Image.new('RGB', (48, 32)).save('image.png')
    visualizer = {'type': kind, 'name': uuid.uuid4().hex, 'vis_backends': [{'type': 'LocalVisBackend'}]}
    cfg = merge_test(host_config(scope, visualizer=visualizer), '--show-dir', 'vis/own')
    if scope == 'mmseg':
        sample = structures.SegDataSample(pred_sem_seg=PixelData(data=torch.ones(1, 32, 48, dtype=torch.long)))
    else:
        sample = structures.DetDataSample()
    sample.set_metainfo({'img_path': 'image.png'})
    with DefaultScope.overwrite_default_scope(scope):
        built = VISUALIZERS.build({**cfg.visualizer, 'save_dir': str(tmp_path / 'log')})  # as the runner does it
        built.dataset_meta = {'classes': ('a', 'b'), 'palette': [[0, 0, 0], [255, 0, 0]]}
        hook = HOOKS.build(cfg.default_hooks.visualization)
    runner = SimpleNamespace(work_dir=str(tmp_path / 'work'), timestamp='now', iter=0)
    for batch in range(2):
        hook.after_test_iter(runner, batch, None, [sample])
    # OneDL's MMSegmentation numbers the images that it draws, so that a sample drawn twice gives two files.
    drawn = [path for path in tmp_path.rglob('*.*g') if path.name != 'image.png' or path.parent != tmp_path]
    assert {path.parent for path in drawn} == {tmp_path / 'vis' / 'own'}
    assert {Image.open(path).height for path in drawn} == {32}


@pytest.mark.parametrize('scope', ['mmpretrain', 'mmseg', 'mmdet'])
def test_show_needs_the_hook(merge_test, scope):
    with raises(LaunchError, 'default_hooks.visualization'):
        merge_test(host_config(scope, default_hooks={}), '--show')
    config = host_config(scope)
    assert merge_test(config).default_hooks.visualization.keys() == {'type'}


def test_tta_mmpretrain_default(merge_test):
    cfg = merge_test(host_config('mmpretrain'), '--tta')
    assert cfg.model == {'type': 'mmpretrain.AverageClsScoreTTA', 'module': {'type': 'Model'}}
    assert cfg.test_dataloader.dataset.pipeline == [
        {'type': 'LoadImageFromFile'},
        {'type': 'TestTimeAug', 'transforms': [FLIPS, [{'type': 'Pack', 'meta_keys': ('a',)}]]},
    ]


@pytest.mark.parametrize('scope', ['mmpretrain', 'mmseg', 'mmdet'])
def test_tta_of_the_config_comes_first(merge_test, scope):
    cfg = host_config(scope, tta_model={'type': 'MyTTA', 'x': 1}, tta_pipeline=[{'type': 'Mine'}])
    cfg = merge_test(cfg, '--tta')
    assert cfg.model == {'type': 'MyTTA', 'x': 1, 'module': {'type': 'Model'}}
    assert cfg.test_dataloader.dataset.pipeline == [{'type': 'Mine'}]


def test_tta_of_mmseg_needs_the_config(merge_test):
    for changes in ({}, {'tta_model': {'type': 'SegTTAModel'}}, {'tta_pipeline': []}):
        with raises(LaunchError, '--tta'):
            merge_test(host_config('mmseg', **changes), '--tta')


def test_tta_mmdet_default_in_nested_datasets(merge_test):
    plain = host_config('mmdet').test_dataloader.dataset
    nested = {'type': 'RepeatDataset', 'dataset': {'type': 'ConcatDataset', 'datasets': [plain, plain]}}
    cfg = merge_test(host_config('mmdet', test_dataloader={'dataset': nested}), '--tta')
    nms = {'type': 'nms', 'iou_threshold': 0.5}
    assert cfg.model == {
        'type': 'DetTTAModel',
        'tta_cfg': {'nms': nms, 'max_per_img': 100},
        'module': {'type': 'Model'},
    }
    assert 'pipeline' not in cfg.test_dataloader.dataset
    for leaf in cfg.test_dataloader.dataset.dataset.datasets:
        load, tta = leaf.pipeline
        assert load.type == 'LoadImageFromFile'
        assert tta.transforms[0] == FLIPS
        assert tta.transforms[1][0].type == 'PackDetInputs'
        assert {'flip', 'flip_direction', 'img_id'} <= set(tta.transforms[1][0].meta_keys)


def test_tta_in_nested_datasets(merge_test):
    plain = host_config('mmpretrain').test_dataloader.dataset
    nested = {'type': 'RepeatDataset', 'dataset': {'type': 'ConcatDataset', 'datasets': [plain, plain]}}
    cfg = merge_test(host_config('mmpretrain', test_dataloader={'dataset': nested}), '--tta')
    assert 'pipeline' not in cfg.test_dataloader.dataset
    for leaf in cfg.test_dataloader.dataset.dataset.datasets:
        assert [step.type for step in leaf.pipeline] == ['LoadImageFromFile', 'TestTimeAug']


def test_test_needs_a_checkpoint_and_its_sections(merge_test, test_args):
    with raises(LaunchError, 'checkpoint', 'nowhere.pth'):
        tool.merge_args(host_config('mmseg'), test_args('c.py', 'nowhere.pth'))
    with raises(LaunchError, 'test_cfg', 'test_dataloader'):
        merge_test(host_config('mmseg', test_dataloader=None, test_cfg=None))
