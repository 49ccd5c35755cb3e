"""Values of command-line options, checked before any work: sizes, counts, lists of recipes."""

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence

from octavo.errors import Unsupported
from octavo.recipes import SHIPPED, recipe


def add_shapes(parser: ArgumentParser, names: tuple[str, ...], default: Sequence[tuple[int, ...]]) -> None:
    shapes = " and ".join(",".join(map(str, shape)) for shape in default)
    parser.add_argument(
        "--shape", action="append", type=sizes(*names), default=None, metavar="SHAPE",
        help=f"{','.join(names)}; may be given several times; default: {shapes}",
    )  # fmt: skip


def add_recipes(parser: ArgumentParser, default: Sequence[str]) -> None:
    listed = ",".join(default)
    parser.add_argument(
        "--recipes", type=recipes, default=listed, metavar="LIST",
        help=f"comma-separated, of {', '.join(SHIPPED)}, settings in brackets; default: "
        + ("all" if len(default) == len(SHIPPED) else listed),
    )  # fmt: skip


def add_cpu_device(parser: ArgumentParser) -> None:
    """Add --device to a suite that also runs on a CPU, where it shows that everything works."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")


def add_no_peers(parser: ArgumentParser) -> None:
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out; default: those installed")


def count(text: str) -> int:
    """Parse an int from 1 up."""
    if not re.fullmatch(r"\+?[0-9]{1,18}", text.strip()) or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return int(text)


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names out of known ones."""

    def read(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",")]
        for name in found:
            if name not in known:
                raise ArgumentTypeError(f"expected names out of {', '.join(known)}, comma-separated; got {name!r}")
        return found

    return read


def seed(text: str) -> int:
    """Parse an int that torch takes as a seed."""
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", text.strip()) or not -(2**63) <= int(text) < 2**63:
        raise ArgumentTypeError(f"expected a whole number from -2^63 up to 2^63 - 1, got {text!r}")
    return int(text)


def sizes(*names: str) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of that many sizes, comma-separated."""

    def read(text: str) -> tuple[int, ...]:
        try:
            found = tuple(count(part) for part in text.split(","))
        except ArgumentTypeError:
            found = ()
        if len(found) != len(names):
            example = ",".join(["4096"] * len(names))
            raise ArgumentTypeError(f"expected {','.join(names)}, each 1 or more, such as {example}; got {text!r}")
        return found

    return read


def recipes(text: str) -> list[str]:
    """Parse comma-separated names or strings of recipes, and raise for an unknown one."""
    names = [name.strip() for name in _split(text)]
    for name in names:
        try:
            recipe(name)
        except Unsupported as unsupported_reason:
            raise ArgumentTypeError(str(unsupported_reason)) from None
    return names


def recipes_or_none(text: str) -> list[str]:
    """Parse comma-separated recipes, or the word none."""
    return [] if text.strip() == "none" else recipes(text)


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets, since a recipe's settings may contain commas."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
