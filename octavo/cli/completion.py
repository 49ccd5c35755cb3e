"""Print a script that completes commands, options, recipes and files in your shell.

bash  octavo completion bash > ~/.local/share/bash-completion/completions/octavo
zsh   octavo completion zsh > ~/.octavo-completion.zsh, and in ~/.zshrc: source ~/.octavo-completion.zsh
fish  octavo completion fish > ~/.config/fish/completions/octavo.fish

example: octavo completion bash > ~/.local/share/bash-completion/completions/octavo
"""

import argparse
import shlex
from importlib import import_module
from typing import Any, NamedTuple

from octavo.cli.bench import SUITES
from octavo.cli.commands import COMMANDS
from octavo.recipes import SHIPPED

SHELLS = ("bash", "zsh", "fish")
TAKES_RECIPES = ("--recipe", "--recipes")


class Command(NamedTuple):
    """The words that may follow a command."""

    name: str
    options: list[str]
    choices: list[str]  # its suites, or shells


class _Recorder(argparse.ArgumentParser):
    """A parser that lists what was added to it."""

    def __init__(self) -> None:
        self.added: list[argparse.Action] = []
        super().__init__()

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        action = super().add_argument(*names, **settings)
        self.added.append(action)
        return action


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def run(arguments: argparse.Namespace) -> int:
    found = [described(name, f"octavo.cli.{module}") for name, module in COMMANDS.items()]
    print(fish(found) if arguments.shell == "fish" else bash(found, zsh=arguments.shell == "zsh"))
    return 0


def described(name: str, module: str) -> Command:
    """Return the options and choices of a command, from its own parser."""
    parser = _Recorder()
    import_module(module).add_arguments(parser)
    options = [option for action in parser.added for option in action.option_strings if option.startswith("--")]
    choices = [str(choice) for action in parser.added if not action.option_strings for choice in action.choices or ()]
    if name == "bench":  # of all suites
        options += ["--shape", "--recipes", "--no-peers", "--json", "--html"]
        choices += SUITES
    return Command(name, options, choices)


def bash(commands: list[Command], *, zsh: bool = False) -> str:
    """Return the script for bash, which zsh reads too."""
    cases = "\n".join(
        f"    {command.name}) words={shlex.quote(' '.join([*command.options, *command.choices]))} ;;"
        for command in commands
    )
    names = " ".join(command.name for command in commands)
    before = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{before}_octavo() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))
    return
  fi
  case "$before" in
    {"|".join(TAKES_RECIPES)}) COMPREPLY=($(compgen -W "{" ".join(SHIPPED)}" -- "$current")); return ;;
  esac
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _octavo octavo"""


def fish(commands: list[Command]) -> str:
    """Return the script for fish."""
    lines = []
    for command in commands:
        lines.append(f"complete -c octavo -n __fish_use_subcommand -a {command.name}")
        seen = f"-n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            values = f" -xa '{' '.join(SHIPPED)}'" if option in TAKES_RECIPES else ""
            lines.append(f"complete -c octavo {seen} -l {option.removeprefix('--')}{values}")
        if command.choices:
            lines.append(f"complete -c octavo {seen} -a '{' '.join(command.choices)}'")
    return "\n".join(lines)
