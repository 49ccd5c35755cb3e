"""Plans a user's operation as a stage, from sketches of its inputs: a dry run on tensors without data finds the values
that it saves, once for each kind of call. They do not depend on the number of rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo._torch.tracing import while_tracing
from octavo.fusion.custom.returned_values import MADE_UP, like
from octavo.ops.operation import Edge
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import LAYERS
from octavo.runtime.dry_run import Miscounted
from octavo.values import parse

StagePlan = tuple[str, tuple[Any, ...]]  # the stage's key, and (shape, dtype, device) of each output

_stage_plans: dict[tuple[Any, ...], StagePlan | tuple[()]] = {}


def sketch(t: Any, width: int | None = None) -> Any:
    """Return the (shape, dtype, device) with which a dry run stands for a tensor.

    The plan depends on the last dim alone, so the other dims are made up, except those of size 1 and those of size
    `width`, the number of x's columns. Without a width, all dims keep their sizes, as numbers."""
    if t is None or (isinstance(t, Edge) and t.like is not None):
        return None if t is None else t.like
    return tuple([len(range(n)) for n in t.shape]) if width is None else _made_up(t.shape, width), t.dtype, t.device


def _made_up(shape: Any, width: int) -> tuple[int, ...]:
    known: list[int] = []
    for i, n in enumerate(shape):
        if n == 1:
            known.append(1)
        elif n == width:
            known.append(len(range(width)))  # turns a compiler's symbol into a number
        elif i == len(shape) - 1 and len(shape) > 1:
            known.append(len(range(n)))
        else:
            known.append(MADE_UP)
    return tuple(known)


def as_it_is(t: Any) -> Any:
    return None if t is None else (tuple(t.shape), t.dtype, t.device)


def known_sizes(t: Any) -> str:
    """Return how much of the tensor's shape `returned_values.like` may rely on: "last" or "none"."""
    return "none" if isinstance(t, Edge) and t.like is not None else "last"


def wants_gradient(t: Any) -> bool:
    return t is not None and t.requires_grad and torch.is_grad_enabled()


@while_tracing
def stage_plan(
    name: str, settings: str, wanted: Sequence[bool], sketches: Sequence[Any], known: Sequence[str], last: bool = False
) -> StagePlan | tuple[()]:
    """Return the plan of the stage for inputs like these; an empty tuple if the functions cannot run on tensors of
    these sizes and this is not the last try."""
    at = (name, settings, tuple(wanted), tuple(sketches), tuple(known))
    if not _stage_plans.get(at):  # an empty plan is tried again, so that the last try raises
        _stage_plans[at] = _planned(*at, last)
    return _stage_plans[at]


def _planned(
    name: str, settings: str, wanted: tuple[bool, ...], sketches: Sequence[Any], known: Sequence[str], last: bool
) -> StagePlan | tuple[()]:
    layer = LAYERS[name]
    protos = [None if t is None else TensorProto(*t) for t in sketches]
    config = layer.Config(settings=None if settings == "" else parse(settings), wanted=wanted)
    try:
        found = layer.probe(config, protos)
    except Miscounted:
        raise
    except (RuntimeError, ValueError):  # the made-up sizes do not fit each other
        if last:
            raise
        return ()
    likes = tuple(
        like(t if want else None, how, found.outputs[0]) for t, how, want in zip(protos, known, wanted, strict=True)
    )
    return replace(found.config, likes=likes).key, tuple((tuple(t.shape), t.dtype, t.device) for t in found.outputs)
