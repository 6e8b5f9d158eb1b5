"""Exports models as files of ONNX or of torch.export and checks them; ``tools/deployment/export.py`` calls it."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from mmengine.logging import MMLogger
from torch import Tensor

import mmkron
from mmkron.engine import runner as launch
from mmkron.engine.runner import LaunchError
from mmkron.layers import LIF

FORMATS = {'onnx': '.onnx', 'torch': '.pt2'}
# Lowest sets of operators that serve: TorchScript's exporter, and what the other one is written for.
OPSETS = dict(torchscript=17, dynamo=18)
# Added to H and W for the second input of a check; graphs of torch.export keep parities.
MORE = {False: (33, 17), True: (64, 64)}
# Inputs that a check tries where neurons spike, and how much further than torch a file may be from float64.
TRIES, ROUNDING = 3, 3.0


class Deployed(nn.Module):
    """A host's model as a function of a batch of images: what its data preprocessor does to the values, the network,
    one tensor or several maps.

    Args:
        model: MMPretrain's ``ImageClassifier``, MMSegmentation's ``EncoderDecoder``, or with ``part='backbone'`` any
            model that has one.
        part: ``model`` (a classifier's logits (B, classes), a segmentor's logits (B, classes, H, W) of the input's
            size) or ``backbone`` (its maps).
        normalised: the input is normalised already, so the mean, the deviation and the order of channels of the data
            preprocessor stay out of the graph.

    Raises:
        LaunchError: a model that cannot be one graph.
    """

    def __init__(self, model: nn.Module, part: str = 'model', normalised: bool = False) -> None:
        super().__init__()
        if part == 'backbone' and not isinstance(getattr(model, 'backbone', None), nn.Module):
            raise LaunchError(f'--part backbone needs a model with a backbone, got {type(model).__name__}')
        self.kind = 'backbone' if part == 'backbone' else kind_of(model)
        self.model = model.backbone if part == 'backbone' else model
        preprocessor = getattr(model, 'data_preprocessor', None)
        backbone = self.model if self.kind == 'backbone' else model.backbone
        self.channels = next((part.in_channels for part in backbone.modules() if isinstance(part, nn.Conv2d)), 3)
        flips = ('to_rgb', 'channel_conversion', '_channel_conversion')
        self.flip = not normalised and self.channels == 3 and any(getattr(preprocessor, name, False) for name in flips)
        self.norm = not normalised and bool(getattr(preprocessor, '_enable_normalize', False))
        if self.norm:
            self.register_buffer('mean', preprocessor.mean.detach().clone().float())
            self.register_buffer('std', preprocessor.std.detach().clone().float())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.flip and x.dim() == 4:
            x = x.flip(1)
        if self.norm:
            x = (x - self.mean) / self.std
        if self.kind == 'segmentor':
            return (self.model.encode_decode(x, [dict(img_shape=x.shape[-2:])]),)
        out = self.model(x)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    def describe_input(self) -> str:
        """What the input has to hold."""
        turned = 'BGR (turned to RGB in the graph)'
        if not self.norm:
            order = f'{turned}, ' if self.flip else 'channels and '
            return f'{order}values as the network takes them; nothing is normalised in the graph'
        order = turned if self.flip else 'channels in the order of the data pipeline'
        return f'{order}, values from 0 to 255; the mean and the deviation are in the graph'


def kind_of(model: nn.Module) -> str:
    """``classifier`` or ``segmentor``.

    Raises:
        LaunchError: a detector, or a model of another kind.
    """
    names = {cls.__name__ for cls in type(model).__mro__}
    if 'BaseDetector' in names:
        raise LaunchError(
            f'{type(model).__name__} is a detector: its boxes, NMS and RoIAlign are no single graph, and MMDeploy is '
            "the host's way to export one; --part backbone exports its backbone"
        )
    for name, kind in (('ImageClassifier', 'classifier'), ('EncoderDecoder', 'segmentor')):
        if name in names:
            return kind
    raise LaunchError(
        f'{type(model).__name__} must be an ImageClassifier or an EncoderDecoder; of other models --part backbone '
        'exports the backbone'
    )


class Difference(NamedTuple):
    """What a check found at one input: its shape, the largest difference and the largest value.

    ``rounding`` is empty, or says by how much the outputs depend on the rounding of sums.
    """

    shape: tuple[int, ...]
    largest: float
    scale: float
    rounding: str = ''

    def __str__(self) -> str:
        shape = 'x'.join(map(str, self.shape))
        return f'{shape:<16} largest difference {self.largest:.1e} of values up to {self.scale:.2g}{self.rounding}'


def run(args: Namespace) -> list[Difference]:
    """Exports what the command line asks for.

    Args:
        args: as parsed by ``tools/deployment/export.py``.

    Returns:
        What the check found, one entry an input; empty with ``--no-check``.

    Raises:
        LaunchError: an argument that does not serve, a model that cannot be exported, or a file that computes
            something else than the model.
    """
    out = check_args(args)
    cfg = launch.load_config(args.config)
    launch.merge_common_args(cfg, args)
    cfg.load_from = None if args.checkpoint is None else launch.checkpoint_path(args.checkpoint, 'checkpoint')
    MMLogger.get_instance('export', log_level='ERROR')
    with launch.environment(cfg, args), torch.no_grad():
        model = Deployed(launch.build_model(cfg, 'cpu', nn.Module, 'layer'), args.part, args.normalised).eval()
        if args.checkpoint is None:
            print('no CHECKPOINT: the weights are initial ones', flush=True)
        # torch.export takes an example of one sample for a promise of one sample.
        by_export = args.format == 'torch' or args.exporter == 'dynamo'
        batch = max(2, args.batch) if args.dynamic != 'none' and by_export else args.batch
        examples = [example(model, args, batch)]
        if args.dynamic != 'none':
            more = MORE[by_export] if args.dynamic == 'all' else (0, 0)
            examples.append(example(model, args, batch + 1, more))
        wanted = [call(model, x) for x in examples]
        meta = describe(model, args, examples[0], wanted[0])
        content, names = FILES[args.format](model, args, examples, wanted, meta)
        found = []
        if args.check:
            runtime = refusing('the runtime', lambda: RUNTIMES[args.format](content))
            found = check(model, runtime, examples, args.tolerance)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as error:
        raise LaunchError(f'--out {args.out!r} cannot be written: {error}') from error
    print(f'{out}: {len(content) / 1e6:.1f} MB; input x, {meta["input"]}; outputs {", ".join(names)}')
    return found


def check_args(args: Namespace) -> Path:
    """The file to write; raises LaunchError for arguments that cannot serve."""
    out, suffix = Path(args.out), FORMATS[args.format]
    if out.suffix != suffix:
        raise LaunchError(f'--out must end in {suffix} for --format {args.format}, got {args.out!r}')
    if out.is_dir():
        raise LaunchError(f'--out is a folder: {args.out!r}')
    for name in ('batch', 'frames', 'opset'):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise LaunchError(f'--{name} must be at least 1, got {value}')
    if min(args.shape) < 1:
        raise LaunchError(f'--shape must be two numbers of at least 1, got {args.shape}')
    if not args.tolerance > 0:
        raise LaunchError(f'--tolerance must be above 0, got {args.tolerance}')
    return out


def example(model: Deployed, args: Namespace, batch: int, more: Sequence[int] = (0, 0)) -> Tensor:
    """Random values of the input's range and shape, the map larger by ``more``."""
    shape = [batch, model.channels, *(side + extra for side, extra in zip(args.shape, more))]
    if args.frames is not None:
        shape.insert(1, args.frames)
    return random_input(model, shape, 0)


def random_input(model: Deployed, shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if model.norm:
        return torch.randint(0, 256, tuple(shape), generator=generator).float()
    return torch.randn(tuple(shape), generator=generator)


def call(model: Deployed, x: Tensor) -> tuple[Tensor, ...]:
    """The model's outputs; raises LaunchError with the model's own message where the input does not fit."""
    try:
        return model(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LaunchError(f'the model takes no input {tuple(x.shape)}: {error}') from error


def describe(model: Deployed, args: Namespace, x: Tensor, outs: Sequence[Tensor]) -> dict[str, str]:
    """What the file says about itself, as strings."""
    return dict(
        producer=f'mmkron {mmkron.__version__}, torch {torch.__version__}',
        config=os.path.basename(args.config),
        checkpoint='none' if args.checkpoint is None else os.path.basename(args.checkpoint),
        part=model.kind,
        input=model.describe_input(),
        input_shape=str(tuple(x.shape)),
        dynamic=args.dynamic,
        outputs=', '.join(f'{name} {tuple(out.shape)}' for name, out in zip(output_names(model, outs), outs)),
    )


def output_names(model: Deployed, outs: Sequence[Tensor]) -> list[str]:
    return ['logits'] if model.kind != 'backbone' else [f'map{i}' for i in range(len(outs))]


def free_axes(x: Tensor, other: Tensor, name: str) -> dict[int, str]:
    """The axes in which two examples differ, named."""
    return {i: f'{name}_{i}' for i, (a, b) in enumerate(zip(x.shape, other.shape)) if a != b}


Exported = tuple[bytes, list[str]]


def to_onnx(
    model: Deployed, args: Namespace, examples: Sequence[Tensor], wanted: Sequence[Sequence[Tensor]], meta: dict
) -> Exported:
    """The bytes of an ONNX file, and the names of its outputs.

    Raises:
        LaunchError: the exporter refuses the model, or a package is missing.
    """
    onnx = need('onnx')
    names = output_names(model, wanted[0])
    axes = {}
    for name, *tensors in [('x', *examples), *zip(names, *wanted)]:
        axes[name] = free_axes(tensors[0], tensors[-1], name)
    options: dict[str, Any] = dict(dynamo=False, dynamic_axes=axes)
    if args.exporter == 'dynamo':
        need('onnxscript')
        options = dict(dynamo=True, dynamic_shapes=dynamic_shapes(axes['x']), external_data=False, verbose=False)
    buffer = io.BytesIO()
    refusing(
        f'the {args.exporter} exporter',
        lambda: torch.onnx.export(
            model,
            (examples[0],),
            buffer,
            input_names=['x'],
            output_names=names,
            opset_version=args.opset or OPSETS[args.exporter],
            **options,
        ),
    )
    proto = onnx.load_from_string(buffer.getvalue())
    onnx.helper.set_model_props(proto, {**meta, 'opset': str(proto.opset_import[0].version)})
    return proto.SerializeToString(), names


def to_torch(
    model: Deployed, args: Namespace, examples: Sequence[Tensor], wanted: Sequence[Sequence[Tensor]], meta: dict
) -> Exported:
    """The bytes of a file that ``torch.export.load`` reads, and the names of its outputs.

    Raises:
        LaunchError: torch.export refuses the model.
    """
    shapes = dynamic_shapes(free_axes(examples[0], examples[-1], 'x'))
    program = refusing(
        'torch.export', lambda: torch.export.export(model, (examples[0],), dynamic_shapes=shapes, strict=False)
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={'metadata.json': json.dumps(meta)})
    return buffer.getvalue(), output_names(model, wanted[0])


def dynamic_shapes(axes: dict[int, str]) -> tuple[dict[int, Any]] | None:
    return (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),) if axes else None


@contextmanager
def no_output() -> Iterator[None]:
    """Nothing reaches standard output, not even from C++, where TorchScript's exporter prints the graph on an error."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, 'w') as nowhere, redirect_stdout(nowhere):
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def refusing(what: str, work: Callable[[], Any]) -> Any:
    """``work()``, which an exporter or a runtime does, without its warnings; its errors become one message."""
    try:
        with warnings.catch_warnings(), no_output():
            warnings.simplefilter('ignore')
            return work()
    except LaunchError:
        raise
    except Exception as error:  # each exporter has its own kinds of errors, of no common class
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise LaunchError(f'{what} refuses the model: {reason:.600}') from error


def need(package: str) -> Any:
    """The package, imported; raises LaunchError where it is missing."""
    try:
        return __import__(package)
    except ImportError as error:
        raise LaunchError(f'this needs the package {package}, which cannot be imported: {error}') from error


def onnx_runtime(content: bytes) -> Callable[[Tensor], list[Tensor]]:
    """The file as a function, by onnxruntime on the CPU."""
    runtime = need('onnxruntime')
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # an error of a run is raised, and need not be printed too
    session = runtime.InferenceSession(content, options, providers=['CPUExecutionProvider'])
    return lambda x: [torch.from_numpy(out) for out in session.run(None, {'x': x.numpy()})]


def torch_runtime(content: bytes) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The file as a function, by torch."""
    return torch.export.load(io.BytesIO(content)).module()


FILES = dict(onnx=to_onnx, torch=to_torch)
RUNTIMES = dict(onnx=onnx_runtime, torch=torch_runtime)


def check(
    model: Deployed, runtime: Callable[[Tensor], Sequence[Tensor]], examples: Sequence[Tensor], tolerance: float
) -> list[Difference]:
    """Compares the file with the model and prints what it finds.

    Where neurons spike, the rounding of a sum decides whether one at its threshold fires, and a spike more changes
    many outputs. There a file also passes that is as near to the model in float64 as the model itself in float32.

    Args:
        model: what was exported.
        runtime: the file as a function.
        examples: inputs, one of each shape.
        tolerance: largest difference that is allowed, as a share of the largest value of an output.

    Raises:
        LaunchError: a difference beyond the tolerance, or an input that the file does not take.
    """
    spikes = any(isinstance(part, LIF) for part in model.modules())
    found = []
    for example in examples:
        for seed in range(TRIES if spikes else 1):
            x = random_input(model, example.shape, seed) if seed else example
            wanted, got = model(x), call_file(runtime, x)
            difference, fits = compare(tuple(x.shape), got, wanted, tolerance)
            if spikes and not fits:
                exact = deepcopy(model).double()(x.double())
                ours, theirs = relative_error(wanted, exact), relative_error(got, exact)
                fits = theirs <= ROUNDING * ours
                text = f'; from float64 the file is {theirs:.1e} away, torch in float32 {ours:.1e} (relative, RMS)'
                difference = difference._replace(rounding=text)
            if fits:
                break
        found.append(difference)
        print(difference, flush=True)
        if not fits:
            raise LaunchError(
                f'nothing is written: at an input {tuple(x.shape)} the file computes something else than the model '
                f'(--tolerance {tolerance:g} of the largest value); see --dynamic, and docs/export.md for what fixes '
                'the size'
            )
        if not difference.scale:
            print(f'{"":<16} all outputs are 0, so this says little: give a CHECKPOINT', flush=True)
    return found


def call_file(runtime: Callable[[Tensor], Sequence[Tensor]], x: Tensor) -> Sequence[Tensor]:
    try:
        return runtime(x)
    except Exception as error:  # of the runtime's own kinds
        reason = ' '.join(str(error).split())
        raise LaunchError(
            f'nothing is written: the file does not take an input {tuple(x.shape)}: {reason:.400}\n'
            'see --dynamic, and docs/export.md for what fixes the size'
        ) from error


def compare(
    shape: tuple[int, ...], got: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float
) -> tuple[Difference, bool]:
    """The difference of the outputs for one input, and whether each output is within the tolerance."""
    largest, scale, fits = 0.0, 0.0, len(got) == len(wanted)
    for theirs, ours in zip(got, wanted):
        if ours.shape != theirs.shape:
            raise LaunchError(f'nothing is written: output {tuple(theirs.shape)} should be {tuple(ours.shape)}')
        highest, apart = float(ours.abs().max()), float((ours - theirs).abs().max())
        fits = fits and apart <= tolerance * highest  # false for NaN
        largest, scale = max(largest, apart), max(scale, highest)
    return Difference(shape, largest, scale), fits


def relative_error(outs: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative difference of an output, by root mean squares."""
    pairs = zip(outs, exact)
    return max(
        float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt().clamp_min(1e-30)) for a, b in pairs
    )
