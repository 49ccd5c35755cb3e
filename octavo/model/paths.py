"""Paths of modules: those that a path or a glob means, and the modules around them."""

import difflib
import fnmatch
from collections.abc import Collection, Iterator

from octavo.errors import did_you_mean


def matching(pattern: str, paths: Collection[str]) -> list[str]:
    """Returns the paths that a pattern means. A pattern that is a path is not read as a glob, since a path may contain
    a glob's characters."""
    return [pattern] if pattern in paths else [path for path in paths if fnmatch.fnmatchcase(path, pattern)]


def around(path: str) -> Iterator[str]:
    """Yields the path of a module and of every module that contains it, the model's ("") last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def near(pattern: str, paths: Collection[str]) -> str:
    """Returns " Did you mean 'x'?" for a pattern that matches none of these paths; "" if none is like it."""
    if any(path.endswith(f".{pattern}") for path in paths):
        return did_you_mean([f"*.{pattern}"])
    if not any(character in pattern for character in "*?["):
        return did_you_mean(difflib.get_close_matches(pattern, paths, 1))
    names = {name for path in paths for name in path.split(".")}
    parts = [next(iter(difflib.get_close_matches(part, names, 1)), part) for part in pattern.split(".")]
    changed = ".".join(parts)
    return did_you_mean([changed] if changed != pattern and matching(changed, paths) else [])
