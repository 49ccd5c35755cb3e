"""A layer that `octavo.inspect` watches: its own class, and operators around the layer's node.

    octavo::inspect_x   (x, stats) -> x, link                    before the node; backward: inspect_dx
    octavo::inspect_y   (y, link?, tensors, stats, call) -> y    after it, records x, w, y; backward: inspect_dy
    octavo::inspect_dy  (dy, tensors, stats, call, like) -> dy, dx of the shadow      records dy and dw
    octavo::inspect_dx  (dx, dx of the shadow, stats) -> dx                           records dx
    octavo::inspect_rows (x, parts of its codes, stats, recipe) -> codes    records x that is gathered as codes

Collectives of a layer that is split over ranks are outside of the four: x has been gathered, and y and dx are this
rank's terms of sums. The shadow has the same tensors, or the values of x that was gathered as codes, and nothing more
is sent.

The link carries nothing forward. Its gradient is the shadow's dx, which so arrives where the layer's dx does. Eager
calls, graphs and captures run the same operators. Their writes to `stats` are not declared, as those of
`octavo::run_bwd` are not: two microbatches may be in flight. An operator returns a copy, since it may not return its
input.

The call is `digest|layer|presence|recorded|config`, as of `octavo.lower.operators`, with the seed of rounding as a last
tensor; `recorded` is "x" if inspect_rows has recorded it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from octavo.ambient import ambient
from octavo.fuser.operation import WATCHED
from octavo.inspection.measure import Call, record_input_gradient, record_rows
from octavo.lower.call import Stage
from octavo.lower.operators import DIGEST
from octavo.lower.packing import pack
from octavo.modules.parallel import Parallel
from octavo.modules.quantized import SEED, Quantized
from octavo.quant import GradientCodes, QTensor

STATS = "inspection_stats"  # the hidden buffer


class Switch:
    """The state of a block, which its layers share, and copies of them: a copy that outlives the block runs as ever."""

    def __init__(self) -> None:
        self.inside = False  # whether the block is entered: layers then run by themselves
        self.on = False  # whether they record, too

    def __deepcopy__(self, memo: dict[int, Any]) -> "Switch":
        return self


class Watched(Quantized):
    """The node of a layer that is inspected. `watched_class` puts it in front of the layer's own class."""

    inspection: Switch

    def why_not_fusible(self, x: Any) -> str:
        return WATCHED if self.inspection.inside else super().why_not_fusible(x)

    def split(self) -> Parallel | None:
        parallel = super().split()
        if parallel is None or not parallel.gather_again or not self.inspection.inside:
            return parallel
        return parallel._replace(gather_again=False)  # backward measures dw from x's codes of all ranks, too

    def _run_node(self, stage: Stage, x: Any, as_nodes: bool, shape: tuple[int, ...] | None = None) -> Any:
        if not self.inspection.on or any([type(buffer) is GradientCodes for buffer in stage.buffers]):
            return super()._run_node(stage, x, as_nodes, shape)
        stats: Any = self._hidden._buffers[STATS]
        link = None
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            x, link = torch.ops.octavo.inspect_x(x, stats)
        made = super()._run_node(stage, x, as_nodes, shape)
        tensors: list[Tensor] = []
        recorded = "x" if self._now("_gathers_codes", stage.key) else ""
        presence = self._packed(stage, x, tensors)
        call = DIGEST + "|" + stage.name + "|" + presence + "|" + recorded + "|" + stage.key
        if not torch.compiler.is_compiling():
            self.__dict__["inspected_recipe"] = self.LAYER.config(stage.key).recipe.key
        y = self._values_of_y(stage, made)
        return torch.ops.octavo.inspect_y(y, link, [t.detach() for t in tensors], stats, call), *made[1:]

    def rows_to_gather(self, x: Tensor, codes: QTensor) -> QTensor:
        if not self.inspection.on:
            return codes
        recipe = self._recipe or self._followed(ambient.recipe)
        parts = [t.view(torch.uint8) if t is codes.codes else t for t in codes.tensors()]
        seen = torch.ops.octavo.inspect_rows(x, parts, self._hidden._buffers[STATS], recipe.key).view(codes.codes.dtype)
        return QTensor(seen, codes.scale, codes.spec, codes.shape, codes.dtype, codes.global_scale)

    def _gathers_codes(self, key: str) -> bool:
        """Whether the codes of x in this call were gathered."""
        parallel = self.split()
        gathers = parallel is not None and parallel.mode == "column" and parallel.sequence
        return gathers and self.LAYER.config(key).x == "codes"

    def _packed(self, stage: Any, x: Any, tensors: list[Tensor]) -> str:
        """Add the call's tensors to a list, without those that it writes to, and return which there are."""
        fields = [x if isinstance(x, Tensor) else None, *stage.inputs]
        for place, name in enumerate(self.LAYER.Inputs._fields):
            if name == "seen":
                fields[place] = ()
            elif name == "out":
                fields[place] = None
        return pack([*fields, self._hidden._buffers.get(SEED)], tensors)

    def _values_of_y(self, stage: Stage, made: Sequence[Tensor]) -> Tensor:
        """y, or the values of its codes with the gradient of its token."""
        if not self._now("_returns_codes", stage.key):
            return made[0]
        values: Tensor = self._quantized_output(made, made[0]).dequantize()  # type: ignore[operator]
        return values

    def _returns_codes(self, key: str) -> bool:
        return getattr(self.LAYER.config(key), "quantize_output", False)

    def _tear_down(self) -> None:
        super()._tear_down()
        _forget(self)  # `octavo.revert` gives the layer another class

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the layer as it is outside of the block."""
        kind = vars(type(self)).get("_inspected_class")
        if kind is None:  # a class was made from that of the block
            return super().__reduce_ex__(protocol)
        plain = kind.__new__(kind)
        vars(plain).update(vars(self))
        vars(plain)["_hidden"] = self._hidden.copy()
        _forget(plain)
        make, *rest = plain.__reduce_ex__(protocol)
        return object.__new__ if make.__name__ == "__newobj__" else make, *rest  # by which pickle makes its own class


def unwatch(layer: Quantized) -> None:
    """Make a layer as it was outside of the block. One that has got another class in the block keeps that: a class that
    was made from the block's runs as ever."""
    kind = vars(type(layer)).get("_inspected_class")
    if kind is not None:
        layer.__class__ = kind
    _drop_stats(layer)
    if not isinstance(layer, Watched):
        _forget(layer)


def _drop_stats(layer: Quantized) -> None:
    if "_hidden" in vars(layer):  # `octavo.revert` may have made the layer a plain one
        layer._hidden.drop([STATS])


def _forget(layer: Quantized) -> None:
    _drop_stats(layer)
    for name in ("inspection", "inspected_recipe"):
        vars(layer).pop(name, None)


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


@torch.library.custom_op("octavo::inspect_rows", mutates_args=())
def _inspect_rows(x: Tensor, parts: list[Tensor], stats: Tensor, recipe: str) -> Tensor:
    record_rows(stats, x, parts, recipe)
    return parts[0].clone()


@_inspect_rows.register_fake
def _(x: Tensor, parts: list[Tensor], stats: Tensor, recipe: str) -> Tensor:
    return torch.empty_like(parts[0])


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
    found = torch.empty(0, dtype=torch.float32, device=dy.device) if dx is None or not like else dx.reshape(like)
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
for _name in ("inspect_rows", "inspect_x", "inspect_y", "inspect_dx", "inspect_dy"):
    has_side_effect(getattr(torch.ops.octavo, _name).default)
