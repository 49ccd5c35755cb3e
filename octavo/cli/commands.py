"""The parser of the `octavo` command. It needs neither torch nor the rest of Octavo, whose imports take seconds: a
command's module is imported when its own arguments are parsed, so that --help and --version answer at once."""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

AddArguments = Callable[[argparse.ArgumentParser], None]
PLAIN = argparse.RawDescriptionHelpFormatter
COMMANDS = {
    "doctor": "doctor", "train": "train", "bench": "bench", "explain": "explain_command",
    "inspect": "inspect_command", "compare": "compare_command", "convert": "convert_command",
    "convert-checkpoint": "convert_checkpoint_command", "completion": "completion",
}  # fmt: skip
DESCRIPTION = (
    "Low-precision training for PyTorch. Check a machine, try a recipe, time it, and see what it does to a model."
)
EPILOG = """\
Start with `octavo doctor`. `octavo COMMAND --help` shows the options of a command and an example.

Ctrl-C ends a command. doctor, train and bench then print the results so far, and write them to the --json file.
Exit codes: 0 success, 1 a check failed, 2 wrong arguments or missing hardware, 130 ended by Ctrl-C.
"""


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: a module of `octavo.cli` with `add_arguments(parser)`, whose docstring is the help."""

    def __init__(self, *, module: str = "", add_common: AddArguments | None = None, **settings: Any) -> None:
        super().__init__(formatter_class=PLAIN, **settings)
        self.module, self.add_common = module, add_common

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.module:
            command = import_module(f"octavo.cli.{self.module}")
            self.module, self.description = "", command.__doc__
            command.add_arguments(self)
            if self.add_common is not None:
                self.add_common(self)
        return super().parse_known_args(args, namespace)


def add_commands(
    parser: argparse.ArgumentParser, dest: str, modules: dict[str, str], add_common: AddArguments | None = None
) -> None:
    """Add the choice of a command to a parser, by its name and its module of `octavo.cli`. `add_common` adds the
    options that all of these commands have."""
    chosen = parser.add_subparsers(dest=dest, metavar=dest.upper(), title=f"{dest}s", parser_class=CommandParser)
    for name, module in modules.items():
        chosen.add_parser(name, help=_first_line(module), module=module, add_common=add_common)


def _first_line(module: str) -> str:
    """Return the first line of a module's docstring, read from its source."""
    path = Path(__file__).parent.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return source.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix('"""')


def make_parser(version: str) -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="octavo", description=DESCRIPTION, epilog=EPILOG, formatter_class=PLAIN)
    parser.add_argument("--version", action="version", version=f"octavo {version}")
    add_commands(parser, "command", COMMANDS)
    return parser
