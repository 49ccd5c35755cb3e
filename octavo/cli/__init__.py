"""The `octavo` command. A subcommand is a file here with `add_arguments(parser)` and `run(arguments) -> exit code`; its
docstring is its help text.

    commands                    the parser: the subcommands by name, without importing them
    doctor                      octavo doctor
    train                       octavo train; its models and its loop are in `octavo.demo`
    bench                       octavo bench, a file for each bench
    explain_command             octavo explain
    inspect_command             octavo inspect
    compare_command             octavo compare
    convert_command             octavo convert
    convert_checkpoint_command  octavo convert-checkpoint
    options                     values of options, checked before any work
    target                      the argument module:function
    completion                  a script that completes commands in a shell
    output                      a report, printed and as JSON, after Ctrl-C too
    timing                      timers of the benches
    machine                     the machine that a report describes
    known_bad                   known defects of the installed torch and triton

    octavo NAME ... -> commands -> NAME.run(arguments) -> output -> exit code

This room may import rooms up to `demo`.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

# on some virtual machines oneDNN picks AMX instructions and dies with SIGILL; it reads this at its first matmul
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from octavo.cli import output
from octavo.cli.commands import COMMANDS, make_parser
from octavo.errors import Unsupported
from octavo.version import __version__

INTERRUPTED, BROKEN_PIPE = 130, 141  # exit codes, as a shell reports SIGINT and SIGPIPE


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
    parser = make_parser(__version__)
    arguments = parser.parse_args(argv)
    arguments.command_line = shlex.join(["octavo", *(sys.argv[1:] if argv is None else argv)])
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    name = f"octavo {arguments.command}"
    try:
        for option in ("json", "html"):
            if isinstance(target := getattr(arguments, option, None), str):
                output.check(target, f"--{option}")
        return import_module(f"octavo.cli.{COMMANDS[arguments.command]}").run(arguments)
    except Unsupported as unsupported_reason:
        output.say(f"{name}: {unsupported_reason}")
        return 2
    except KeyboardInterrupt as stop:
        output.say(f"{name}: interrupted. {str(stop) or 'Nothing was written.'}")
        return INTERRUPTED
