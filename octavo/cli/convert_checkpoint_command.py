"""Rewrite a published checkpoint in another layout of FP8 codes, without loading a model.

SRC is a folder with config.json and safetensors files, of codes or of values. Codes that the new layout can hold keep
every value; others become values, and are quantized again. Matrices of values are quantized, but for embeddings, norms,
routers and heads. Other files of the folder are copied. DST appears when it is complete.

layouts: bf16 (no codes) fp8-block fp8-block-ue8m0 fp8-tensor mxfp8 compressed-tensors-tensor compressed-tensors-channel
         compressed-tensors-block compressed-tensors-mxfp8 compressed-tensors-nvfp4 modelopt-fp8 modelopt-nvfp4
         modelopt-mxfp8

example: octavo convert-checkpoint downloads/model trained/fp8 --layout fp8-block
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict

from octavo.checkpoints.published import rewriting
from octavo.checkpoints.published.shards import SHARD_BYTES
from octavo.cli import machine, options, output
from octavo.demo.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="the folder to read")
    parser.add_argument("target", metavar="DST", help="the folder to make")
    parser.add_argument("--layout", required=True, metavar="LAYOUT", help="the layout of the new folder, see below")
    parser.add_argument(
        "--from", dest="from_layout", default=None, metavar="LAYOUT", help="that of SRC; default: by config.json"
    )
    parser.add_argument(
        "--ignore", nargs="+", default=[], metavar="MODULE", help="modules that stay values: paths, globs or re:..."
    )
    parser.add_argument(
        "--shard-bytes", type=options.count, default=SHARD_BYTES, metavar="N", help="the largest size of a file"
    )
    machine.add_device(parser)
    output.add_json(parser, "what became of each tensor")


def run(arguments: argparse.Namespace) -> int:
    bars: list[Progress] = []

    def begun(total: int) -> Callable[[int], None]:
        bars.append(Progress("convert", total))
        return lambda done: bars[0].show(done, "tensors") if bars[0].due(done) else None

    device = machine.parse_device(arguments.device)
    try:
        found = rewriting.rewrite(
            arguments.source, arguments.target, arguments.layout, from_layout=arguments.from_layout,
            ignore=arguments.ignore, device=device, shard_bytes=arguments.shard_bytes, begun=begun,
        )  # fmt: skip
    finally:
        for bar in bars:
            bar.close()
    output.deliver(output.head("convert-checkpoint", arguments) | asdict(found), str(found), arguments.json)
    return 0
