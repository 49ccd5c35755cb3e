"""Pieces of text for people: counts, columns, and names of layers that differ in a number."""

import re
from collections.abc import Iterable, Sequence

SHOWN = 5  # names of which a text shows each


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def path_pattern(path: str) -> str:
    """A path with a star for each number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def path_names(paths: Iterable[str]) -> str:
    """Paths that differ in their numbers only are one, with stars."""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(path_pattern(path), []).append(path or "(model)")
    return some([kind if len(alike) > 1 else alike[0] for kind, alike in kinds.items()], SHOWN)


def some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
