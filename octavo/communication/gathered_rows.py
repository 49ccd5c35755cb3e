"""Rows of x that a column layer gathers from all ranks: as codes, if these are the ones that one process would compute.

A rank casts its own rows, and sends codes and scales. Otherwise it sends values.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.tracing import functional_mode, in_graph, pairs_ended, while_tracing
from octavo.communication import collectives, shared_rows
from octavo.communication.all_reduced_amaxes import WHOLE, scales_whole
from octavo.communication.amax_reduction import largest_of
from octavo.communication.shared_rows import SharedRows
from octavo.communication.tensor_parallel import Parallel, summed_gradient
from octavo.quant.qtensor import Parts, QTensor
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve
from octavo.recipes.ambient import process
from octavo.runtime.call import Stage
from octavo.runtime.call import call as run_call
from octavo.runtime.modified import refuse_modified
from octavo.scaling.delayed_scaling import raise_amax


class GatherPlan(NamedTuple):
    """How the rows of x are gathered."""

    why_values: str  # rather than codes; empty if codes
    heights: tuple[int, ...]  # the rows of a rank must fill blocks of so many, which share a scale
    has_columns: bool  # whether dw needs x's column codes: where one scale covers x, row codes are transposed


@lru_cache(maxsize=256)
def _gather_plan(recipe_key: str, trains: bool) -> GatherPlan:
    quant = resolve(recipe_key).linear()
    row, column = quant.fprop.left, quant.wgrad.right
    if row is None:
        return GatherPlan(f"{recipe_key} does not quantize x in fprop", (), False)
    if not row.shipped or (column is not None and not column.shipped):
        return GatherPlan("a quantizer is not Octavo's own", (), False)
    if trains and quant.wgrad.mode == "high_precision":
        return GatherPlan("dw takes x unquantized", (), False)
    has_columns = trains and column is not None and not (row == column and row.block == WHOLE)
    heights = (row.block[0], column.block[1] if has_columns and column is not None else None)
    return GatherPlan("", tuple([height for height in heights if height not in (None, 1)]), has_columns)


def describe_communication(parallel: Parallel, recipe: Recipe) -> str:
    """Return what a layer that is split sends when it trains, in words."""
    title = f"its {'output' if parallel.mode == 'column' else 'input'} features are split over {parallel.size()} ranks"
    if not parallel.sequence:
        return f"{title}; {'dx' if parallel.mode == 'column' else 'y'} is summed over them"
    if parallel.mode == "row":
        return f"{title}; y is summed, and its rows are scattered"
    plan = _gather_plan(recipe.key, True)
    if plan.why_values:
        return f"{title}; rows of x are gathered as values: {plan.why_values}"
    blocks = f", or as values where those of a rank do not fill blocks of {max(plan.heights)}" if plan.heights else ""
    return f"{title}; rows of x are gathered as codes{blocks}"


@while_tracing
def _gather_plan_now(recipe_key: str, trains: bool) -> tuple[Any, ...]:
    return tuple(_gather_plan(recipe_key, trains))


def gather_plan(recipe_key: str, trains: bool) -> GatherPlan:
    """Return how the rows of x are gathered in a recipe; `trains` says whether dw is wanted. Gathered codes must be
    those that one process gives to all rows."""
    return GatherPlan(*_gather_plan_now(recipe_key, trains))


def why_values(recipe: Recipe, trains: bool, rows: int, row_codes_only: bool = False) -> str:
    """Return why a rank's rows of x are gathered as values rather than codes; empty if as codes."""
    plan = gather_plan(recipe.key, trains)
    for height in gather_plan(recipe.key, False).heights if row_codes_only else plan.heights:
        if rows % height:
            return f"the rows of a rank do not fill blocks of {height}, which share a scale"
    return plan.why_values


class Gather(NamedTuple):
    """How a call gathers the rows of x: plain values, which a graph holds."""

    recipe: str
    size: int  # the number of ranks
    group: str
    where: str  # the name of the layer
    again: bool  # backward gathers once more
    row_codes_only: bool
    sends_values: bool  # rather than codes
    has_columns: bool  # column codes besides row codes
    trains: bool
    needs_dx: bool
    measures: bool = False  # fp8-delayed: until a step has seen an amax of x
    observes: bool = False  # fp8-delayed: the running amax of x is raised
    as_nodes: bool = False

    @property
    def ranks(self) -> tuple[int, str, str]:
        return self.size, self.group, self.where

    @property
    def row(self) -> Quantizer:
        """The quantizer of x by row."""
        spec = resolve(self.recipe).linear().fprop.left
        assert spec is not None
        return spec


def gathered(
    layer: Any, weight: Tensor, parallel: Parallel, recipe: Recipe, x: Tensor, source: Any, trains: bool,
    as_nodes: bool,
) -> SharedRows:  # fmt: skip
    """Return the rows of all ranks, values or codes, as siblings of the layer share them. `source` is x as the program
    passed it; in a graph the layer is known by its `weight`."""
    where, size = layer._name_for_collectives(), parallel.size()
    collectives.check_rows(x.shape, where)
    sends_values = bool(why_values(recipe, trains, math.prod(x.shape[:-1]), parallel.row_codes_only))
    scaling, delayed = layer._scaling, recipe.stateful and not sends_values
    measures, observes = delayed and scaling.uncalibrated.x, delayed and _observes(layer, recipe)
    call = Gather(
        recipe.key, size, parallel.group, where, parallel.gather_again and not as_nodes and trains,
        parallel.row_codes_only, sends_values, gather_plan(recipe.key, trains).has_columns and not sends_values, trains,
        x.requires_grad and torch.is_grad_enabled(), measures, observes, as_nodes,
    )  # fmt: skip
    if measures:
        scaling.measures(True, False, False)
    state: tuple[Parts, Parts] = scaling.of_call(layer, measures, observes) if delayed else ((), ())
    if torch.compiler.is_compiling():
        shares = type(source) is Tensor
        tensors = _rows_in_graph(shares, pairs_ended(), source if shares else x, weight, x, *state, *call)
        rows = _unpacked(recipe, call, x, tensors)
    else:
        rows = _shared(layer, source, (call._replace(where=""), x.dtype), lambda: _gather(call, x, state[0]))
        if rows.amax is not None:
            raise_amax(state[1][0], rows.amax)
    if rows.own is not None:
        layer._note_rows(x.detach(), rows.own)
    return rows


def rows_of_all(layer: Any, weight: Tensor, parallel: Parallel, x: Any, source: Any) -> SharedRows:
    """Return x, a tensor or codes, which all ranks have, for siblings that share the sum of its gradient over ranks."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return SharedRows(x)
    group, where = parallel.group, layer._name_for_collectives()
    if torch.compiler.is_compiling() and type(source) is Tensor:
        return SharedRows(_copy_in_graph(pairs_ended(), source, weight, x, group, where)[0])
    return _shared(layer, source, _copy_key(group, x), lambda: SharedRows(summed_gradient(x, group, where)))


def _copy_key(group: str, x: Any) -> tuple[Any, ...]:
    return "the same on all ranks", group, x.dtype


def _shared(layer: Any, source: Any, key: tuple[Any, ...], make: Callable[[], SharedRows]) -> SharedRows:
    """Return the rows that a sibling has made, or make them."""
    found = shared_rows.find(layer, source, key)
    return shared_rows.share(layer, source, key, make()) if found is None else found


@in_graph
def _copy_in_graph(ended: int, source: Tensor, weight: Tensor, x: Tensor, group: str, where: str) -> Parts:
    """Return x of `rows_of_all` in a graph, where siblings share it while AOTAutograd traces."""
    if functional_mode() is None:
        return (collectives.copy(x, group, where),)
    key = *_copy_key(group, x), ended
    return (_shared(weight, source, key, lambda: SharedRows(collectives.copy(x, group, where))).x,)


@in_graph
def _rows_in_graph(
    shares: bool, ended: int, source: Tensor, weight: Tensor, x: Tensor, scales: Parts, amaxes: Parts, *settings: Any
) -> Parts:
    """Return the rows as tensors, which siblings share while AOTAutograd traces: their codes, those of this rank's
    rows, an anchor and column codes. `ended` is the number of pairs before."""
    call = Gather(*settings)
    if shares and functional_mode() is not None:
        key = call._replace(where=""), x.dtype, ended
        rows = _shared(weight, source, key, lambda: _gather(call, x, scales))
    else:
        rows = _gather(call, x, scales)
    if call.sends_values:
        return (rows.x,)
    whole, own = rows.x, rows.own
    assert own is not None
    anchor = () if whole.anchor is None else (whole.anchor,)
    codes, scale, *more = whole.tensors()
    if rows.amax is not None:
        stage = Stage("raise-amax", "raise-amax", (rows.amax, amaxes[0]), (), False)
        scale = run_call(stage, scale, call.as_nodes)[0]
    return codes, scale, *more, *own.tensors(), *anchor, *rows.columns


def _unpacked(recipe: Recipe, call: Gather, x: Tensor, tensors: Parts) -> SharedRows:
    """Return the rows whose tensors these are; x is this rank's part."""
    if call.sends_values:
        return SharedRows(tensors[0])
    spec = recipe.linear().fprop.left
    assert spec is not None
    number = 3 if spec.two_level else 2
    whole, rest = tensors[:number], tensors[2 * number :]
    anchor = rest[0] if call.needs_dx else None
    shape = call.size * x.shape[0], *x.shape[1:]
    q = spec.assemble(whole, shape, x.dtype)
    q = QTensor(q.codes, q.scale, spec, shape, x.dtype, q.global_scale, anchor)
    own = spec.assemble(tensors[number : 2 * number], tuple(x.shape), x.dtype)
    return SharedRows(q, rest[1:] if call.needs_dx else rest, own=own)


def _gather(call: Gather, x: Tensor, scales: Parts) -> SharedRows:
    """Return the rows of all ranks, and a context for the call with them. `scales` are the layer's in fp8-delayed."""
    recipe, ranks = resolve(call.recipe), call.ranks
    if call.sends_values:
        values = collectives.all_gather(x, *ranks)
        if not call.again or recipe.linear().wgrad.mode != "high_precision":  # the layer saves no values
            return SharedRows(values)
        return SharedRows(values, again=GatherAgain(_values_again(x.detach(), values, *ranks)))
    own_columns = call.has_columns and not call.row_codes_only
    row_parts, column_parts, amax = _cast(call, x.detach(), own_columns, scales)
    q = call.row.assemble(row_parts, tuple(x.shape), x.dtype)
    anchor = x if call.needs_dx else None  # what is gathered is a gradient anchor of it
    own = QTensor(q.codes, q.scale, q.spec, q.shape, q.dtype, q.global_scale, anchor=anchor)
    whole = collectives.gather_codes(own, *ranks)
    if not call.has_columns:
        again = GatherAgain(_rows_again(q, whole, *ranks)) if call.again else None
        return SharedRows(whole, (), again, q, amax)
    if not own_columns:
        return SharedRows(whole, _columns_of(call, whole, scales), own=q, amax=amax)
    spec = recipe.linear().wgrad.right
    assert spec is not None
    if call.again:  # the layer saves this rank's codes, which backward replaces by those of all ranks
        return SharedRows(whole, column_parts, GatherAgain(_columns_again(column_parts, spec, *ranks)), q, amax)
    return SharedRows(whole, gather_columns(column_parts, spec, *ranks), own=q, amax=amax)


def _columns_of(call: Gather, whole: QTensor, scales: Parts) -> Parts:
    """Return column codes of the rows of all ranks, from the values of their row codes."""
    rows = QTensor(whole.codes, whole.scale, whole.spec, whole.shape, whole.dtype, whole.global_scale)
    return _cast(call, rows.dequantize(), True, scales)[1]


Again = list[tuple[Tensor, Callable[[], Tensor]]]


def _values_again(own: Tensor, whole: Tensor, size: int, group: str, where: str) -> Again:
    """Return the rows of all ranks, and how to gather them from this rank's, which are the caller's memory."""
    version = own._version

    def rows() -> Tensor:
        if own._version != version:
            refuse_modified(where, "its x", version, own._version)
        return collectives.gather(own, size, group, where)

    return [(whole, rows)]


def _rows_again(own: QTensor, whole: QTensor, size: int, group: str, where: str) -> Again:
    """Return row codes of all ranks and their scales, and how to gather them from this rank's."""

    def codes() -> Tensor:
        return collectives.gather(own.codes.view(torch.uint8), size, group, where).view(own.codes.dtype)

    def scale() -> Tensor:
        if own.spec.block[0] is None:  # one scale for all rows, which the ranks have agreed on
            return own.scale
        return collectives.gathered_scales(own.scale, size, group, where)

    return [(whole.codes, codes), (whole.scale, scale)]


def _columns_again(own: Parts, spec: Quantizer, size: int, group: str, where: str) -> Again:
    """Return this rank's column codes and their scales, and how to gather those of all ranks."""
    return [
        (own[0], lambda: gather_column_codes(own[0], size, group, where)),
        (own[1], lambda: gather_column_scale(own[1], spec, size, group, where)),
    ]


def gather_columns(parts: Parts, spec: Quantizer, size: int, group: str, where: str) -> Parts:
    """Return column codes [K, tokens of all ranks] and their scales, from those of this rank's tokens."""
    codes, scale, *rest = parts
    return gather_column_codes(codes, size, group, where), gather_column_scale(scale, spec, size, group, where), *rest


def gather_column_codes(codes: Tensor, size: int, group: str, where: str) -> Tensor:
    features, width = codes.shape
    many = collectives.gather(codes.view(torch.uint8), size, group, where).view(size, features, width)
    return many.transpose(0, 1).reshape(features, size * width).view(codes.dtype)


def gather_column_scale(scale: Tensor, spec: Quantizer, size: int, group: str, where: str) -> Tensor:
    if spec.block[1] is None:  # one scale for all tokens, which the ranks have agreed on
        return scale
    features, blocks = scale.shape
    flat = collectives.gather_bytes(scale.t(), size, group, where)  # a block of tokens after another
    return flat.as_strided((features, size * blocks), (1, max(features, 1)))


def _cast(call: Gather, x: Tensor, has_columns: bool, scales: Parts) -> tuple[Parts, Parts, Tensor | None]:
    """Cast this rank's rows. Return the tensors of row codes and of column codes, and the amax that fp8-delayed
    observes."""
    recipe = resolve(call.recipe)
    quant, delayed = recipe.linear(), recipe.stateful
    row, column = call.row, quant.wgrad.right if has_columns else None
    each = column if column is not None and column.block == (1, None) else None
    all_reduced: Parts = ()
    columns: Parts = ()
    whole = [spec if scales_whole(spec) and (not delayed or call.measures) else None for spec in (row, column)]
    if each is not None or any([spec is not None for spec in whole]):
        found = largest_of(call.where, call.group, (*whole, None, None), x, x, call.as_nodes, each=each)
        all_reduced = (found[0:1], found[1:2]) if any([spec is not None for spec in whole]) else ()
        columns = (found[4:].view(-1, 1),) if each is not None else ()
    key = (
        f"shard-cast(recipe={recipe.key},has_columns={has_columns},observe={call.observes},measures_x={call.measures})"
    )
    stage = Stage("shard-cast", key, (scales, all_reduced, columns), (), False)
    _, *parts = run_call(stage, x, call.as_nodes)
    amax = parts.pop() if call.observes else None
    number = 3 if row.two_level else 2
    return tuple(parts[:number]), tuple(parts[number:]) if has_columns else (), amax


def _observes(layer: Any, recipe: Recipe) -> bool:
    """Return whether a call raises the running amaxes of fp8-delayed."""
    return bool(recipe.stateful and layer.training and torch.is_grad_enabled() and not process.dry)


class GatherAgain(torch.autograd.graph.saved_tensors_hooks):
    """While a layer saves tensors for backward: drops those of all ranks, and gathers them when backward asks."""

    def __init__(self, again: Sequence[tuple[Tensor, Callable[[], Tensor]]]) -> None:
        """Take in `again` the tensors that are not to be kept, and for each a function that gathers it, or another one
        to take its place, from what this rank keeps."""
        places = {(t.data_ptr(), t.shape): place for place, (t, _) in enumerate(again)}
        gathers = [gather for _, gather in again]

        def pack(t: Tensor) -> Any:
            place = places.get((t.data_ptr(), t.shape))
            return t if place is None else place

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else gathers[kept]()

        super().__init__(pack, unpack)
