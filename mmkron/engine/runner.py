"""Training and testing for configs of all three host libraries; ``tools/train.py`` and ``tools/test.py`` call it.

The config's ``default_scope`` decides what the host's own scripts would do: ``mmpretrain``, ``mmseg`` or ``mmdet``.
"""

import os
import os.path as osp
import pickle
import re
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from copy import deepcopy
from datetime import timedelta
from importlib import import_module
from tempfile import TemporaryFile
from typing import Any, Callable

import torch
from mmengine.config import Config, ConfigDict
from mmengine.device import get_device
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, RUNNERS, DefaultScope
from mmengine.runner import Runner

from mmkron import data_checks
from mmkron.data_checks.common import leaf_datasets, type_name
from mmkron.engine.checkpoints import (
    check_checkpoints,
    checkpoint_path,
    read_load_from,
    refusal,
    safe_loading,
)
from mmkron.engine.console import QuietRunner, SayStart
from mmkron.engine.data_faults import data_faults
from mmkron.engine.errors import LaunchError, describe_config_error
from mmkron.engine.fit import check_fit, check_start, watch_pretrained
from mmkron.engine.hooks import ResumeHook
from mmkron.utils.collect_env import remedy_of

HOSTS = ('mmpretrain', 'mmseg', 'mmdet')
# What is read before MMEngine looks at it
_TEXTS = ('default_scope', 'load_from', 'work_dir')
_DICTS = ('auto_scale_lr', 'default_hooks', 'model', 'optim_wrapper', 'test_cfg', 'train_cfg', 'val_cfg')
_CPU_DEVICES = ('cpu', 'mps')  # where MMEngine has no process group and no AMP


def main(run: Callable[[Namespace], Any], args: Namespace) -> None:
    """Call ``run(args)`` as a program: a :class:`LaunchError` ends it with its message and exit code 1.

    Of several processes on a machine only the first one prints and warns.
    """
    first = _local_rank(args) == 0
    try:
        with nullcontext() if first else _silence():
            run(args)
    except LaunchError as error:
        if not first:
            time.sleep(3)  # the starter ends all processes with the first one, so that one has to be the speaker
            raise SystemExit(1) from None
        raise SystemExit(f'error: {error}') from None


@contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, 'w') as null, redirect_stdout(null), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def train(args: Namespace) -> Runner:
    """Trains what ``args.config`` describes.

    Args:
        args: As parsed by ``tools/train.py``.

    Returns:
        The runner after the last epoch.

    Raises:
        LaunchError: An argument does not fit the config, or a file, data or a package is missing.
    """
    cfg = merge_train_args(load_config(args.config), args)
    if args.amp and get_device() in _CPU_DEVICES:
        raise LaunchError(
            f'--amp needs a CUDA, NPU, MLU or MUSA device, which MMEngine requires for '
            f'AmpOptimWrapper; found only {get_device()!r}'
        )
    check_data(cfg, args.config, ('train', 'val'))
    content = check_checkpoints(cfg)
    check_writable(cfg.work_dir, '--work-dir')
    with environment(cfg, args):
        runner = build_runner(cfg)
        check_start(runner, cfg, content)
        del content  # as large as the model and its optimizer
        runner.register_hook(SayStart())
        try:
            with data_faults(runner):
                runner.train()
        finally:
            for hook in runner.hooks:
                if isinstance(hook, ResumeHook):
                    hook.restore_handlers()
    return runner


def test(args: Namespace) -> dict:
    """Tests ``args.checkpoint`` with ``args.config``.

    Args:
        args: As parsed by ``tools/test.py``.

    Returns:
        The metrics.

    Raises:
        LaunchError: An argument does not fit the config, or a file, data or a package is missing.
    """
    cfg = merge_test_args(load_config(args.config), args)
    check_data(cfg, args.config, ('test',))
    content = read_load_from(cfg, 'checkpoint')
    check_writable(cfg.work_dir, '--work-dir')
    if args.show_dir is not None:
        check_writable(args.show_dir, '--show-dir')
    if args.out is not None:
        check_writable(args.out, '--out', is_file=cfg.get('default_scope') != 'mmseg')
    with environment(cfg, args):
        runner = build_runner(cfg)
        hint = '--allow-partial tests it nevertheless'
        check_fit(runner.model, cfg.load_from, content, 'checkpoint', whole=not args.allow_partial, hint=hint)
        del content
        runner.register_hook(SayStart())
        with data_faults(runner):
            metrics = runner.test()
        for what, path in (('predictions', args.out), ('images with the predictions', args.show_dir)):
            if path is not None:
                runner.logger.info(f'{what} are in {path if "://" in path else osp.abspath(path)}')
        return metrics


# ------------------------------------------------------------------------------------------ config and arguments


def load_config(path: str) -> Config:
    """Read a config file.

    Raises:
        LaunchError: ``path``, or a file that it is based on or imports, is missing, is damaged, or its code fails.
            The message gives that file and the line.
    """
    if not osp.isfile(path):
        raise LaunchError(f'config is not a file: {path!r} (looked for {osp.abspath(path)})')
    try:
        return Config.fromfile(path)
    except Exception as error:  # a config is code, which can raise anything
        reason = describe_config_error(error)
        remedy = remedy_of(reason)
        raise LaunchError(f'config {path!r} cannot be read: {reason}' + (remedy and f'\n{remedy}')) from error


def merge_train_args(cfg: Config, args: Namespace) -> Config:
    """Puts the arguments of ``tools/train.py`` into ``cfg``, which is changed and returned.

    Raises:
        LaunchError: An argument asks for what ``cfg`` cannot do.
    """
    merge_common_args(cfg, args)
    _check_parts(cfg, args.config, 'training', ('train_dataloader', 'train_cfg', 'optim_wrapper'))
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if args.amp:
        wrapper = cfg.get('optim_wrapper')
        name = None if wrapper is None else type_name(wrapper) or 'OptimWrapper'
        if name not in ('OptimWrapper', 'AmpOptimWrapper'):
            raise LaunchError(f"--amp needs optim_wrapper.type 'OptimWrapper' or 'AmpOptimWrapper', got {name!r}")
        wrapper.type = 'AmpOptimWrapper'
        wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise LaunchError(
                '--auto-scale-lr needs auto_scale_lr.base_batch_size in the config: the batch size over '
                'all processes that its learning rate is meant for'
            )
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else checkpoint_path(args.resume, '--resume')
    return cfg


def merge_test_args(cfg: Config, args: Namespace) -> Config:
    """Puts the arguments of ``tools/test.py`` into ``cfg``, which is changed and returned.

    Raises:
        LaunchError: An argument asks for what ``cfg`` cannot do, or the checkpoint is missing.
    """
    merge_common_args(cfg, args)
    _check_parts(cfg, args.config, 'testing', ('test_dataloader', 'test_evaluator', 'test_cfg'))
    cfg.load_from = checkpoint_path(args.checkpoint, 'checkpoint')
    cfg.resume = False
    if args.show or args.show_dir is not None:
        _show(cfg, args)
    if args.tta:
        _test_time_augmentation(cfg)
    if args.out is not None:
        _keep_predictions(cfg, args.out)
    return cfg


def merge_common_args(cfg: Config, args: Namespace) -> None:
    """Puts the arguments that all tools share into ``cfg``; raises LaunchError for options that do not fit it."""
    if args.cfg_options is not None:
        try:
            cfg.merge_from_dict(args.cfg_options)
        except (KeyError, TypeError) as error:
            raise LaunchError(f'--cfg-options does not fit the config: {error}') from error
    for key, value in cfg.items():
        kind = str if key in _TEXTS else dict if key in _DICTS or key.endswith('_dataloader') else object
        if value is not None and not isinstance(value, kind):
            raise LaunchError(f'config {args.config!r}: {key} must be a {kind.__name__}, got {value!r:.200}')
    if not cfg.get('model') or not cfg.model.get('type'):
        raise LaunchError(f'config {args.config!r} has no model: it needs model=dict(type=...)')
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = osp.join('work_dirs', osp.splitext(osp.basename(args.config))[0])
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        loader = cfg.get(name)
        if loader is None:
            continue
        if cfg.get('default_scope') == 'mmpretrain':
            loader.setdefault('collate_fn', dict(type='default_collate'))
            loader.setdefault('persistent_workers', True)
            loader.setdefault('pin_memory', torch.cuda.is_available())
        if not loader.get('num_workers'):
            loader.persistent_workers = False  # PyTorch refuses it without workers


def _check_parts(cfg: Config, config: str, purpose: str, keys: tuple[str, ...]) -> None:
    """Raise LaunchError if ``cfg`` lacks one of ``keys``."""
    lacking = [key for key in keys if cfg.get(key) is None]
    if lacking:
        raise LaunchError(f'config {config!r} is not made for {purpose}: it lacks {", ".join(lacking)}')


def _show(cfg: Config, args: Namespace) -> None:
    """Let ``cfg`` show the predictions, or draw them straight into the folder ``args.show_dir`` with every host."""
    scope = cfg.get('default_scope')
    kind = {'mmseg': 'SegVisualizationHook', 'mmdet': 'DetVisualizationHook'}.get(scope, 'VisualizationHook')
    hook = (cfg.get('default_hooks') or {}).get('visualization')
    if hook is None:
        raise LaunchError(f"--show and --show-dir need default_hooks.visualization=dict(type='{kind}') in the config")
    if scope == 'mmseg' and args.show and args.show_dir is not None:
        raise LaunchError(
            "--show and --show-dir do not go together here: MMSegmentation's hook keeps no image it shows"
        )
    if scope in ('mmseg', 'mmdet'):
        hook.draw = True
        if args.show:
            hook.update(show=True, wait_time=args.wait_time)
        if args.show_dir is not None and scope == 'mmdet':
            hook.test_out_dir = osp.abspath(args.show_dir)  # a relative one would be below the log's folder
        elif args.show_dir is not None:
            if cfg.get('visualizer') is None:
                raise LaunchError(
                    "--show-dir needs visualizer=dict(type='SegLocalVisualizer', vis_backends=...) in the config"
                )
            others = [part for part in cfg.visualizer.get('vis_backends') or () if type_name(part) != 'LocalVisBackend']
            local = dict(type='LocalVisBackend', img_save_dir=osp.abspath(args.show_dir))
            cfg.visualizer.vis_backends = [*others, local]
            hook.setdefault('interval', 1)  # the hook's own default shows one image in 50
    elif args.tta:
        raise LaunchError("--show and --show-dir do not go with --tta here: MMPretrain's hook draws a single view")
    else:
        hook.update(enable=True, show=args.show, wait_time=args.wait_time, out_dir=args.show_dir, interval=1)


def _test_time_augmentation(cfg: Config) -> None:
    scope = cfg.get('default_scope')
    leaves = [dataset for _, dataset in leaf_datasets(cfg.test_dataloader.get('dataset'), 'test_dataloader.dataset')]
    pipeline = next((leaf.pipeline for leaf in leaves if leaf.get('pipeline')), None)
    if cfg.get('tta_model') is None:
        if scope == 'mmpretrain':
            cfg.tta_model = dict(type='mmpretrain.AverageClsScoreTTA')
        elif scope == 'mmdet':
            nms = dict(type='nms', iou_threshold=0.5)
            cfg.tta_model = dict(type='DetTTAModel', tta_cfg=dict(nms=nms, max_per_img=100))
        else:
            raise LaunchError(f'--tta needs tta_model and tta_pipeline in a config of default_scope {scope!r}')
    if cfg.get('tta_pipeline') is None:
        if scope not in ('mmpretrain', 'mmdet') or pipeline is None:
            raise LaunchError('--tta needs tta_pipeline in the config, or a pipeline of MMPretrain or MMDetection')
        last = deepcopy(pipeline[-1])
        if scope == 'mmdet':  # merging turns the boxes back, so it has to know which image was flipped
            last = dict(
                type='PackDetInputs',
                meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction'),
            )
        flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
        cfg.tta_pipeline = [*deepcopy(pipeline[:-1]), dict(type='TestTimeAug', transforms=[flips, [last]])]
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    for leaf in leaves:
        leaf.pipeline = deepcopy(cfg.tta_pipeline)


def _keep_predictions(cfg: Config, out: str) -> None:
    evaluator = cfg.test_evaluator
    nested = isinstance(evaluator, dict) and 'metrics' in evaluator
    metrics = evaluator.metrics if nested else evaluator
    metrics = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    if cfg.get('default_scope') == 'mmseg':
        # One metric writes: two of them would write the same file names, maybe with other label ids.
        writer = next((m for m in metrics if type_name(m) in ('IoUMetric', 'CityscapesMetric')), metrics[0])
        writer.update(output_dir=out, keep_results=True)
        return
    if not out.endswith(('.pkl', '.pickle')):
        raise LaunchError(f'--out must end in .pkl or .pickle, got {out!r}')
    dump = 'DumpDetResults' if cfg.get('default_scope') == 'mmdet' else 'DumpResults'
    metrics.append(dict(type=dump, out_file_path=out))
    if nested:
        evaluator.metrics = metrics
    else:
        cfg.test_evaluator = metrics


# ------------------------------------------------------------------------------------------------------ checks


def check_data(cfg: Config, config: str, splits: tuple[str, ...]) -> None:
    """Raises LaunchError with one message when data of the ``splits`` of ``cfg`` is not on disk or does not fit it."""
    data_checks.run(cfg, config, splits)


def check_writable(path: str, argument: str, is_file: bool = False) -> None:
    """Make the folder for ``path``; raise LaunchError, which names ``argument``, if it cannot be written."""
    if '://' in path:
        return
    folder = osp.dirname(path) or '.' if is_file else path
    try:
        os.makedirs(folder, exist_ok=True)
        TemporaryFile(dir=folder).close()
        if is_file and osp.exists(path):
            open(path, 'ab').close()
    except OSError as error:
        raise LaunchError(f'{argument} {path!r} cannot be written: {error.strerror}') from error


def check_hosts(cfg: Config) -> None:
    """Imports the host libraries that ``cfg`` names, by ``default_scope`` or as a prefix of a ``type``.

    Raises:
        LaunchError: One of them, or something that it needs, cannot be imported.
    """
    prefixes = re.findall(rf"'type': '({'|'.join(HOSTS)})\.", str(cfg.to_dict()))
    for host in sorted({*prefixes, cfg.get('default_scope')}.intersection(HOSTS)):
        try:
            import_module(f'{host}.models')
        except (ImportError, AssertionError) as error:  # they assert the versions that they work with
            hint = remedy_of(error) or 'docs/install.md says how to install it'
            raise LaunchError(
                f'this config needs {host}, which cannot be imported: {error}\n{hint} '
                '(make test sets up a complete environment; python -m mmkron shows what this one has)'
            ) from error


# ------------------------------------------------------------------------------------------------- environment


def init_cpu_group(cfg: Config) -> bool:
    """Opens a gloo process group where there is no accelerator, since MMEngine always asks for a CUDA device.

    ``cfg`` gets the gloo backend, batch norm of each process in the place of SyncBN, which torch has for accelerators
    only, and, unless it has its own ``model_wrapper_cfg``, a wrapper without device ids. The strategy of a
    FlexibleRunner gets the like.

    Returns:
        Whether a group was opened; the caller closes it.

    Raises:
        LaunchError: ``cfg.launcher`` is ``slurm`` or ``mpi``, or the strategy is neither DDP nor FSDP: MMEngine runs
            them on accelerators only.
    """
    if cfg.launcher == 'none' or get_device() not in _CPU_DEVICES:
        return False
    if cfg.launcher != 'pytorch':
        raise LaunchError(
            f'--launcher {cfg.launcher} needs an accelerator; without one use tools/dist_train.sh or tools/dist_test.sh'
        )
    dist_cfg = cfg.setdefault('env_cfg', ConfigDict()).setdefault('dist_cfg', ConfigDict())
    dist_cfg.backend = 'gloo'
    asked = [part.pop('sync_bn', None) for part in (cfg, cfg.get('strategy') or {})]
    if _replace_sync_bn(cfg.get('model')) or any(asked):
        print('without an accelerator SyncBN becomes BN: each process normalises its own images', flush=True)
    wrapper = ConfigDict(
        type='MMDistributedDataParallel',
        device_ids=None,
        broadcast_buffers=False,
        find_unused_parameters=cfg.get('find_unused_parameters', False),
    )
    if cfg.get('runner_type') == 'FlexibleRunner':
        if cfg.get('strategy') is None:
            cfg.strategy = ConfigDict(type='DDPStrategy')
        if type_name(cfg.strategy) not in ('DDPStrategy', 'FSDPStrategy'):
            raise LaunchError(f'strategy.type {type_name(cfg.strategy)!r} needs an accelerator')
        given = cfg.strategy.get('model_wrapper') or {}
        cfg.strategy.model_wrapper = (
            ConfigDict({'device_id': 'cpu', **given}) if type_name(cfg.strategy) == 'FSDPStrategy' else given or wrapper
        )
    elif cfg.get('model_wrapper_cfg') is None:
        cfg.model_wrapper_cfg = wrapper
    timeout = {'timeout': timedelta(seconds=dist_cfg.timeout)} if dist_cfg.get('timeout') else {}
    torch.distributed.init_process_group('gloo', **timeout)
    return True


def _replace_sync_bn(node: Any) -> int:
    """Turns the type SyncBN into BN wherever a config holds it; returns how often."""
    if isinstance(node, dict):
        found = node.get('type') in ('SyncBN', 'mmcv.SyncBN')
        if found:
            node['type'] = 'BN'
        return found + sum(map(_replace_sync_bn, node.values()))
    return sum(map(_replace_sync_bn, node)) if isinstance(node, (list, tuple)) else 0


def build_runner(cfg: Config) -> Runner:
    """The runner that ``cfg`` describes, of class ``cfg.runner_type`` if that is set.

    A single process has nobody to share with: a FlexibleRunner gets MMEngine's strategy for one device.

    Raises:
        LaunchError: FSDP is to go with an EMAHook.
    """
    if 'runner_type' not in cfg:
        return QuietRunner.from_cfg(cfg)
    if cfg.runner_type != 'FlexibleRunner':
        return RUNNERS.build(cfg)
    from mmkron.engine.flexible import FlexibleRunner

    strategy = cfg.get('strategy') or {}
    if cfg.get('launcher', 'none') == 'none' and type_name(strategy) in ('DDPStrategy', 'FSDPStrategy'):
        print(f'one process: runs without {strategy["type"]}', flush=True)
        cfg.strategy = None
    hooks = [*(cfg.get('custom_hooks') or ()), *(cfg.get('default_hooks') or {}).values()]
    if type_name(cfg.get('strategy') or {}) == 'FSDPStrategy' and 'EMAHook' in map(type_name, filter(None, hooks)):
        raise LaunchError(
            'EMAHook averages whole parameters, and FSDPStrategy leaves each process only a part of them: take '
            'DDPStrategy, or leave out the hook'
        )
    cfg.setdefault('env_cfg', ConfigDict())  # without it MMEngine's default is None, which it cannot unpack
    return FlexibleRunner.from_cfg(cfg)


def build_model(cfg: Config, device: str, layer: type, what: str) -> torch.nn.Module:
    """The config's model in evaluation, with the weights of ``cfg.load_from``, or its initial ones if that is None.

    Args:
        cfg: The config.
        device: Where the model goes.
        layer: A class of layers that the caller is about.
        what: What the message calls it.

    Raises:
        LaunchError: The config has no model, the model has no such layer, or the weights or the device do not serve.
    """
    if cfg.get('data_preprocessor') is not None:
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    torch.manual_seed((cfg.get('randomness') or {}).get('seed') or 0)
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    if not any(isinstance(module, layer) for module in model.modules()):
        raise LaunchError(f'the model has no {what}')
    if cfg.load_from is None:
        watch_pretrained(model)
        model.init_weights()
    check_fit(model, cfg.load_from, None, 'checkpoint', whole=True)
    try:
        return model.to(device).eval()
    except (AssertionError, RuntimeError) as error:
        raise LaunchError(f'--device {device}: {error}') from error


def _local_rank(args: Namespace) -> int:
    names = {'slurm': 'SLURM_LOCALID', 'mpi': 'OMPI_COMM_WORLD_LOCAL_RANK'}
    return int(os.environ.get(names.get(args.launcher, 'LOCAL_RANK'), args.local_rank))


@contextmanager
def environment(cfg: Config, args: Namespace) -> Iterator[None]:
    """What a run needs around it; leaves no default scope and no process group behind."""
    if args.launcher == 'pytorch':
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
        lacking = [name for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT') if name not in os.environ]
        if lacking:
            raise LaunchError(
                f'--launcher pytorch needs the environment of torch.distributed.run ({lacking[0]} is not '
                'set): start through tools/dist_train.sh or tools/dist_test.sh'
            )
    check_hosts(cfg)
    opened = init_cpu_group(cfg)
    try:
        with safe_loading(), DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
            yield
        if opened:
            torch.distributed.barrier()  # the first process serves the others' store, so they leave together
    except pickle.UnpicklingError as error:
        reason = refusal(error)
        if not reason:
            raise
        raise LaunchError(
            "a file that this run reads by torch.load is refused: it holds more than weights and MMEngine's own "
            f'records, and reading that could run code. {reason}'
        ) from error
    finally:
        if opened:
            torch.distributed.destroy_process_group()
