"""Nested dicts, lists and tuples of numbers, texts and tensors, as JSON and a flat dict of tensors.

    a number, a text, True, None   itself
    [a, b]                         [a, b]
    (a, b)                         {"tuple": [a, b]}
    {k: a, l: b}                   {"dict": [[k, a], [l, b]]}; keys are texts or ints
    a tensor                       {"tensor": its name in the flat dict}

The states of torch's optimizers and schedulers are such values.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.checkpoints.tensor_file import TensorFile, damaged, parse_json, utf8
from octavo.errors import UnsupportedDtype
from octavo.values import excerpt

STRUCTURE = "structure"  # the name of the text in a file's metadata
DEEPEST = 32
PLAIN = (str, bool, int, float, type(None))


def encoded(values: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in a value, by name, and the metadata with the rest. Raise for what is no such value."""
    tensors: dict[str, Tensor] = {}
    tree = _tree(dict(values), (), tensors)
    return tensors, {STRUCTURE: json.dumps(tree, separators=(",", ":"))}


def _tree(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if len(path) > DEEPEST:
        raise UnsupportedDtype(f"A checkpoint nests values up to {DEEPEST} deep, and {_at(path[:3])} is deeper.")
    if isinstance(value, Tensor):
        return {"tensor": _placed(value, utf8(".".join(path)), tensors)}
    if type(value) in PLAIN:
        return value
    if isinstance(value, float):  # a scalar of numpy
        return float(value)
    if isinstance(value, (list, tuple)):
        items = [_tree(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise UnsupportedDtype(
                    f"A checkpoint holds dicts from texts or ints, and {_at(path)} has the key {excerpt(repr(key))}."
                )
        return {"dict": [[key, _tree(item, (*path, str(key)), tensors)] for key, item in value.items()]}
    raise UnsupportedDtype(
        "A checkpoint holds numbers, texts, None, lists, tuples, dicts and tensors, and no other objects, since only a "
        f"pickle could. {_at(path)} is {type(value).__name__}. Leave it out, or save its state as such values."
    )


def _at(path: tuple[str, ...]) -> str:
    return excerpt(".".join(path)) or "it"


def _placed(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Put a tensor into the flat dict, by its path, or by a path with a number if that is taken."""
    free, number = name, 1
    while free in tensors:
        number += 1
        free = f"{name}#{number}"
    tensors[free] = tensor
    return free


def decoded(path: Path, file: TensorFile) -> dict[str, Any]:
    """Return the value in a file that was written of `encoded`. Raise InvalidCheckpoint for any other."""

    def read_object(tagged: dict[str, Any]) -> Any:
        match [*tagged.items()]:
            case [("tuple", list(items))]:
                return tuple(items)
            case [("dict", list(pairs))]:
                return dict(pairs)
            case [("tensor", str(name))] if name in file.tensors:
                return file.tensors[name]
        raise damaged(path, f"its structure has {excerpt(repr(tagged))}, which no checkpoint has")

    if STRUCTURE not in file.metadata:
        raise damaged(path, f"its metadata has no {STRUCTURE!r}")
    value = parse_json(path, file.metadata[STRUCTURE], read_object)
    if not isinstance(value, dict):
        raise damaged(path, f"its structure is {excerpt(repr(value))}, and no dict")
    # the other rules (keys, depth, each tensor once) are those of `encoded`, which gives the same text for its values
    try:
        tensors, metadata = encoded(value)
    except UnsupportedDtype as error:
        raise damaged(path, f"its structure has what no checkpoint has ({error})") from None
    if unused := [name for name in file.tensors if name not in tensors]:
        raise damaged(path, f"its structure does not have the tensor {excerpt(repr(unused[0]))}")
    if metadata[STRUCTURE] != file.metadata[STRUCTURE]:
        raise damaged(path, "its structure is not written as that of a checkpoint")
    return value
