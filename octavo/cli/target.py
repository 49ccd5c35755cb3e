"""The argument module:function of a command: a function of the user's that returns a model and its inputs."""

import importlib
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from octavo.errors import UnsupportedConfig

Batches = list[tuple[Any, ...] | Mapping[str, Any]]


def add_target(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="module:function", help="your function, such as mymodule:example")


def load(target: str) -> tuple[nn.Module, Batches]:
    """Return the model, and the arguments of each call."""
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise UnsupportedConfig(f"The target is module:function, got {target!r}. For example: mymodel:example.")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        way = "Run this in the folder it lies in, or install it."
        if name.endswith(".py"):
            way = (
                f"Name the module, not its file: run this in the folder it lies in, with {Path(name).stem}:{attribute}."
            )
        raise UnsupportedConfig(f"{name} cannot be imported: {error}. {way}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UnsupportedConfig(f"{name} has no function {attribute}. Define one that returns (model, *inputs).")
    _check_callable_alone(target, function)
    return _checked(target, function())


def _check_callable_alone(target: str, function: Any) -> None:
    """Raise if a call without arguments is not possible."""
    try:
        parameters = signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        parameters.bind()
    except TypeError as error:
        raise UnsupportedConfig(
            f"{target} is called without arguments, and takes {parameters}: {error}. Give them defaults, or write a "
            "function without arguments that calls it."
        ) from None


def _checked(target: str, found: Any) -> tuple[nn.Module, Batches]:
    model, *inputs = found if isinstance(found, tuple) and found else (found,)
    batches: Any = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], list) else [tuple(inputs)]
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        batches = [inputs[0]]
    if not isinstance(model, nn.Module) or not inputs:
        raise UnsupportedConfig(
            f"{target} must return (model, *inputs), a torch.nn.Module first, got {_got(found)}. Or (model, "
            "[(x1, y1), (x2, y2)])."
        )
    if not batches or not all(isinstance(batch, tuple | Mapping) for batch in batches):
        raise UnsupportedConfig(
            f"{target} returned a list after the model, which is one tuple of arguments for each call, got a list of "
            f"{_kinds(tuple(batches))}. Write [(x,)], or (model, x) for a single call."
        )
    return model, batches


def _got(found: Any) -> str:
    model = found[0] if isinstance(found, tuple) and len(found) == 1 else found
    return f"a model without inputs ({type(model).__name__})" if isinstance(model, nn.Module) else _kinds(found)


def _kinds(found: Any) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(type(entry).__name__ for entry in found)})"
    return type(found).__name__


@contextmanager
def loaded(target: str) -> Iterator[tuple[nn.Module, Batches]]:
    """Yield what `load` returns. Inside the block the current folder is first in Python's path, as `python -m` has it,
    and what the model prints goes to stderr: it is no part of a report."""
    sys.path.insert(0, "")
    try:
        with redirect_stdout(sys.stderr):
            yield load(target)
    finally:
        sys.path.remove("")
