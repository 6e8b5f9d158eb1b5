"""Run the tasks named on the command line in one of two gloo processes on the CPU, and write their results.

Usage: ``worker.py OUT TASK...`` with RANK, WORLD_SIZE and PORTS (five per task) in the environment.
"""

import copy
import importlib.util
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.nn.parallel import DistributedDataParallel

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS), str(TESTS / 'test_models' / 'test_backbones')]

from test_contract import CASES, SIZE, build, identify, image, settle  # noqa: E402

TIMEOUT = timedelta(seconds=60)
PORTS = iter(())  # of the current task: were they drawn in one row, processes would miss each other after an error
VARIANTS = {'whole': {}, 'partial, with_cp': dict(out_indices=(0, 2), with_cp=True)}


def loss_of(outs):
    return sum(out.pow(2).mean() for out in outs)


def batches():
    """Return the joint batch in float64 and the half of this process."""
    joint = image(4, 3, *SIZE, seed=7, dtype=torch.float64)
    return joint, joint.chunk(2)[dist.get_rank()]


def joint_gradients(model, joint):
    model.zero_grad()
    loss_of(model(joint)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def worst(ours, theirs):
    """Return the largest difference between entries, relative to the largest entry of their tensor."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max().clamp_min(1e-12)) for k in theirs)


def ddp(_):
    """Return the error of the mean gradient of two processes by backbone and variant, and train one more step."""
    results = {}
    for case in CASES:
        for variant, kwargs in VARIANTS.items():
            model = settle(build(case, **kwargs)).double()
            joint, half = batches()
            expected = joint_gradients(model, joint)
            wrapped = DistributedDataParallel(model)
            errors = []
            for _ in range(2):  # a parameter without gradient is an error of the second call
                wrapped.zero_grad()
                loss_of(wrapped(half)).backward()
                errors.append(worst({name: p.grad for name, p in model.named_parameters()}, expected))
            loss_of(wrapped.train()(half)).backward()
            results[f'{identify(case)}, {variant}'] = max(errors)
    return results


def sharded_step(model, out, number, lr=0.1, **wrapper):
    """Return the weights that FSDP saves after a step on half of the batch, and the number of its units."""
    from mmkron.engine.flexible import FSDPStrategy

    half = batches()[1].to(next(model.parameters()).dtype)
    strategy = FSDPStrategy(
        work_dir=str(out / 'fsdp'),
        env_kwargs=dict(launcher='pytorch', randomness=dict(seed=0)),
        log_kwargs=dict(log_level='ERROR'),
        model_wrapper=dict(device_id='cpu', **wrapper),
    )
    strategy.prepare(model, optim_wrapper=dict(optimizer=dict(type='SGD', lr=lr)))
    units = sum(isinstance(module, FullyShardedDataParallel) for module in strategy.model.modules())
    strategy.model.eval()
    strategy.optim_wrapper.update_params(loss_of(strategy.model(half)))
    path = out / f'fsdp-{number}.pth'
    strategy.save_checkpoint(str(path))
    dist.barrier()
    return torch.load(path, weights_only=True)['state_dict'], units - 1


def fsdp(out):
    """Compare a sharded step of each backbone with one on the joint batch."""
    results = {}
    plif = CASES[-1]._replace(kwargs={**CASES[-1].kwargs, 'neuron_cfg': dict(kind='plif', v_threshold=0.2)})
    for number, case in enumerate([*CASES, plif]):
        model = settle(build(case, with_cp=bool(number % 2))).double()
        plain = copy.deepcopy(model)
        joint_gradients(plain, batches()[0])
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        saved, units = sharded_step(model, out, number)
        single = case.cls(**case.kwargs)
        single.load_state_dict(saved, strict=True)
        blocks = sum(len(stage) for stage in single.stages)
        moved = [not torch.equal(saved[name], p) for name, p in build(case).double().named_parameters()]
        results['plif' if case is plif else identify(case)] = dict(
            error=worst(saved, plain.state_dict()),
            moved=sum(moved) / len(moved),
            units=units,
            blocks=blocks,
        )
    return results


def fsdp_mixed(out):
    """Compare a sharded step in bfloat16, also with normalized coefficients, with one on the joint batch."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = {}
    for number, norm in enumerate(('bn_softmax', 'bn')):
        model = settle(build(CASES[0], coefficient_norm=norm))
        plain = copy.deepcopy(model)
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        joint_gradients(plain, batches()[0].float())
        torch.optim.SGD(plain.parameters(), lr=1e5).step()  # so that the norms' small steps are not rounded away
        saved, _ = sharded_step(model, out, f'mixed-{number}', lr=1e5, mixed_precision=precision)
        steps = {
            name: (saved[name] - old, p.detach() - old)
            for (name, p), old in zip(plain.named_parameters(), before.values())
        }
        ours, theirs = (torch.cat([pair[i].flatten() for pair in steps.values()]) for i in (0, 1))
        gains = [pair for name, pair in steps.items() if 'coefficient_bn' in name]
        results[norm] = dict(
            cosine=float(torch.cosine_similarity(ours, theirs, dim=0)),
            gains=float(torch.cosine_similarity(*(torch.cat([pair[i] for pair in gains]) for i in (0, 1)), dim=0)),
            count=len(gains),
        )
    return results


def train(*argv):
    """Run ``tools/train.py`` in this process, and return its runner."""
    spec = importlib.util.spec_from_file_location('train_script', ROOT / 'tools' / 'train.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    os.environ['MASTER_PORT'] = next(PORTS)
    return script.train(script.parse_args([str(arg) for arg in argv] + ['--launcher', 'pytorch', '--no-validate']))


def summary(runner):
    """Return the values that must be equal in both processes."""
    state = runner.model.state_dict()
    names = [name for name, _ in runner.model.named_parameters()]
    groups = runner.optim_wrapper.optimizer.param_groups
    return dict(
        iter=runner.iter,
        sums=[float(state[name].double().abs().sum()) for name in names],
        lr=groups[0]['initial_lr'],
        world_size=runner.world_size,
    )


def few(out, work_dir, config, *options):
    """Train on a few images of ``out/scenes``, two per process."""
    loader = ['batch_size=2', 'num_workers=0', 'persistent_workers=False', f'dataset.data_root={out}/scenes']
    loader = [f'train_dataloader.{option}' for option in loader]
    return summary(train(config, '--work-dir', out / work_dir, '--cfg-options', *loader, *options))


def segmentor(out):
    config = ROOT / 'configs/kao/deeplabv2-kao-kv_r18-w16-d8_1xb8-2k_scenes-128x128.py'
    return few(out, 'segmentor', config, 'train_cfg.max_iters=2')


def detector(out):
    return few(out, 'detector', out / 'detector.py', 'train_cfg.max_epochs=1')


def digits(config, work_dir, *argv, epochs=1):
    small = ['train_dataloader.dataset.indices=64', 'train_dataloader.batch_size=16']
    argv = ['--work-dir', work_dir, '--auto-scale-lr', *argv]
    return train(config, *argv, '--cfg-options', *small, f'train_cfg.max_epochs={epochs}')


def spiking(out):
    return summary(digits(ROOT / 'configs/qkformer/qkformer_digits.py', out / 'spiking'))


def fsdp_runs(out):
    """Train two epochs with DDP in both runners, with FSDP, and with FSDP in two runs."""
    runs = {
        'ddp': digits(out / 'ddp.py', out / 'ddp', epochs=2),
        'flexible_ddp': digits(out / 'flexible_ddp.py', out / 'flexible_ddp', epochs=2),
        'fsdp': digits(out / 'fsdp.py', out / 'fsdp_run', epochs=2),
    }
    digits(out / 'fsdp.py', out / 'resumed')
    runs['resumed'] = digits(out / 'fsdp.py', out / 'resumed', '--resume', epochs=2)
    return {
        name: dict(iter=runner.iter, lr=runner.optim_wrapper.optimizer.param_groups[0]['initial_lr'])
        for name, runner in runs.items()
    }


TASKS = dict(ddp=ddp, fsdp=fsdp, fsdp_mixed=fsdp_mixed, segmentor=segmentor, detector=detector, spiking=spiking)
TASKS.update(fsdp_runs=fsdp_runs)


def main() -> None:
    global PORTS
    out, rank = Path(sys.argv[1]), int(os.environ['RANK'])
    warnings.filterwarnings('ignore', category=FutureWarning)
    results, ports = {}, os.environ['PORTS'].split(',')
    for number, name in enumerate(sys.argv[2:]):
        PORTS = iter(ports[5 * number : 5 * number + 5])
        try:
            if name in ('ddp', 'fsdp', 'fsdp_mixed'):  # the others open their own group
                os.environ['MASTER_PORT'] = next(PORTS)
                dist.init_process_group('gloo', timeout=TIMEOUT)
            results[name] = TASKS[name](out)
            if dist.is_initialized():
                dist.barrier()  # neither closes its connections while the other still uses them
        except Exception:
            results[name] = traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        torch.save(results, out / f'results-{rank}.pth')


if __name__ == '__main__':
    main()
