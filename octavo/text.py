"""Text for readers: counts, columns, names of layers that differ in a number, and nothing that a terminal obeys."""

import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

SHOWN = 5  # the most names that a text lists
WIDE, NARROW = 80, 24  # characters of a line of a table, and the fewest that a column of sentences needs


def printable(text: str) -> str:
    """Return the text with its control characters escaped, but for line breaks: a name, of a layer or a file, may hold
    codes that a terminal obeys, or that turn the direction of text."""
    if text.isprintable():
        return text
    return "".join([c if c == "\n" or _is_visible(c) else c.encode("unicode_escape").decode("ascii") for c in text])


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # a space of any width


def one_line(text: str) -> str:
    """Return the text with all control characters escaped."""
    return printable(text).replace("\n", "\\n")


def plural(count: int, noun: str, several: str = "") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {several or noun + 's'}"


def path_pattern(path: str) -> str:
    """Return the path with a star for each number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def path_names(paths: Iterable[str], among: Iterable[str] | None = None) -> str:
    """List paths; those that differ only in their numbers become one, with stars where they differ. If `among` has
    further paths of that kind, the numbers are named: layers.{0,4-7}.mlp."""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(path_pattern(path), []).append(one_line(path) or "(model)")
    all_of = Counter(path_pattern(path) for path in among or ())
    names = (
        _with_numbers(alike) if len(alike) < all_of[kind] else [_with_stars(alike)] for kind, alike in kinds.items()
    )
    return some([name for listed in names for name in listed], SHOWN)


def _with_stars(paths: Sequence[str]) -> str:
    parts = zip(*[path.split(".") for path in paths], strict=True)
    return ".".join(same[0] if len(set(same)) == 1 else "*" for same in parts)


def _with_numbers(paths: Sequence[str]) -> list[str]:
    """Write paths as one with sets of numbers; as they are if the sets would name other paths too."""
    parts = [list(dict.fromkeys(same)) for same in zip(*[path.split(".") for path in paths], strict=True)]
    if len(set(paths)) != prod(len(part) for part in parts):
        return list(paths)
    return [".".join(part[0] if len(part) == 1 else "{" + _ranges(part) + "}" for part in parts)]


def _ranges(numbers: Sequence[str]) -> str:
    found: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, ends)) for ends in found)


def some(names: Sequence[str], most: int) -> str:
    """List the first `most` names, and count the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines, each column as wide as its widest cell. Rows that would be wider than WIDE keep to it:
    the words of a long last cell go on in the next line, and a long first cell has a line of its own."""
    return _lines(rows, ruled=False)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: columns padded to their widest cell, two spaces apart, a rule under the header."""
    return "\n".join(_lines([header, *rows], ruled=True))


def _lines(rows: Sequence[Sequence[str]], *, ruled: bool) -> list[str]:
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    start = sum(widths[:-1]) + 2 * len(widths[:-1])
    if start + widths[-1] > WIDE and WIDE - start >= NARROW and any(" " in row[-1] for row in rows[1:]):
        widths[-1] = WIDE - start
    elif start + widths[-1] > WIDE and len(widths) > 1:
        widths[0] = max(WIDE - (start + widths[-1] - widths[0]), 0)
    found = [line for row in rows for line in _wrapped(row, widths)]
    if ruled:
        found.insert(len(_wrapped(rows[0], widths)), "  ".join("-" * width for width in widths if width))
    return found


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the lines of one row."""
    first, *_, last = row
    above: list[str] = []
    if len(row) > 1 and len(first) > widths[0]:
        above, row = [first], ["", *row[1:]]
    ends = textwrap.wrap(last, widths[-1], break_long_words=False, break_on_hyphens=False) if len(row) > 1 else []
    if len(last) > widths[-1] and ends:
        row = [*row[:-1], ends[0]]
    indent = " " * (sum(widths[:-1]) + 2 * len(widths[:-1]))
    below = [indent + text for text in ends[1:]] if len(last) > widths[-1] else []
    cells = row if widths[0] else row[1:]  # no room beside the other columns
    line = ("" if widths[0] else "  ") + "  ".join(
        cell.ljust(width) for cell, width in zip(cells, widths if widths[0] else widths[1:], strict=True)
    )
    return [*above, line.rstrip(), *below]
