"""A stage of somebody else's functions, planned on sketches of its inputs: what they save is found out once for each
kind of call, on tensors without data, and does not depend on how many rows there are.
"""

from collections.abc import Sequence
from typing import Any

import torch

from octavo.fuser.operation import Edge
from octavo.layers import user_op
from octavo.layers.dry_run import Miscounted
from octavo.layers.gradient_check import MADE_UP, like
from octavo.quant.proto import TensorProto
from octavo.values import parse

Said = tuple[str, tuple[Any, ...]]  # the key of a stage, (shape, dtype, device) of its outputs

_planned: dict[tuple[Any, ...], Said | tuple[()]] = {}


def sketch(t: Any, width: int = 0) -> Any:
    """(shape, dtype, device) of a tensor as its functions are tried on it: what is planned depends on the last dim
    alone, so that the others are made up, but for those of one element, and of as many as x has columns (`width`)."""
    if t is None:
        return None
    if isinstance(t, Edge) and t.like is not None:
        return t.like
    return _made_up(t.shape, width), t.dtype, t.device


def _made_up(shape: Any, width: int) -> tuple[int, ...]:
    known: list[int] = []
    for i, n in enumerate(shape):
        if n == 1:
            known.append(1)
        elif n == width:
            known.append(len(range(width)))  # a number from here on, where a compiler had a symbol for it
        elif i == len(shape) - 1 and len(shape) > 1:
            known.append(len(range(n)))
        else:
            known.append(MADE_UP)
    return tuple(known)


def sizes_of(t: Any) -> Any:
    """As it is, in numbers, also where a compiler had symbols."""
    if t is None:
        return None
    if isinstance(t, Edge) and t.like is not None:
        return t.like
    return tuple([len(range(n)) for n in t.shape]), t.dtype, t.device


def as_it_is(t: Any) -> Any:
    return None if t is None else (tuple(t.shape), t.dtype, t.device)


def known_sizes(t: Any) -> str:
    """As much of its shape as `octavo.layers.gradient_check.like` may rely on."""
    return "none" if isinstance(t, Edge) and t.like is not None else "last"


def wants_gradient(t: Any) -> bool:
    return t is not None and t.requires_grad and torch.is_grad_enabled()


def planned(
    name: str,
    settings: str,
    wanted: tuple[bool, ...],
    sketches: tuple[Any, ...],
    known: tuple[str, ...],
    last: bool = False,
) -> Said | tuple[()]:
    """A custom stage for inputs like these: what its functions save is found out once. Nothing, if they cannot be run
    on tensors of these sizes and this is not the last try."""
    at = (name, settings, wanted, sketches, known)
    if at not in _planned:
        _planned[at] = plan(name, settings, wanted, sketches, known, last)
    return _planned[at]


def plan(
    name: str, settings: str, wanted: tuple[bool, ...], sketches: tuple[Any, ...], known: Sequence[str], last: bool
) -> Said | tuple[()]:
    value = None if settings == "" else parse(settings)
    protos = [None if t is None else TensorProto(*t) for t in sketches]
    try:
        found = user_op.probe(user_op.FUNCTIONS[name], value, protos)
    except Miscounted:
        raise
    except (RuntimeError, ValueError):  # sizes that were made up do not fit each other
        if last:
            raise
        return ()
    y = found.outputs[0]
    likes = tuple(like(t if want else None, how, y) for t, how, want in zip(protos, known, wanted, strict=True))
    config = user_op.Config(name, value, wanted, found.fresh, found.saved, likes)
    return config.key, tuple((p.shape, p.dtype, p.device) for p in found.outputs)
