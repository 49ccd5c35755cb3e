"""Tensor and sequence parallelism of a Linear: the collectives around its one node each way.

    column   w [N/P, K]   x is the same on all ranks, or under sequence parallelism each rank has a part of its rows
                          (dim 0), which are gathered: as codes where the recipe allows it. dx is summed, or scattered.
    row      w [N, K/P]   each rank has a part of x's features. y is summed, or scattered, and then the bias is added.

Scales of whole tensors (fp8-current, nvfp4, the first step of fp8-delayed) follow from amaxes that the ranks agree on,
so that x and w have the codes that one process would give them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.tracing import while_tracing
from octavo.communication import collectives
from octavo.communication.groups import name_of, rank_of, size_of
from octavo.errors import UnsupportedConfig, UnsupportedShape, check_choice
from octavo.quant.qtensor import QTensor

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


# -- checks ------------------------------------------------------------------------------------------------------------


def check_rows(x: Any, where: str) -> None:
    """Refuse an x without rows under sequence parallelism, where ranks have parts of them."""
    if len(x.shape) < 2:
        raise UnsupportedShape(
            f"{where} with sequence_parallel=True takes x [rows, ..., features], of two dims or more, got "
            f"{tuple(x.shape)}: the first dim is split over ranks. Pass x[None], or leave sequence_parallel out."
        )
