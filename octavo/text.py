"""Text for readers: counts, columns, and names of layers that differ in a number."""

import re
from collections.abc import Iterable, Sequence

SHOWN = 5  # the most names that a text lists


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def path_pattern(path: str) -> str:
    """Returns the path with a star for each number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def path_names(paths: Iterable[str]) -> str:
    """Lists paths; those that differ only in their numbers become one, with stars where they differ."""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(path_pattern(path), []).append(path or "(model)")
    return some([_with_stars(alike) for alike in kinds.values()], SHOWN)


def _with_stars(paths: Sequence[str]) -> str:
    parts = zip(*[path.split(".") for path in paths], strict=True)
    return ".".join(same[0] if len(set(same)) == 1 else "*" for same in parts)


def some(names: Sequence[str], most: int) -> str:
    """Lists the first `most` names, and counts the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
