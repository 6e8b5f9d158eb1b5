"""Training in two gloo processes on the CPU, which are started once: DDP, FSDP, whole runs, learning rates.

What a user types, ``tools/dist_train.sh``, is in ``test_tools/test_cli.py``; here the processes call what it calls.
"""

import os
import subprocess
import sys

import pytest
import torch
from mmengine.config import Config

import mmkron
from conftest import free_ports
from support.tools import ROOT, load_tool

HERE = ROOT / 'tests' / 'test_distributed'
DIGITS = ROOT / 'configs/kanet/kanet-kv_digits.py'
TASKS = ['ddp', 'fsdp', 'fsdp_mixed', 'spiking', 'fsdp_runs']
try:
    import mmcv.ops  # noqa: F401

    TASKS += ['segmentor', 'detector']
except ImportError:
    pass


def write_configs(out):
    """Write configs on digits that differ in the strategy only, without augmentation and dropout."""
    same = f"""_base_ = {str(DIGITS)!r}
model = dict(neck=dict(drop_rate=0.0))
steps = [dict(type='Resize', scale=(32, 32)), dict(type='PackInputs')]
train_dataloader = dict(dataset=dict(pipeline=steps))
"""
    (out / 'ddp.py').write_text(same)
    (out / 'flexible_ddp.py').write_text(same + "runner_type = 'mmkron.FlexibleRunner'\n")
    strategy = (ROOT / 'configs/_base_/strategies/fsdp.py').read_text()
    (out / 'fsdp.py').write_text(same + strategy)
    (scenes,) = (ROOT / 'configs/lambda_resnet').glob('*_scenes-128x128.py')
    classes = tuple('0123456789')
    (out / 'detector.py').write_text(
        f'_base_ = {str(scenes)!r}\ntrain_dataloader = dict(dataset=dict(metainfo=dict(classes={classes})))\n'
    )


@pytest.fixture(scope='module')
def out(tmp_path_factory):
    """Return the folder to which the two processes wrote."""
    folder = tmp_path_factory.mktemp('processes')
    write_configs(folder)
    if 'detector' in TASKS:
        sizes = ['--size', '128', '128', '--train', '8', '--val', '1']
        load_tool('dataset_converters/fashion_scenes').main([str(folder / 'scenes'), '--source', 'digits', *sizes])
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'WORLD_SIZE': '2'}
    env.update(MASTER_ADDR='127.0.0.1', PORTS=','.join(free_ports(5 * len(TASKS))))
    command = [sys.executable, str(HERE / 'worker.py'), str(folder), *TASKS]
    logs = [(folder / f'log-{rank}.txt').open('w') for rank in range(2)]
    processes = [
        subprocess.Popen(command, env={**env, 'RANK': str(r), 'LOCAL_RANK': str(r)}, stdout=log, stderr=log)
        for r, log in enumerate(logs)
    ]
    codes = []
    try:
        for process in processes:
            codes.append(process.wait(timeout=600))  # half a minute on two idle cores
    except subprocess.TimeoutExpired:
        codes.append('none in 10 minutes')
    finally:
        for process, log in zip(processes, logs):
            process.kill()
            process.wait()
            log.close()
    texts = [f'log of process {rank}:\n' + (folder / f'log-{rank}.txt').read_text()[-3000:] for rank in range(2)]
    assert codes == [0, 0], '\n'.join([f'exit codes: {codes}', *texts])
    return folder


@pytest.fixture(scope='module')
def results(out):
    """Return the results of the tasks in each of the two processes."""
    return [torch.load(out / f'results-{rank}.pth', weights_only=True) for rank in range(2)]


def result(results, task):
    if task not in TASKS:
        pytest.skip('MMSegmentation and MMDetection need the compiled operators of mmcv')
    for each in results:
        assert not isinstance(each[task], str), each[task]
    return [each[task] for each in results]


def weights(path):
    mmkron.allow_checkpoint_globals()
    return torch.load(path, weights_only=True)['state_dict']


def test_ddp_gradients(results):
    """Every backbone, whole and in part: the mean over the processes is the gradient of the joint batch.

    That the second step runs shows that no parameter is without a gradient.
    """
    for errors in result(results, 'ddp'):
        assert len(errors) == 18
        assert max(errors.values()) < 1e-6, errors


def test_fsdp_step(results):
    """A step of each backbone equals one on the joint batch, and what is saved loads into an unsharded backbone."""
    for backbones in result(results, 'fsdp'):
        assert len(backbones) == 10
        for name, found in backbones.items():
            assert found['error'] < 1e-6, name
            assert found['moved'] > 0.9, name  # a softmax does not see a shift, so some gradients are zero
            # Blocks of a stage that share their position embeddings stay with the root.
            assert 0 < found['units'] <= found['blocks'], name
            assert (found['units'] == found['blocks']) == ('v1.5' not in name), name


def test_fsdp_in_mixed_precision(results):
    """A step in bfloat16 is close to one on the joint batch, also for the norms of attention coefficients."""
    for norms in result(results, 'fsdp_mixed'):
        assert norms.keys() == {'bn_softmax', 'bn'}
        for norm, found in norms.items():
            assert found['count'] == (3 if norm == 'bn_softmax' else 6), norm
            assert found['cosine'] > 0.95, norm
            assert found['gains'] > 0.9, norm


@pytest.mark.parametrize(('task', 'lr'), [('segmentor', None), ('detector', None), ('spiking', 0.003 * 2 * 16 / 32)])
def test_run(results, out, task, lr):
    """Two iterations, after which both processes have the same weights, other than the initial ones."""
    first, second = result(results, task)
    assert first == second
    assert (first['iter'], first['world_size']) == (2, 2)
    assert all(torch.tensor(first['sums']).isfinite())
    if lr is not None:
        assert first['lr'] == pytest.approx(lr)
    (checkpoint,) = (out / task).glob('*.pth')
    saved = weights(checkpoint)
    assert [float(v.double().abs().sum()) for v in saved.values()][:3] == pytest.approx(first['sums'][:3])


def test_runs_with_fsdp(results, out):
    """FSDP gives the weights that DDP gives with either runner, and resumes from its checkpoint exactly."""
    for runs in result(results, 'fsdp_runs'):
        assert {name: (run['iter'], run['lr']) for name, run in runs.items()} == {
            name: (4, pytest.approx(0.005 * 2 * 16 / 64)) for name in ('ddp', 'flexible_ddp', 'fsdp', 'resumed')
        }
    ddp = weights(out / 'ddp/epoch_2.pth')
    for name in ('flexible_ddp', 'fsdp_run', 'resumed'):
        saved = weights(out / name / 'epoch_2.pth')
        assert saved.keys() == ddp.keys()
        print(name, max(float((saved[k].double() - ddp[k].double()).abs().max()) for k in ddp))
        for key, value in ddp.items():
            torch.testing.assert_close(saved[key], value, rtol=1e-3, atol=1e-4)
    straight, resumed = weights(out / 'fsdp_run/epoch_2.pth'), weights(out / 'resumed/epoch_2.pth')
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


def test_one_process_tests_what_fsdp_saved(out, results, monkeypatch):
    """``tools/test.py`` without a launcher takes the config of a sharded run."""
    result(results, 'fsdp_runs')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    script = load_tool('test')
    found = {}
    for name, run in (('ddp', 'ddp'), ('fsdp', 'fsdp_run')):
        args = [str(out / f'{name}.py'), str(out / run / 'epoch_2.pth'), '--work-dir', str(out / 'tested')]
        found[name] = script.test(script.parse_args([*args, '--cfg-options', 'test_dataloader.dataset.indices=100']))
    assert found['fsdp'] == found['ddp']
    assert Config.fromfile(out / 'fsdp.py').strategy.type == 'mmkron.FSDPStrategy'
