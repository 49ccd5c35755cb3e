"""Gradients by name, in the order of the inputs.

A user's backward names the inputs that it knows. Their places change whenever an operation gets another input.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.runtime.dry_run import Miscounted


def in_order(where: str, found: Iterable[Any], names: Sequence[Sequence[str]]) -> list[Any]:
    """Return the gradients of each operation, with a tuple in place of each dict. A name that a dict leaves out stands
    for None. What is no dict stays as it is.

    `where` is the function that returned them, for messages; `names` are the inputs of each operation."""
    return [
        _ordered(where, part, names[i], f" for operation {i}" if len(names) > 1 else "")
        if i < len(names) and isinstance(part, Mapping)
        else part
        for i, part in enumerate(found)
    ]


def _ordered(where: str, found: Mapping[str, Any], names: Sequence[str], of: str) -> tuple[Any, ...]:
    for name in found:
        if name not in names:
            raise Miscounted(
                f"{where} returned a gradient of {name!r}{of}, which is no input. Use the names of the inputs: "
                f"{', '.join(names)}."
            )
    if len(set(names)) < len(names):  # a parameter of a legacy operation may be named x
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise Miscounted(f"{where} returned gradients by name, and two inputs{of} are named {twice!r}. Return a tuple.")
    return tuple([found.get(name) for name in names])
