"""A layer that `octavo.inspect` watches: its own class with a forward around it, and the four operators it calls.

    octavo::inspect_x   (x, stats) -> x, link                    before the layer; backward: inspect_dx
    octavo::inspect_y   (y, link?, tensors, stats, call) -> y    after it, records x, w, y; backward: inspect_dy
    octavo::inspect_dy  (dy, tensors, stats, call, like) -> dy, dx of the shadow      records dy and dw
    octavo::inspect_dx  (dx, dx of the shadow, stats) -> dx                           records dx

The link carries nothing forward. Its gradient is the shadow's dx, which so arrives where the layer's dx does. Eager
calls, graphs and captures run the same operators. Their writes to `stats` are not declared, as those of
`octavo::run_bwd` are not: two microbatches may be in flight. An operator returns a copy, since it may not return its
input.

The call is `digest|layer|presence|config`, as of `octavo.lower.operators`, with the seed of rounding as a last tensor.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from octavo.fuser.operation import WATCHED
from octavo.inspection.measure import Call, record_input_gradient
from octavo.lower.operators import DIGEST
from octavo.lower.packing import pack
from octavo.modules.quantized import SEED, Quantized
from octavo.quant import GradientCodes, GroupedTensor, QTensor

STATS = "inspection_stats"  # the buffer


class Switch:
    """The state of a block, which its layers share, and copies of them: a copy that outlives the block runs as ever."""

    def __init__(self) -> None:
        self.inside = False  # whether the block is entered: layers then run by themselves
        self.on = False  # whether they record, too

    def __deepcopy__(self, memo: dict[int, Any]) -> "Switch":
        return self


class Watched(Quantized):
    """The forward of a layer that is inspected. `watched_class` puts it in front of the layer's own class."""

    inspection: Switch
    _watched_call: Any = None  # the stage of the call that runs, and its x

    def why_not_fusible(self, x: Any) -> str:
        return WATCHED if self.inspection.inside else super().why_not_fusible(x)

    def forward(self, input: Any, *arguments: Any, **keywords: Any) -> Any:
        if not self.inspection.on or any(type(v) is GradientCodes for v in (*arguments, *keywords.values())):
            made = super().forward(input, *arguments, **keywords)  # type: ignore[misc]
            if self._watched_call is not None:
                self._watched_call = None
            return made
        stats = self._buffers[STATS]
        x, link = _entered(input, stats)
        made = super().forward(x, *arguments, **keywords)  # type: ignore[misc]
        if self._watched_call is None:  # it ran outside of the graph, and was recorded there
            return made
        stage, rows = self._watched_call
        self._watched_call = None
        tensors: list[Tensor] = []
        call = DIGEST + "|" + stage.name + "|" + self._packed(stage, rows, tensors) + "|" + stage.key
        if not torch.compiler.is_compiling():
            self.__dict__["inspected_recipe"] = self._recipe_key(stage.key)
        y = made[0] if type(made) is tuple else made
        values = y.dequantize() if type(y) is QTensor else y
        y_seen = torch.ops.octavo.inspect_y(values, link, [t.detach() for t in tensors], stats, call)
        if type(y) is QTensor:
            y_seen = QTensor(y.codes, y.scale, y.spec, y.shape, y.dtype, y.global_scale, y_seen)
        return (y_seen, *made[1:]) if type(made) is tuple else y_seen

    def _stage(self, x: Any, *arguments: Any, **keywords: Any) -> Any:
        stage = super()._stage(x, *arguments, **keywords)  # type: ignore[misc]
        if self.inspection.on:  # else nothing takes the tensors out again
            self._watched_call = (stage, x)
        return stage

    def _packed(self, stage: Any, x: Any, tensors: list[Tensor]) -> str:
        """Add the call's tensors to a list, without those that it writes to, and return which there are."""
        fields = [x if isinstance(x, Tensor) else None, *stage.inputs]
        for place, name in enumerate(self.LAYER.Inputs._fields):
            if name == "seen":
                fields[place] = ()
            elif name == "out":
                fields[place] = None
        return pack([*fields, self._buffers.get(SEED)], tensors)

    def _recipe_key(self, key: str) -> str:
        found: str = self.LAYER.config(key).recipe.key
        return found


def _entered(x: Any, stats: Any) -> tuple[Any, Tensor | None]:
    """x, through the operator that records its gradient if it takes one. What is no x the layer refuses itself."""
    if not torch.is_grad_enabled() or not getattr(x, "requires_grad", False):
        return x, None
    if isinstance(x, Tensor):
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # as the layer would
        seen, link = torch.ops.octavo.inspect_x(x, stats)
        return seen, link
    token, link = torch.ops.octavo.inspect_x(x.token, stats)
    if type(x) is GroupedTensor:
        return GroupedTensor(x.q, x.groups, x.orientation, x.columns, token), link
    return QTensor(x.codes, x.scale, x.spec, x.shape, x.dtype, x.global_scale, token), link


@cache
def watched_class(kind: Any) -> Any:
    """The class of a layer while it is inspected; it has the name of the layer's own."""
    return type(kind.__name__, (Watched, kind), {"__module__": Watched.__module__, "_inspected_class": kind})


# -- operators ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("octavo::inspect_x", mutates_args=())
def _inspect_x(x: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), _link(x)


@_inspect_x.register_fake
def _(x: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), _link(x)


def _link(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.float32, device=x.device).expand(x.shape)


@torch.library.custom_op("octavo::inspect_dx", mutates_args=())
def _inspect_dx(dx: Tensor, exact: Tensor, stats: Tensor) -> Tensor:
    record_input_gradient(stats, dx, exact)
    return dx.clone()


@_inspect_dx.register_fake
def _(dx: Tensor, exact: Tensor, stats: Tensor) -> Tensor:
    return torch.empty_like(dx)


@torch.library.custom_op("octavo::inspect_y", mutates_args=())
def _inspect_y(y: Tensor, link: Tensor | None, tensors: list[Tensor], stats: Tensor, call: str) -> Tensor:
    Call.of(call, tensors).record_forward(stats, y)
    return y.clone()


@_inspect_y.register_fake
def _(y: Tensor, link: Tensor | None, tensors: list[Tensor], stats: Tensor, call: str) -> Tensor:
    return torch.empty_like(y)


@torch.library.custom_op("octavo::inspect_dy", mutates_args=())
def _inspect_dy(dy: Tensor, tensors: list[Tensor], stats: Tensor, call: str, like: list[int]) -> tuple[Tensor, Tensor]:
    dx = Call.of(call, tensors).record_backward(stats, dy)
    found = torch.empty(0, device=dy.device) if dx is None or not like else dx.reshape(like)
    return dy.clone(), found


@_inspect_dy.register_fake
def _(dy: Tensor, tensors: list[Tensor], stats: Tensor, call: str, like: list[int]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dy), torch.empty(like or (0,), dtype=torch.float32, device=dy.device)


def _save_x(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.set_materialize_grads(False)


def _backward_x(ctx: Any, dx: Tensor | None, exact: Tensor | None) -> tuple[Tensor | None, None]:
    if dx is not None and exact is not None:
        dx = torch.ops.octavo.inspect_dx(dx, exact, ctx.saved_tensors[0])
    return dx, None


def _save_y(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, link, tensors, stats, call = inputs
    ctx.save_for_backward(*tensors, stats)
    ctx.call, ctx.like = call, [] if link is None else list(link.shape)
    ctx.set_materialize_grads(False)


def _backward_y(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
    *tensors, stats = ctx.saved_tensors
    nothing = [None] * len(tensors)
    if dy is None:
        return None, None, nothing, None, None
    dy, exact = torch.ops.octavo.inspect_dy(dy, tensors, stats, ctx.call, ctx.like)
    return dy, exact if ctx.like else None, nothing, None, None


_inspect_x.register_autograd(_backward_x, setup_context=_save_x)
_inspect_y.register_autograd(_backward_y, setup_context=_save_y)
for _name in ("inspect_x", "inspect_y", "inspect_dx", "inspect_dy"):
    has_side_effect(getattr(torch.ops.octavo, _name).default)
