"""Collectives over a group, with gradients. Each waits for its result at once, and is a node beside those of layers.

They call torch's functional operators by name. Sums keep the dtype of the tensor; the caller has reduced it to bf16 or
not. `where` names the layer that waits: a collective that fails says who waited, for what and for whom.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from octavo._torch.autograd import mapped
from octavo._torch.functional_collectives import (
    all_gather_into_tensor,
    backend_name,
    reduce_scatter_tensor,
    wait_tensor,
)
from octavo._torch.functional_collectives import all_reduce as all_reduce_operator
from octavo._torch.tracing import while_tracing
from octavo.communication.groups import process_group, rank_of, registered_name, size_of
from octavo.errors import CollectiveFailed, UnsupportedConfig, UnsupportedShape
from octavo.quant.qtensor import Join, QTensor


def all_gather(x: Tensor, size: int, group: str, where: str) -> Tensor:
    """Concatenate the rows (dim 0) of all ranks. dx is the sum over ranks of dy's rows for this one."""
    check_rows(x.shape, where)
    return mapped(x, gather, scatter_sum, size, group, where)


def reduce_scatter(x: Tensor, size: int, group: str, where: str) -> Tensor:
    """Sum over ranks, and return this rank's part of the rows. dx is the gathered dy."""
    check_divides(x.shape, size, where)
    return mapped(x, scatter_sum, gather, size, group, where)


def all_reduce(x: Tensor, group: str, where: str) -> Tensor:
    """Sum over ranks. dx is dy: what follows is the same on all ranks."""
    return mapped(x, total, _same, group, where)


def copy(x: Tensor, group: str, where: str) -> Tensor:
    """Return x, the same on all ranks. dx is the sum over ranks of dy."""
    return mapped(x, _same, total, group, where)


def _same(x: Tensor, group: str, where: str) -> Tensor:
    return x.view_as(x)


def gather_codes(q: QTensor, size: int, group: str, where: str) -> QTensor:
    """Concatenate the rows of all ranks' codes and scales, bytes as they are. Each row must have scales of its own, or
    all ranks one scale; q's own serves then."""
    check_rows(q.shape, where)
    shape = (size * q.shape[0], *q.shape[1:])
    codes = gather(q.codes.view(torch.uint8), size, group, where)
    scale = q.scale if q.spec.block[0] is None else gathered_scales(q.scale, size, group, where)
    anchor = None if q.anchor is None else gather_anchor(q.anchor, size, group, where)
    return QTensor(codes.view(q.codes.dtype), scale, q.spec, shape, q.dtype, q.global_scale, anchor)


def gather_anchor(anchor: Tensor, size: int, group: str, where: str) -> Tensor:
    """Return the anchor of gathered codes, for that of this rank's: one element in the shape of all ranks' rows. Its
    gradient is reduced as that of `all_gather`."""
    return mapped(anchor, _wide_anchor, scatter_sum, size, group, where)


def _wide_anchor(anchor: Tensor, size: int, group: str, where: str) -> Tensor:
    return anchor.new_zeros(1).expand(size * anchor.shape[0], *anchor.shape[1:])


def joined(values: Tensor, anchor: Tensor) -> Tensor:
    """Return the values, whose gradient goes to the anchor."""
    found: Tensor = Join.apply(values, anchor)  # type: ignore[no-untyped-call]
    return found


def gathered_scales(scale: Tensor, size: int, group: str, where: str) -> Tensor:
    """Return scales [rows, blocks] of all ranks' rows, in the layout of one tensor's: rows are fastest where they
    were."""
    n, blocks = scale.shape
    rows = gather_bytes(scale, size, group, where).view(size * n, blocks)
    if scale.stride(0) == 1 and scale.stride(1) == max(n, 1):
        return rows.t().reshape(-1).as_strided((size * n, blocks), (1, max(size * n, 1)))
    return rows


def gather_bytes(x: Tensor, size: int, group: str, where: str) -> Tensor:
    """Return the elements of all ranks, row by row, flat; they are sent as bytes."""
    return gather(x.reshape(-1).view(torch.uint8), size, group, where).view(x.dtype)


def largest(amaxes: Tensor, group: str, where: str) -> Tensor:
    """Return the maximum over ranks: of float32, where NaN counts as Inf, which backends do not drop; or of their bits,
    as int32. Bits of numbers that are not negative are in the order of the numbers, and those of NaN come last."""
    if amaxes.dtype == torch.float32:
        amaxes = torch.where(amaxes.isnan(), float("inf"), amaxes)
    return sent("all-reduce (max)", all_reduce_operator, where, group, amaxes, "max")


# -- without gradients -------------------------------------------------------------------------------------------------


def gather(x: Tensor, size: int, group: str, where: str) -> Tensor:
    """Concatenate the rows of all ranks."""
    return sent("all-gather", all_gather_into_tensor, where, group, x.contiguous(), size)


def scatter_sum(x: Tensor, size: int, group: str, where: str) -> Tensor:
    """Sum over ranks, and return this rank's part of the rows."""
    check_divides(x.shape, size, where)
    return sent("reduce-scatter", reduce_scatter_tensor, where, group, x.contiguous(), "sum", size)


def total(x: Tensor, group: str, where: str) -> Tensor:
    """Sum over ranks."""
    return sent("all-reduce", all_reduce_operator, where, group, x.contiguous(), "sum")


def check_rows(shape: tuple[int, ...], where: str) -> None:
    """Refuse a tensor without rows to concatenate."""
    if not shape:
        raise UnsupportedShape(f"{where} gathers rows, the first dim of x, and x has no dims. Pass x [tokens, ...].")


def check_divides(shape: tuple[int, ...], size: int, where: str) -> None:
    """Refuse rows that do not divide by the ranks, before anything is sent."""
    if not shape or shape[0] % size:
        found = tuple([len(range(n)) for n in shape])  # numbers, even where a compiler uses symbols
        raise UnsupportedShape(
            f"{where} leaves each process an equal part of x's rows, its first dim, and x of {found} does not divide "
            f"by the {size} processes of the group. Pad the rows to a multiple of {size} and drop the padding after, "
            "or keep all rows on each process: sequence_parallel=False, or ops.AllReduce."
        )


@while_tracing
def refuse_gloo(device: torch.device, group: str, where: str) -> bool:
    """Refuse gloo for CUDA tensors: torch's functional collectives end the process with a segmentation fault there."""
    if backend_name(process_group(group), device) == "gloo":
        raise UnsupportedConfig(
            f"{where} sends {device.type} tensors over the process group {registered_name(group)!r}, which uses gloo "
            "for them, and torch's functional collectives end the process then. Use NCCL: init_process_group('nccl'), "
            "or 'cpu:gloo,cuda:nccl'."
        )
    return False


def sent(kind: str, operator: Any, where: str, group: str, x: Tensor, *settings: Any) -> Tensor:
    """Run a functional collective on x and wait for its result."""
    if x.is_cuda:
        refuse_gloo(x.device, group, where)
    found: Tensor
    if torch.compiler.is_compiling():
        found = wait_tensor(operator(x, *settings, registered_name(group)))
    else:
        with told(kind, where, group, x):
            found = wait_tensor(operator(x, *settings, registered_name(group)))
    return found


@contextmanager
def told(kind: str, where: str, group: str, x: Tensor) -> Iterator[None]:
    """Turn the error of a backend into one that says who waited in a collective, for what and for whom."""
    try:
        yield
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        why = lines[0] if lines else type(error).__name__
        raise CollectiveFailed(
            f"{where} waited in {kind} of {x.dtype} {tuple(x.shape)}, as rank {rank_of(group)} of {size_of(group)} in "
            f"the process group {registered_name(group)!r}, and it failed: {why} Another rank has ended, raised an "
            "error before this call, or passed other shapes: look at the first error in the logs of all ranks, and "
            "check that all of them run the same layers, recipes and shapes."
        ) from error
