"""Tensor and sequence parallelism of a Linear: the collectives around its one node each way.

    column   w [N/P, K]   x is the same on all ranks, or under sequence parallelism each rank has a part of its rows
                          (dim 0), which are gathered: as codes where the recipe allows it. dx is summed, or scattered.
    row      w [N, K/P]   each rank has a part of x's features. y is summed, or scattered, and then the bias is added.

Scales of whole tensors (fp8-current, nvfp4, the first step of fp8-delayed) follow from amaxes that the ranks agree on,
so that x and w have the codes that one process would give them.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.tracing import while_tracing
from octavo.communication import collectives, shared_rows
from octavo.communication.all_reduced_amaxes import WHOLE, scales_whole
from octavo.communication.amax_reduction import largest_of
from octavo.communication.groups import name_of, rank_of, size_of
from octavo.communication.shared_rows import SharedRows
from octavo.errors import UnsupportedConfig, UnsupportedShape, check_choice
from octavo.quant.qtensor import Parts, QTensor
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve
from octavo.recipes.ambient import process
from octavo.runtime.call import Stage, call
from octavo.runtime.modified import refuse_modified

MODES = ("column", "row")
COLUMN_BLOCKS = "octavo_column_blocks"  # in eager mode, an attribute of y of a layer whose output features are split
SPLIT = "its weight is split over ranks, and a collective stands between it and its neighbours"  # why it joins no run


class Parallel(NamedTuple):
    """How a layer's weight is split over the ranks of a group."""

    mode: str  # "column": its output features; "row": its input features
    sequence: bool  # outside of a pair of layers, each rank has a part of the rows
    group: str  # its name
    gather_again: bool = False  # backward gathers x's codes again, rather than keep those of all ranks
    blocks: int = 1  # of output features, each of which is split: two for the halves of a gated activation
    row_codes_only: bool = False  # column codes follow from gathered row codes
    ranks: int = 1  # of the group when the layer was made: the weight is the part of one of so many

    def size(self) -> int:
        """Return the number of ranks, a constant where a compiler traces. Raise if the layer was made for another
        number."""
        return _size_now(self.group, self.ranks, self.mode)

    def describe(self) -> str:
        """Return the settings, as a layer prints them."""
        group = f", tp_group={self.group!r}" if self.group else ""
        return f"parallel_mode={self.mode!r}, sequence_parallel={self.sequence}{group}"


def parallel_of(
    title: str, parallel_mode: str | None, sequence_parallel: bool, tp_group: Any, gather_again: bool = False,
    blocks: int = 1, row_codes_only: bool = False,
) -> Parallel | None:  # fmt: skip
    """Return the settings of a layer; None if it is not parallel."""
    if type(blocks) is not int or blocks < 1:
        raise UnsupportedConfig(
            f"{title}(column_blocks={blocks!r}) is an int from 1 up: how many blocks of output features are split each "
            "by itself."
        )
    if gather_again and not (parallel_mode == "column" and sequence_parallel):
        raise UnsupportedConfig(
            f"{title}(gather_again=True) is for a column layer with sequence_parallel=True, which gathers x, and this "
            f"layer has parallel_mode={parallel_mode!r} and sequence_parallel={sequence_parallel!r}. Leave it out."
        )
    if row_codes_only and (gather_again or not sequence_parallel):
        raise UnsupportedConfig(
            f"{title}(row_codes_only=True) is for sequence_parallel=True without gather_again, where rows are gathered "
            f"once, and this layer has sequence_parallel={sequence_parallel!r}, gather_again={gather_again!r}. Leave "
            "one of them out."
        )
    if parallel_mode is None:
        for name, value in (("sequence_parallel", sequence_parallel), ("tp_group", tp_group)):
            if value not in (None, False):
                raise UnsupportedConfig(
                    f"{title}({name}=...) says how a parallel layer works, and parallel_mode is None. Pass "
                    "parallel_mode='column' or 'row' too."
                )
        return None
    check_choice(parallel_mode, MODES, what=f"{title}.parallel_mode")
    check_choice(sequence_parallel, (False, True), what=f"{title}.sequence_parallel")
    group = name_of(tp_group)
    return Parallel(parallel_mode, sequence_parallel, group, gather_again, blocks, row_codes_only, size_of(group))


@while_tracing
def _size_now(group: str, ranks: int, mode: str) -> int:
    size = size_of(group)
    if size == ranks:
        return size
    which = f"the process group {group!r}" if group else "the default process group"
    made_for = "1 rank" if ranks == 1 else f"{ranks} ranks"
    raise UnsupportedConfig(
        f"A layer with parallel_mode={mode!r} was made for {made_for} of {which}, which has {size} now, and its weight "
        "is a part for the former. Call torch.distributed.init_process_group before you make the layer, and "
        "destroy_process_group after its last call. A Linear whose weight is the part of a rank of another group takes "
        "that by set_tensor_parallel_group."
    )


def local_sizes(title: str, parallel: Parallel | None, in_features: int, out_features: int) -> tuple[int, int]:
    """Return the sizes of this rank's part of a weight."""
    size = 1 if parallel is None else size_of(parallel.group)
    if parallel is None or size == 1:
        return in_features, out_features
    name, features = ("out", out_features) if parallel.mode == "column" else ("in", in_features)
    blocks = parallel.blocks if parallel.mode == "column" else 1
    if features % (size * blocks):
        each = f"each of the {blocks} blocks of its" if blocks > 1 else "its"
        raise UnsupportedShape(
            f"{title}(parallel_mode={parallel.mode!r}) gives each rank an equal part of {each} {name}_features, and "
            f"{features} do not divide by the {size} ranks of the group. Pad {name}_features to a multiple of "
            f"{size * blocks}."
        )
    part = features // size
    return (in_features, part) if parallel.mode == "column" else (part, out_features)


def groups_of_rank(group: str, number: int) -> range:
    """Return which of `number` groups of rows this rank has: equally many on each."""
    size, rank = size_of(group), rank_of(group)
    if number % size:
        raise UnsupportedShape(
            f"GroupedLinear(ep_group=...) gives each rank equally many groups, and {number} do not divide by the "
            f"{size} ranks. Change num_groups, or the ranks of the group."
        )
    return range(rank * (number // size), (rank + 1) * (number // size))


def own_part(whole: Tensor, parallel: Parallel, dim: int) -> Tensor:
    """Return this rank's part of a tensor along a dim: of each block of output features, where there are several."""
    size, rank = size_of(parallel.group), rank_of(parallel.group)
    blocks = whole.chunk(parallel.blocks if parallel.mode == "column" else 1, dim)
    return torch.cat([block.chunk(size, dim)[rank] for block in blocks], dim)


def mark_blocks(y: Any, parallel: Parallel) -> None:
    """Note on y of a column layer which features it has, for operations that the program calls by themselves. Nothing
    but eager mode keeps attributes of a tensor."""
    if type(y) is Tensor and not torch.compiler.is_compiling():
        setattr(y, COLUMN_BLOCKS, parallel.blocks)


def check_blocks(layer: Any, x: Any) -> None:
    """Raise if x is marked as features that a layer does not take."""
    if not torch.compiler.is_compiling():
        layer.op_column_blocks(getattr(x, COLUMN_BLOCKS, 0))


# -- x ----------------------------------------------------------------------------------------------------------------


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


def size_of_mesh(mesh: Any, what: str) -> int:
    """Return the number of ranks of a mesh, which must have one dim."""
    if mesh.ndim != 1:
        raise UnsupportedConfig(
            f"{what} takes a DeviceMesh of one dim, got one of {mesh.ndim}, named {mesh.mesh_dim_names}. Pass one of "
            "its dims: mesh['tp']."
        )
    return int(mesh.size())


def summed_gradient(x: Any, group: str, where: str) -> Any:
    """Return x, a tensor or codes, whose gradient is summed over ranks."""
    if type(x) is not QTensor:
        return collectives.copy(x, group, where)
    assert x.anchor is not None
    anchor = collectives.copy(x.anchor, group, where)
    return QTensor(x.codes, x.scale, x.spec, x.shape, x.dtype, x.global_scale, anchor=anchor)


def gathered(
    layer: Any, parallel: Parallel, recipe: Recipe, x: Tensor, source: Any, trains: bool, as_nodes: bool
) -> SharedRows:
    """Return the rows of all ranks, values or codes, as siblings of the layer share them. `source` is x as the program
    passed it."""
    collectives.check_rows(x.shape, layer._name_for_collectives())
    if torch.compiler.is_compiling():
        return _gather(layer, parallel, recipe, x, trains, as_nodes)
    scaling, delayed = layer._scaling, recipe.stateful
    measures, observes = delayed and scaling.uncalibrated.x, _observes(layer, recipe)
    key = (
        parallel.group, parallel.gather_again, parallel.row_codes_only, recipe.key, x.dtype, trains, measures, observes,
        as_nodes, x.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip
    found = shared_rows.find(layer, source, key)
    if found is None:
        return shared_rows.share(layer, source, key, _gather(layer, parallel, recipe, x, trains, as_nodes))
    if measures:
        scaling.measures(True, False, False)
    if found.amax is not None:
        _raise(scaling.of_call(layer, measures, True)[1][0], found.amax)
    if found.own is not None:
        layer._rows_to_gather(x.detach(), found.own)
    return found


def _gather(layer: Any, parallel: Parallel, recipe: Recipe, x: Tensor, trains: bool, as_nodes: bool) -> SharedRows:
    """Return the rows of all ranks, and a context for the call with them."""
    size, where = parallel.size(), layer._name_for_collectives()
    rows = math.prod(x.shape[:-1])
    ranks = size, parallel.group, where
    again = parallel.gather_again and not as_nodes and trains
    if why_values(recipe, trains, rows, parallel.row_codes_only):
        values = collectives.all_gather(x, *ranks)
        if not again or recipe.linear().wgrad.mode != "high_precision":  # the layer saves no values
            return SharedRows(values)
        return SharedRows(values, again=GatherAgain(_values_again(x.detach(), values, *ranks)))
    has_columns = gather_plan(recipe.key, trains).has_columns
    own_columns = has_columns and not parallel.row_codes_only
    row_parts, column_parts, amax = _cast(layer, parallel, recipe, x.detach(), own_columns, as_nodes)
    quant = recipe.linear()
    assert quant.fprop.left is not None
    q = layer._rows_to_gather(x.detach(), quant.fprop.left.assemble(row_parts, tuple(x.shape), x.dtype))
    anchor = x if x.requires_grad and torch.is_grad_enabled() else None  # what is gathered is a gradient anchor of it
    own = QTensor(q.codes, q.scale, q.spec, q.shape, q.dtype, q.global_scale, anchor=anchor)
    whole = collectives.gather_codes(own, *ranks)
    if not has_columns:
        again_context = GatherAgain(_rows_again(q, whole, *ranks)) if again else None
        return SharedRows(whole, (), again_context, q, amax)
    if not own_columns:
        return SharedRows(whole, _columns_of(layer, parallel, recipe, whole, as_nodes), own=q, amax=amax)
    spec = quant.wgrad.right
    assert spec is not None
    if again:  # the layer saves this rank's codes, which backward replaces by those of all ranks
        return SharedRows(whole, column_parts, GatherAgain(_columns_again(column_parts, spec, *ranks)), q, amax)
    return SharedRows(whole, gather_columns(column_parts, spec, *ranks), own=q, amax=amax)


def _columns_of(layer: Any, parallel: Parallel, recipe: Recipe, whole: QTensor, as_nodes: bool) -> Parts:
    """Return column codes of the rows of all ranks, from the values of their row codes."""
    rows = QTensor(whole.codes, whole.scale, whole.spec, whole.shape, whole.dtype, whole.global_scale)
    return _cast(layer, parallel, recipe, rows.dequantize(), True, as_nodes)[1]


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


def _cast(
    layer: Any, parallel: Parallel, recipe: Recipe, x: Tensor, has_columns: bool, as_nodes: bool
) -> tuple[Parts, Parts, Tensor | None]:
    """Cast this rank's rows. Return the tensors of row codes and of column codes, and in eager mode the amax that
    fp8-delayed observes."""
    scaling, delayed = layer._scaling, recipe.stateful
    observe = _observes(layer, recipe)
    measures = delayed and any(scaling.uncalibrated) and scaling.measures(True, False, False).x
    quant = recipe.linear()
    row, column = quant.fprop.left, quant.wgrad.right if has_columns else None
    assert row is not None
    each = column if column is not None and column.block == (1, None) else None
    all_reduced: Parts = ()
    columns: Parts = ()
    whole = [spec if scales_whole(spec) and (not delayed or measures) else None for spec in (row, column)]
    if each is not None or any([spec is not None for spec in whole]):
        found = largest_of(layer, parallel.group, (*whole, None, None), x, x, as_nodes, each=each)
        all_reduced = (found[0:1], found[1:2]) if any([spec is not None for spec in whole]) else ()
        columns = (found[4:].view(-1, 1),) if each is not None else ()
    key = f"shard-cast(recipe={recipe.key},has_columns={has_columns},observe={observe},measures_x={measures})"
    scales: Parts = ()
    amaxes: Parts = ()
    if delayed:
        scales, amaxes = scaling.of_call(layer, measures, observe)
    amax: Tensor | None = None
    if observe and not torch.compiler.is_compiling():  # the running amax has those of earlier calls too
        running, amax = amaxes[0], torch.zeros_like(amaxes[0])
        amaxes = amax, amaxes[1]
    _, *parts = call(Stage("shard-cast", key, (scales, amaxes, all_reduced, columns), (), False), x, as_nodes)
    if amax is not None:
        _raise(running, amax)
    number = 3 if row.two_level else 2
    return tuple(parts[:number]), tuple(parts[number:]) if has_columns else (), amax


def _observes(layer: Any, recipe: Recipe) -> bool:
    """Return whether a call raises the running amaxes of fp8-delayed."""
    return bool(recipe.stateful and layer.training and torch.is_grad_enabled() and not process.dry)


def _raise(running: Tensor, amax: Tensor) -> None:
    """Raise a running amax to an amax."""
    with preserve_version_counter(running):
        torch.maximum(running, amax, out=running)


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


# -- checks ------------------------------------------------------------------------------------------------------------


def check_rows(x: Any, where: str) -> None:
    """Refuse an x without rows under sequence parallelism, where ranks have parts of them."""
    if len(x.shape) < 2:
        raise UnsupportedShape(
            f"{where} with sequence_parallel=True takes x [rows, ..., features], of two dims or more, got "
            f"{tuple(x.shape)}: the first dim is split over ranks. Pass x[None], or leave sequence_parallel out."
        )
