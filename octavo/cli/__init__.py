"""The `octavo` command. A subcommand is a file here with `add_arguments(parser)` and `run(arguments) -> exit code`; its
docstring is its help text."""

import argparse
import os
import sys
from collections.abc import Sequence

# on some virtual machines oneDNN picks AMX instructions and dies with SIGILL; it reads this at its first matmul
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from octavo.cli import bench, compare_command, doctor, explain_command, inspect_command, output, train
from octavo.errors import Unsupported
from octavo.version import __version__

COMMANDS = {
    "doctor": doctor, "train": train, "bench": bench, "explain": explain_command,
    "inspect": inspect_command, "compare": compare_command,
}  # fmt: skip
INTERRUPTED, BROKEN_PIPE = 130, 141  # exit codes, as a shell reports SIGINT and SIGPIPE
DESCRIPTION = (
    "Low-precision training for PyTorch. Check a machine, try a recipe, time it, and see what it does to a model."
)
EPILOG = """\
Start with `octavo doctor`. `octavo COMMAND --help` shows the options of a command and an example.

Ctrl-C ends a command. doctor, train and bench then print the results so far, and write them to the --json file.
Exit codes: 0 success, 1 a check failed, 2 wrong arguments or missing hardware, 130 ended by Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # `octavo doctor | head -1`: the reader closed the pipe
        output.drop_broken()
        return BROKEN_PIPE


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    name = f"octavo {arguments.command}"
    try:
        for option in ("json", "html"):
            if isinstance(target := getattr(arguments, option, None), str):
                output.check(target, f"--{option}")
        code: int = COMMANDS[arguments.command].run(arguments)
        return code
    except Unsupported as unsupported_reason:
        output.say(f"{name}: {unsupported_reason}")
        return 2
    except KeyboardInterrupt as stop:
        output.say(f"{name}: interrupted. {str(stop) or 'Nothing was written.'}")
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="octavo", description=DESCRIPTION, epilog=EPILOG, formatter_class=plain)
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, module in COMMANDS.items():
        text = module.__doc__ or ""
        command = commands.add_parser(name, help=text.splitlines()[0], description=text, formatter_class=plain)
        module.add_arguments(command)
    return parser
