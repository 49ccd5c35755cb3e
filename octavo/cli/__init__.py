"""The `octavo` command. A subcommand is a file here with `add_arguments(parser)` and `run(arguments) -> exit code`."""

import argparse
import os
import sys
from collections.abc import Sequence

# oneDNN on some virtual machines picks AMX instructions that die with SIGILL; it reads this at its first matmul
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from octavo.cli import bench, doctor, explain, train
from octavo.errors import Unsupported
from octavo.version import __version__

COMMANDS = {"doctor": doctor, "train": train, "bench": bench, "explain": explain}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="octavo", description="Low-precision training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = module.__doc__ or ""
        command = commands.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
    arguments = parser.parse_args(argv)
    try:
        code: int = COMMANDS[arguments.command].run(arguments)
        return code
    except Unsupported as refusal:
        print(f"octavo {arguments.command}: {refusal}", file=sys.stderr)
        return 2
