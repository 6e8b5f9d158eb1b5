"""Export a classifier, a segmentor or a backbone to an ONNX or torch.export file, and check the file.

    python tools/deployment/export.py CONFIG CHECKPOINT --shape 224 224 --out model.onnx

The network is exported in evaluation mode; the time steps of a spiking network are unrolled. The input is what the data
pipeline of the config returns, for images values from 0 to 255: the graph holds the channel order, mean and standard
deviation of the data preprocessor unless --normalized is given. A classifier returns logits (B, classes), a segmentor
logits (B, classes, H, W) of the input's size, a backbone its feature maps. The file is compared with the model on
random input, also at another batch and size if they are dynamic, and is written only if they agree. docs/export.md
lists what cannot be exported, and why.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import MMLogger
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

from mmkron.engine import runner as launch
from mmkron.layers import LIF
from mmkron.utils import cli
from mmkron.utils.errors import LaunchError
from mmkron.version import __version__

TRIES = 3  # inputs per shape in the check of a spiking network
SUFFIXES = {'onnx': '.onnx', 'torch': '.pt2'}
OPSETS = {'torchscript': 17, 'dynamo': 18}
# Added to H and W for the second input of a check. Programs of torch.export guard on the parity of a size.
SIZE_STEPS = {'torchscript': (33, 17), 'dynamo': (64, 64)}


class Deployed(nn.Module):
    """A model of a host library as a function from a batch of images to tensors.

    Args:
        model: MMPretrain's ``ImageClassifier``, MMSegmentation's ``EncoderDecoder``, or with ``part='backbone'`` any
            model that has a backbone.
        part: ``'model'`` or ``'backbone'``.
        normalized: Whether the input is normalized already, so that the data preprocessor is not part of the graph.

    Raises:
        LaunchError: The model is not a single graph.
    """

    def __init__(self, model: nn.Module, part: str = 'model', normalized: bool = False) -> None:
        super().__init__()
        if not isinstance(getattr(model, 'backbone', None), nn.Module):
            raise LaunchError(f'the model needs a backbone, got {type(model).__name__}')
        self.kind = 'backbone' if part == 'backbone' else find_kind(model)
        self.model = model.backbone if part == 'backbone' else model
        convs = (module for module in model.backbone.modules() if isinstance(module, nn.Conv2d))
        self.channels = next((conv.in_channels for conv in convs), 3)
        preprocessor = getattr(model, 'data_preprocessor', None)
        flags = ('to_rgb', 'channel_conversion', '_channel_conversion')  # one per host
        self.flip = not normalized and self.channels == 3 and any(getattr(preprocessor, flag, False) for flag in flags)
        self.norm = not normalized and bool(getattr(preprocessor, '_enable_normalize', False))
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


def find_kind(model: nn.Module) -> str:
    """Return ``'classifier'`` or ``'segmentor'``; raise LaunchError for other models."""
    names = {cls.__name__ for cls in type(model).__mro__}
    for name, kind in (('ImageClassifier', 'classifier'), ('EncoderDecoder', 'segmentor')):
        if name in names:
            return kind
    hint = 'MMDeploy exports detectors; ' if 'BaseDetector' in names else ''
    raise LaunchError(
        f'{type(model).__name__} must be an ImageClassifier or an EncoderDecoder; {hint}use --part backbone to export '
        'the backbone alone'
    )


def input_shapes(model: Deployed, args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the shape of the example input and, if something is dynamic, a second shape."""
    frames = () if args.frames is None else (args.frames,)
    if args.dynamic == 'none':
        return [(args.batch, *frames, model.channels, *args.shape)]
    exporter = 'dynamo' if args.format == 'torch' else args.exporter
    # torch.export takes an example with one sample to mean that the batch is always 1.
    batch = max(2, args.batch) if exporter == 'dynamo' else args.batch
    steps = SIZE_STEPS[exporter] if args.dynamic == 'all' else (0, 0)
    other = (side + step for side, step in zip(args.shape, steps))
    return [(batch, *frames, model.channels, *args.shape), (batch + 1, *frames, model.channels, *other)]


def make_input(model: Deployed, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Return random values in the range of the input."""
    generator = torch.Generator().manual_seed(seed)
    if model.norm:
        return torch.randint(0, 256, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def attempt(what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without its warnings; turn its error into a LaunchError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return function(*args, **kwargs)
    except Exception as error:  # exporters and runtimes have no common class of errors
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise LaunchError(f'{what}: {reason:.600}') from error


def dynamic_axes(tensors: Sequence[Tensor], name: str) -> dict[int, str]:
    """Return the axes in which the first and the last tensor differ, with a name for each."""
    sizes = zip(tensors[0].shape, tensors[-1].shape)
    return {axis: f'{name}_{axis}' for axis, (first, last) in enumerate(sizes) if first != last}


def to_onnx(model: Deployed, args: argparse.Namespace, inputs: Sequence[Tensor], meta: dict[str, str]) -> bytes:
    """Return the content of an ONNX file."""
    onnx = attempt('cannot import onnx', import_module, 'onnx')
    outputs = [model(x) for x in inputs]
    names = output_names(model, outputs[0])
    axes = {name: dynamic_axes(group, name) for name, group in zip(names, zip(*outputs))}
    axes['x'] = dynamic_axes(inputs, 'x')
    options: dict[str, Any] = dict(dynamo=False, dynamic_axes=axes)
    if args.exporter == 'dynamo':
        shapes = (dict.fromkeys(axes['x'], torch.export.Dim.DYNAMIC),) if axes['x'] else None
        options = dict(dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False)
    options.update(input_names=['x'], output_names=names, opset_version=args.opset or OPSETS[args.exporter])
    buffer = io.BytesIO()
    attempt(
        f'the {args.exporter} exporter refuses the model', torch.onnx.export, model, (inputs[0],), buffer, **options
    )
    proto = onnx.load_from_string(buffer.getvalue())
    onnx.helper.set_model_props(proto, meta)
    return proto.SerializeToString()


def to_torch(model: Deployed, args: argparse.Namespace, inputs: Sequence[Tensor], meta: dict[str, str]) -> bytes:
    """Return the content of a file that ``torch.export.load`` reads."""
    axes = dynamic_axes(inputs, 'x')
    shapes = (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),) if axes else None
    trace, options = torch.export.export, dict(dynamic_shapes=shapes, strict=False)
    program = attempt('torch.export refuses the model', trace, model, (inputs[0],), **options)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={'metadata.json': json.dumps(meta)})
    return buffer.getvalue()


def output_names(model: Deployed, outputs: Sequence[Tensor]) -> list[str]:
    return [f'map{i}' for i in range(len(outputs))] if model.kind == 'backbone' else ['logits']


def load_onnx(content: bytes) -> Callable[[Tensor], list[Tensor]]:
    """Return an ONNX file as a function that onnxruntime computes on the CPU."""
    runtime = import_module('onnxruntime')
    session = runtime.InferenceSession(content, providers=['CPUExecutionProvider'])
    return lambda x: [torch.from_numpy(out) for out in session.run(None, {'x': x.numpy()})]


def load_torch(content: bytes) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a torch.export file as a function."""
    return torch.export.load(io.BytesIO(content)).module()


def check(model: nn.Module, run: Callable[[Tensor], Sequence[Tensor]], inputs: Iterable[Tensor], rtol: float) -> None:
    """Compare a file with the model until they agree on an input, and print the largest difference.

    Args:
        model: The exported model.
        run: The file as a function.
        inputs: Inputs of one shape. Only a network with neurons needs more than one; see :func:`is_rounding`.
        rtol: Largest difference allowed, relative to the largest value of an output.

    Raises:
        LaunchError: The outputs differ for all inputs, or the file does not take an input.
    """
    for x in inputs:
        what = f'nothing is written: at input {tuple(x.shape)} the file'
        hint = 'see --dynamic and --tolerance, and docs/export.md for what fixes the size'
        actual, expected = attempt(f'{what} fails ({hint})', run, x), model(x)
        if len(actual) != len(expected):
            raise LaunchError(f'{what} has {len(actual)} outputs, and the model {len(expected)}')
        try:
            for theirs, ours in zip(actual, expected):
                torch.testing.assert_close(theirs, ours, rtol=0, atol=rtol * float(ours.abs().max()))
        except AssertionError as error:
            if is_rounding(model, x, actual, expected):
                print(f'{tuple(x.shape)}: spikes at the threshold differ, as by rounding', flush=True)
                return
            failure = LaunchError(f'{what} and the model differ ({hint}): {error}')
        else:
            difference = max(float((theirs - ours).abs().max()) for theirs, ours in zip(actual, expected))
            scale = max(float(out.abs().max()) for out in expected)
            print(f'{tuple(x.shape)}: largest difference {difference:.1e} of values up to {scale:.2g}', flush=True)
            return
    raise failure


def has_neurons(model: nn.Module) -> bool:
    """Return whether a network has spiking neurons."""
    return any(isinstance(module, LIF) for module in model.modules())


def is_rounding(model: nn.Module, x: Tensor, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether a spiking network's file is about as close to the model in float64 as the model in float32 is."""
    # Rounding decides whether a neuron at its threshold fires, and one spike changes many outputs: with HST-10-384 at
    # 161 x 145 and random weights the file was 2.6e-07 away from float64, PyTorch in float32 2.5e-02. On another input
    # the file may be the one that is far away, so that several inputs are tried.
    if not has_neurons(model):
        return False
    exact = deepcopy(model).double()(x.double())
    theirs, ours = (sum(float((a - b).square().sum()) for a, b in zip(outs, exact)) for outs in (actual, expected))
    return theirs <= 9 * ours


def export(args: argparse.Namespace) -> None:
    """Export what the command line requests, check it and write it."""
    out = check_args(args)
    cfg = cli.load_model_config(args)
    write, load = {'onnx': (to_onnx, load_onnx), 'torch': (to_torch, load_torch)}[args.format]
    MMLogger.get_instance('export', log_level='ERROR')
    with launch.environment(cfg, args), torch.no_grad():
        model = Deployed(launch.build_model(cfg, 'cpu', nn.Module, 'layer'), args.part, args.normalized).eval()
        shapes = input_shapes(model, args)
        inputs = [make_input(model, shape) for shape in shapes]
        for x in inputs:
            attempt(f'the model takes no input {tuple(x.shape)}', model, x)
        content = write(model, args, inputs, describe(model, args))
        if args.check:
            run = attempt('the runtime refuses the model', load, content)
            seeds = range(TRIES if has_neurons(model) else 1)
            for shape in shapes:
                check(model, run, (make_input(model, shape, seed) for seed in seeds), args.tolerance)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as error:
        raise LaunchError(f'--out {args.out!r} cannot be written: {error}') from error
    print(f'{out}: {len(content) / 1e6:.1f} MB' + ('' if args.checkpoint else ', with initial weights'))


def describe(model: Deployed, args: argparse.Namespace) -> dict[str, str]:
    """Return the metadata of a file."""
    return dict(
        producer=f'mmkron {__version__}, torch {torch.__version__}',
        config=Path(args.config).name,
        checkpoint=Path(args.checkpoint or 'none').name,
        part=model.kind,
        dynamic=args.dynamic,
        bgr_to_rgb=str(model.flip),  # whether the graph does it
        normalize=str(model.norm),
    )


def check_args(args: argparse.Namespace) -> Path:
    """Return the file to write; raise LaunchError for bad arguments."""
    out, suffix = Path(args.out), SUFFIXES[args.format]
    if out.suffix != suffix or out.is_dir():
        raise LaunchError(f'--out must be a file {suffix} for --format {args.format}, got {args.out!r}')
    for name in ('batch', 'frames', 'opset'):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise LaunchError(f'--{name} must be at least 1, got {value}')
    if min(args.shape) < 1:
        raise LaunchError(f'--shape must be at least 1 1, got {args.shape}')
    if not args.tolerance > 0:
        raise LaunchError(f'--tolerance must be greater than 0, got {args.tolerance}')
    return out


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_common_arguments(parser, distributed=False)
    add, shown = parser.add_argument, '; default: %(default)s'
    add('checkpoint', nargs='?', help='checkpoint file or URL; default: initial weights')
    add('--format', choices=tuple(SUFFIXES), default='onnx', help=f'format of the file{shown}')
    add('--out', required=True, metavar='FILE', help='file to write: .onnx, or .pt2 for --format torch')
    add('--shape', type=int, nargs=2, required=True, metavar=('H', 'W'), help='size of the input')
    add('--batch', type=int, default=1, metavar='B', help=f'number of samples{shown}')
    add('--frames', type=int, metavar='T', help='number of event frames of an input (B, T, C, H, W)')
    dynamic = f'dynamic sizes: the batch, or batch, height and width; --dynamic alone means all{shown}'
    add('--dynamic', nargs='?', choices=('none', 'batch', 'all'), const='all', default='none', help=dynamic)
    add('--part', choices=('model', 'backbone'), default='model', help=f'what to export{shown}')
    normalized = 'the input is normalized already; leave the data preprocessor out of the graph'
    add('--normalized', '--normalised', action='store_true', help=normalized)
    add('--opset', type=int, metavar='N', help='version of the ONNX operators; default: 17, with dynamo 18')
    exporter = f'ONNX exporter of PyTorch{shown}'
    add('--exporter', choices=tuple(OPSETS), default='torchscript', help=exporter)
    add('--check', action=argparse.BooleanOptionalAction, default=True, help='compare the file with the model')
    tolerance = f'largest difference allowed, relative to the largest value{shown}'
    add('--tolerance', type=float, default=1e-3, metavar='X', help=tolerance)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    cli.main(export, parse_args(argv))


if __name__ == '__main__':
    main()
