"""Timings on this machine's GPU, with the floor and a baseline from the same run.

    quantize    both orientations of a matrix, every scheme, against a plain copy
    linear      forward and backward of a linear layer, every recipe, against bf16, peers and the floor
    block       a compiled transformer block against bf16 and peers; host time of a layer in CUDA graphs
    grouped     forward and backward of a layer of many experts against bf16 and peers
    mlp         forward and backward of a norm and an MLP, fused, against bf16, peers and the floor

A suite is a file here with `add_arguments`, `measure(arguments) -> report` and `render(report) -> text`.
"""

import argparse
import json
from pathlib import Path

import torch

from octavo.cli.bench import block, grouped, linear, mlp, quantize
from octavo.errors import UnsupportedHardware

SUITES = {"quantize": quantize, "linear": linear, "block": block, "grouped": grouped, "mlp": mlp}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, module in SUITES.items():
        text = module.__doc__ or ""
        suite = suites.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(suite)
        suite.add_argument("--json", type=Path, default=None, help="also write the raw figures to this file")


def run(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available() and getattr(arguments, "device", None) != "cpu":
        raise UnsupportedHardware("A bench times a GPU, and torch sees none here. Run it on a machine that has one.")
    suite = SUITES[arguments.suite]
    report = suite.measure(arguments)
    print(suite.render(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0
