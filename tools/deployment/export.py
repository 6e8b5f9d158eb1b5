"""Exports a classifier, a segmentor or a backbone as a file of ONNX or of torch.export, and checks the file.

    python tools/deployment/export.py CONFIG CHECKPOINT --shape 224 224 --out model.onnx

The network is in evaluation; a spiking one holds its T steps. The input is what the config's data pipeline hands on,
for images values from 0 to 255: the data preprocessor's order of channels, mean and deviation are in the graph unless
--normalised leaves them out, and the file's metadata says so. A classifier gives logits (B, classes), a segmentor
logits (B, classes, H, W) of the input's size, a backbone its maps. The file is compared with the model on random
input, at another batch and size too where those are free, and is not written if the two differ. docs/export.md says
what does not export, and why.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmengine.config import DictAction


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', nargs='?', help='checkpoint file or URL; initial weights without it')
    parser.add_argument('--format', choices=['onnx', 'torch'], default='onnx', help='default: %(default)s')
    parser.add_argument('--out', required=True, metavar='FILE', help='.onnx, or .pt2 for --format torch')
    parser.add_argument('--shape', type=int, nargs=2, required=True, metavar=('H', 'W'), help='size of the input')
    parser.add_argument('--batch', type=int, default=1, metavar='B', help='samples of the input; default: %(default)s')
    parser.add_argument('--frames', type=int, metavar='T', help='the input is T frames of events, (B, T, C, H, W)')
    parser.add_argument(
        '--dynamic',
        nargs='?',
        choices=['none', 'batch', 'all'],
        const='all',
        default='none',
        help='what stays free: the batch, or batch, height and width; --dynamic alone means all; default: %(default)s',
    )
    parser.add_argument(
        '--part', choices=['model', 'backbone'], default='model', help='what is exported; default: %(default)s'
    )
    parser.add_argument(
        '--normalised', action='store_true', help='the input is normalised already: nothing of that in the graph'
    )
    parser.add_argument(
        '--opset', type=int, metavar='N', help="version of ONNX's operators; default: 17, with dynamo 18"
    )
    parser.add_argument(
        '--exporter',
        choices=['torchscript', 'dynamo'],
        default='torchscript',
        help="which of PyTorch's exporters makes the ONNX file; default: %(default)s",
    )
    parser.add_argument(
        '--check',
        action=argparse.BooleanOptionalAction,
        default=True,
        help='compare the file with the model; default: yes',
    )
    parser.add_argument(
        '--tolerance',
        type=float,
        default=1e-3,
        metavar='X',
        help='largest difference of the check, as a share of the largest value; default: %(default)s',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='change the config: a.b=1 a.c="[1,2]" a.0.d=x; no white space in a value',
    )
    parser.set_defaults(launcher='none', local_rank=0, work_dir=None)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        from mmkron.engine import export
        from mmkron.engine import runner as launch
    except ModuleNotFoundError as error:
        if error.name != 'mmkron':
            raise
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed
        from mmkron.engine import export
        from mmkron.engine import runner as launch
    launch.main(export.run, args)


if __name__ == '__main__':
    main()
