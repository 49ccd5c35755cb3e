"""Plan a user's operation as a stage, from sketches of its inputs: a dry run on tensors without data finds the values
that it saves, once for each kind of call. They do not depend on the number of rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo._torch.tracing import while_tracing
from octavo.fusion.custom.returned_values import MADE_UP, NO_GRADIENT, like
from octavo.ops.operation import Edge
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import LAYERS
from octavo.runtime.dry_run import Miscounted
from octavo.values import parse

StagePlan = tuple[str, tuple[Any, ...]]  # the stage's key, and (shape, dtype, device) of each output

MOST_PLANS = 4096  # a keyword that is a number makes a plan for each of its values
_stage_plans: dict[tuple[Any, ...], StagePlan | tuple[()]] = {}


def sketch(t: Any, width: int | None = None) -> Any:
    """Return (shape, dtype, device, known) with which a dry run stands for a tensor; `known` says how much of the shape
    `returned_values.like` may rely on: "last" or "none".

    The plan depends on the last dim alone, so the other dims are made up, except those of size 1 and those of size
    `width`, the number of x's columns. Without a width, all dims keep their sizes, as numbers."""
    if t is None:
        return None
    if isinstance(t, Edge) and t.like is not None:  # an output of a user's operation, planned with made-up sizes
        return (*t.like, "none")
    shape = tuple([len(range(n)) for n in t.shape]) if width is None else _made_up(t.shape, width)
    return shape, t.dtype, t.device, "last"


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
    """Return the sketch of a parameter: all of its shape is known."""
    return None if t is None else (tuple(t.shape), t.dtype, t.device, "all")


def wants_gradient(t: Any) -> bool:
    return t is not None and t.requires_grad and torch.is_grad_enabled()


@while_tracing
def stage_plan(
    name: str, settings: str, constants: str, wanted: Sequence[bool], sketches: Sequence[Any], last: bool = False
) -> StagePlan | tuple[()]:
    """Return the plan of the stage for inputs like these, and keywords that are not tensors, as text; an empty tuple if
    the functions cannot run on tensors of these sizes and this is not the last try."""
    at = (name, settings, constants, tuple(wanted), tuple(sketches))
    if not _stage_plans.get(at):  # an empty plan is tried again, so that the last try raises
        if len(_stage_plans) >= MOST_PLANS:
            del _stage_plans[next(iter(_stage_plans))]
        _stage_plans[at] = _planned(*at, last)
    return _stage_plans[at]


def _planned(
    name: str, settings: str, constants: str, wanted: tuple[bool, ...], sketches: Sequence[Any], last: bool
) -> StagePlan | tuple[()]:
    layer = LAYERS[name]
    protos = [t and TensorProto(*t[:3]) for t in sketches]
    settings_of_call = None if settings == "" else parse(settings)
    config = layer.Config(settings=settings_of_call, wanted=wanted, constants=parse(constants))
    try:
        found = layer.probe(config, protos)
    except Miscounted:
        raise
    except (RuntimeError, ValueError):  # the made-up sizes do not fit each other
        if last:
            raise
        return ()
    y = found.outputs[0]
    likes = [like(t, of[3], y) if want else NO_GRADIENT for t, of, want in zip(protos, sketches, wanted, strict=True)]
    outputs = tuple((tuple(t.shape), t.dtype, t.device) for t in found.outputs)
    return replace(found.config, likes=tuple(likes)).key, outputs
