"""A layer that `octavo.inspect` inspects: its own class, and operators around the layer's node.

    octavo::inspect_x   (x, stats) -> x, link                    before the node; backward: inspect_dx
    octavo::inspect_y   (y, link?, tensors, stats, call) -> y    after it, records x, w, y; backward: inspect_dy
    octavo::inspect_dy  (dy, tensors, stats, call, like) -> dy, dx of the float32 reference      records dy and dw
    octavo::inspect_dx  (dx, dx of the float32 reference, stats) -> dx                           records dx
    octavo::inspect_rows (x, parts of its codes, stats, recipe) -> codes    records x that is gathered as codes

Collectives of a layer that is split over ranks are outside of the four: x has been gathered, and y and dx are this
rank's terms of sums. The float32 reference has the same tensors, or the values of x that was gathered as codes, and
nothing more is sent.

The link carries nothing forward. Its gradient is the float32 reference's dx, which so arrives where the layer's dx
does. Eager calls, graphs and captures run the same operators. Their writes to `stats` are not declared, as those of
`octavo::run_bwd` are not: two microbatches may be in flight. An operator returns a copy, since it may not return its
input.

The call is `digest|layer|presence|recorded|config`, as of `octavo.runtime.graph_nodes`, with the seed of rounding as a
last tensor; `recorded` is "x" if inspect_rows has recorded it."""

import copy
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from octavo._torch.tracing import while_tracing
from octavo.communication.tensor_parallel import Parallel
from octavo.inspection.measure import Call, record_input_gradient, record_rows
from octavo.ops.operation import WATCHED
from octavo.ops.quantized import SEED, Quantized
from octavo.quant import GradientCodes, QTensor
from octavo.recipes.ambient import ambient
from octavo.runtime.call import Stage
from octavo.runtime.contract import LAYERS, pack
from octavo.runtime.digest import DIGEST

STATS = "inspection_stats"  # the hidden buffer


class Switch:
    """The state of a block, which its layers share, and copies of them that are made in it."""

    def __init__(self) -> None:
        self.inside = False  # whether the block is entered: layers then run by themselves
        self.on = False  # whether they record, too
        self.layers: weakref.WeakSet[Quantized] = weakref.WeakSet()  # the model may lose one in the block

    def end(self) -> None:
        """Make all layers as they were outside of the block."""
        self.inside = self.on = False
        for layer in list(self.layers):
            restore(layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Switch":
        return self


OFF = Switch()  # of a layer that is in no block


class Inspected(Quantized):
    """The node of a layer that is inspected. `inspected_class` puts it in front of the layer's own class. The block may
    end in another thread while one of these methods runs, and `self` then has its own class again: each asks for the
    block's switch, its buffer and its own methods once, by functions that stand that."""

    def why_not_fusible(self, x: Any) -> str:
        own: str = _own(self, "why_not_fusible")(x)
        return WATCHED if _switch(self).inside else own

    def _call_lookup(self, needs_dx: bool, extra_inputs: tuple[Any, ...]) -> None:
        """Keep the call out of the call cache: `_run_node` records its tensors."""

    def _split_over_ranks(self) -> Parallel | None:
        parallel: Parallel | None = _own(self, "_split_over_ranks")()
        if parallel is None or not parallel.gather_again or not _switch(self).inside:
            return parallel
        return parallel._replace(gather_again=False)  # backward measures dw from x's codes of all ranks, too

    def _dy_cast(self, stage: Stage, parallel: Parallel) -> Any:
        """Have values of dy gathered in the block, which measures them."""
        return None if _switch(self).inside else _own(self, "_dy_cast")(stage, parallel)

    def _run_node(self, stage: Stage, x: Any, as_nodes: bool, shape: tuple[int, ...] | None = None) -> Any:
        run, stats = _own(self, "_run_node"), self._hidden._buffers.get(STATS)
        records = _switch(self).on and stats is not None
        if not records or any([type(buffer) is GradientCodes for buffer in stage.buffers]):
            return run(stage, x, as_nodes, shape)
        link = None
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            x, link = torch.ops.octavo.inspect_x(x, stats)
        made = run(stage, x, as_nodes, shape)
        tensors: list[Tensor] = []
        takes_codes, returns_codes, recipe = _settings(stage.name, stage.key)
        parallel = self._split_over_ranks()
        gathers = parallel is not None and parallel.mode == "column" and parallel.sequence
        presence = _packed(self, stage, x, tensors)
        call = DIGEST + "|" + stage.name + "|" + presence + "|" + ("x" if gathers and takes_codes else "") + "|"
        if not torch.compiler.is_compiling() and _switch(self).inside:
            self.__dict__["inspected_recipe"] = recipe
        y = self._quantized_output(made, made[0]).dequantize() if returns_codes else made[0]  # type: ignore[operator]
        return torch.ops.octavo.inspect_y(y, link, [t.detach() for t in tensors], stats, call + stage.key), *made[1:]

    def _note_rows(self, x: Tensor, codes: QTensor) -> None:
        stats = self._hidden._buffers.get(STATS)
        if not _switch(self).on or stats is None:
            return
        recipe = self._recipe or self._followed(ambient.recipe)
        parts = [t.view(torch.uint8) if t is codes.codes else t for t in codes.tensors()]
        torch.ops.octavo.inspect_rows(x, parts, stats, recipe.key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantized:
        """Copy the layer into the block, whose end makes the copy as it was outside, too."""
        new: Quantized = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(_own(self, "__getstate__")(), memo))
        switch = _switch(new)
        switch.layers.add(new)
        if not switch.inside:  # it ended meanwhile
            restore(new)
        return new

    def _tear_down(self) -> None:
        super()._tear_down()
        _forget(self)  # `octavo.revert` gives the layer another class

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer as it is outside of the block."""
        kind = vars(type(self)).get("_inspected_class")
        if kind is None:  # a class was made from that of the block
            return super().__reduce_ex__(protocol)
        plain = kind.__new__(kind)
        vars(plain).update(vars(self))
        vars(plain)["_hidden"] = self._hidden.copy()
        _forget(plain)
        make, *rest = plain.__reduce_ex__(protocol)
        return object.__new__ if make.__name__ == "__newobj__" else make, *rest  # by which pickle makes its own class


def restore(layer: Quantized) -> None:
    """Make a layer as it was outside of the block. One that has got another class in the block keeps that: a class that
    was made from the block's runs as ever."""
    kind = vars(type(layer)).get("_inspected_class")
    if kind is not None:
        layer.__class__ = kind
    _forget(layer)


def _forget(layer: Quantized) -> None:
    if "_hidden" in vars(layer):  # `octavo.revert` may have made the layer a plain one
        layer._hidden.drop([STATS])
    for name in ("inspection", "inspected_recipe"):
        vars(layer).pop(name, None)


def _switch(layer: Any) -> Switch:
    """Return the switch of the block that a layer is in."""
    return getattr(layer, "inspection", OFF)


def is_inspected(layer: Any) -> bool:
    """Return whether a layer is in a block that is entered."""
    return _switch(layer).inside


def _own(layer: Any, name: str) -> Any:
    """Return a method of the layer's own class."""
    try:
        return getattr(super(Inspected, layer), name)
    except TypeError:  # the block has ended: the layer has its class again
        return getattr(layer, name)


@while_tracing
def _settings(name: str, key: str) -> tuple[bool, bool, str]:
    """Return whether a call takes x as codes, whether it returns y as codes, and its recipe."""
    config = LAYERS[name].config(key)
    return config.x == "codes", getattr(config, "quantize_output", False), config.recipe.key


def _packed(layer: Any, stage: Stage, x: Any, tensors: list[Tensor]) -> str:
    """Add the call's tensors to a list, without those that it writes to, and return which there are."""
    fields = [x if isinstance(x, Tensor) else None, *stage.inputs]
    for place, name in enumerate(layer.LAYER.Inputs._fields):
        if name == "running_amaxes":
            fields[place] = ()
        elif name == "out":
            fields[place] = None
    return pack([*fields, layer._hidden._buffers.get(SEED)], tensors)


@cache
def inspected_class(kind: Any) -> Any:
    """Return the class of a layer while it is inspected; it has the name of the layer's own."""
    return type(kind.__name__, (Inspected, kind), {"__module__": Inspected.__module__, "_inspected_class": kind})


# -- operators ---------------------------------------------------------------------------------------------------------


def _link(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.float32, device=x.device).expand(x.shape)


@torch.library.custom_op("octavo::inspect_x", mutates_args=())
def _inspect_x(x: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), _link(x)


@torch.library.custom_op("octavo::inspect_rows", mutates_args=())
def _inspect_rows(x: Tensor, parts: list[Tensor], stats: Tensor, recipe: str) -> Tensor:
    record_rows(stats, x, parts, recipe)
    return parts[0].clone()


@torch.library.custom_op("octavo::inspect_dx", mutates_args=())
def _inspect_dx(dx: Tensor, exact: Tensor, stats: Tensor) -> Tensor:
    record_input_gradient(stats, dx, exact)
    return dx.clone()


@torch.library.custom_op("octavo::inspect_y", mutates_args=())
def _inspect_y(y: Tensor, link: Tensor | None, tensors: list[Tensor], stats: Tensor, call: str) -> Tensor:
    Call.of(call, tensors).record_forward(stats, y)
    return y.clone()


@torch.library.custom_op("octavo::inspect_dy", mutates_args=())
def _inspect_dy(dy: Tensor, tensors: list[Tensor], stats: Tensor, call: str, like: list[int]) -> tuple[Tensor, Tensor]:
    dx = Call.of(call, tensors).record_backward(stats, dy)
    found = torch.empty(0, dtype=torch.float32, device=dy.device) if dx is None or not like else dx.reshape(like)
    return dy.clone(), found


@_inspect_dy.register_fake
def _(dy: Tensor, tensors: list[Tensor], stats: Tensor, call: str, like: list[int]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dy), torch.empty(like or (0,), dtype=torch.float32, device=dy.device)


_inspect_x.register_fake(lambda x, stats: (x.clone(), _link(x)))
_inspect_rows.register_fake(lambda x, parts, stats, recipe: torch.empty_like(parts[0]))
_inspect_dx.register_fake(lambda dx, exact, stats: torch.empty_like(dx))
_inspect_y.register_fake(lambda y, link, tensors, stats, call: torch.empty_like(y))


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
