"""The sort of chunks of rows: `sort_chunks` puts rows that arrived in chunks, such as those of each expert from each
rank, in the order of their experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape, check_whole
from octavo.moe.permutation import Permutation, sort
from octavo.values import excerpt


def sort_chunks(
    sizes: Tensor, rows: int, *, order: Tensor | Sequence[int] | None = None, stride: int | None = None
) -> Permutation:
    """Sort chunks of rows: those of each rank and expert by expert, or by an order that you give.

    `permute(x, permutation)` copies the rows to their places, `unpermute(rows, permutation)` copies them back, and
    `unpermute(rows, permutation, probs)` multiplies them by a probability for each arrived row [rows, 1];
    `permute_probs` moves these probabilities alone. The host reads nothing of a GPU: a CUDA graph follows sizes that
    change.

    Args:
        sizes: the number of rows of each chunk, int32 or int64: [ranks, experts], for chunks that arrived one rank
            after another, and from each rank one expert after another; or [chunks], with `order`.
        rows: the number of rows of the tensor that arrived, in which rows after the chunks may be left.
        order: the chunks in the order that is wanted, for sizes [chunks].
        stride: the rows from the first one of a rank to the first one of the next, for chunks that arrived in parts of
            one size for each rank. None, the default, has one chunk begin where the one before it ends.

    Returns:
        The permutation. It takes each arrived row as a token with one assignment: positions [rows, 1]. Its sizes are
        those of the experts, or of the chunks in the order that is wanted.

    Raises:
        UnsupportedDtype: sizes are no integers.
        UnsupportedShape: sizes have another shape, or their sum does not fit.
        UnsupportedConfig: `order` is missing, or names chunks twice; or `stride` is given with it.
        UnsupportedDevice: `order` is on another device.

    Example:
        >>> sizes = torch.tensor([[2, 1], [0, 2]])  # from rank 0: two rows of expert 0, one of expert 1
        >>> permutation = octavo.moe.sort_chunks(sizes, rows=5)
        >>> octavo.moe.permute(torch.tensor([[0.0], [0.0], [1.0], [1.1], [1.2]]), permutation)[0].flatten()
        tensor([0.0000, 0.0000, 1.0000, 1.1000, 1.2000])
        >>> octavo.moe.sort_chunks(torch.tensor([2, 1, 3]), 6, order=[2, 0, 1]).sources
        tensor([3, 4, 5, 0, 1, 2], dtype=torch.int32)
    """
    chunks, wanted = _checked(sizes, rows, order, stride)
    groups = chunks.shape[1]
    row = torch.arange(rows, device=sizes.device, dtype=torch.int64)
    sizes = chunks.long()
    if stride is not None:  # what follows the last chunk of a rank is a group of no expert
        sizes = torch.cat([sizes, stride - sizes.sum(1, keepdim=True)], 1)
    last = sizes.flatten().cumsum(0)
    chunk = torch.searchsorted(last, row, right=True)
    group = chunk % sizes.shape[1]
    group = torch.where((chunk < last.numel()) & (group < groups), group, -1)
    if wanted is not None:
        places = torch.empty_like(wanted).scatter_(
            0, wanted, torch.arange(groups, device=wanted.device, dtype=torch.int64)
        )
        group = torch.where(group >= 0, places[group.clamp_min(0)], -1)
    return sort(group[:, None], groups)


def _checked(sizes: Any, rows: int, order: Any, stride: int | None) -> tuple[Tensor, Tensor | None]:
    """Return sizes [sources, groups], and the order on their device."""
    if not isinstance(sizes, Tensor) or sizes.dtype not in (torch.int32, torch.int64):
        got = sizes.dtype if isinstance(sizes, Tensor) else type(sizes).__name__
        raise UnsupportedDtype(f"sort_chunks takes sizes as a tensor of int32 or int64, got {got}. Cast it by .long().")
    if sizes.dim() not in (1, 2) or sizes.shape[-1] < 1:
        raise UnsupportedShape(
            f"sort_chunks takes sizes [ranks, experts], or [chunks] with order=, got {tuple(sizes.shape)}."
        )
    if stride is not None:
        check_whole(stride, what="stride", least=0)
    if (sizes.dim() == 1) != (order is not None) or (order is not None and stride is not None):
        raise UnsupportedConfig(
            f"sort_chunks sorts sizes [ranks, experts] by expert, with stride= if you like, and sizes [chunks] by "
            f"order=; got sizes {tuple(sizes.shape)}, {'an' if order is not None else 'no'} order and stride={stride}."
        )
    if not (torch.compiler.is_compiling() or isinstance(sizes, FakeTensor)) and sizes.device.type == "cpu":
        _check_values(sizes if sizes.dim() == 2 else sizes[None], rows, stride)
    return (sizes, None) if order is None else (sizes[None], _checked_order(order, sizes))


def _checked_order(order: Any, sizes: Tensor) -> Tensor:
    chunks = sizes.shape[0]
    if not isinstance(order, Tensor):
        if sorted(order) != list(range(chunks)):
            raise UnsupportedConfig(
                f"order names each of the {chunks} chunks once, got {excerpt(repr(list(order)))}. Number them from 0."
            )
        return torch.tensor(list(order), dtype=torch.int64, device=sizes.device)
    if order.shape != (chunks,) or order.dtype not in (torch.int32, torch.int64):
        raise UnsupportedConfig(
            f"order names each of the {chunks} chunks once, as integers [{chunks}], got {order.dtype} "
            f"{tuple(order.shape)}."
        )
    if order.device != sizes.device:
        raise UnsupportedDevice(f"The sizes are on {sizes.device} and order on {order.device}. Move them together.")
    return order.long()


def _check_values(sizes: Tensor, rows: int, stride: int | None) -> None:
    within = rows if stride is None else stride
    sums = sizes.sum().view(1) if stride is None else sizes.sum(1)
    if (sizes < 0).any() or (sums > within).any() or (stride is not None and stride * sizes.shape[0] > rows):
        raise UnsupportedShape(
            f"The chunks {'of each rank' if stride is not None else ''} have at most {within} rows, of {rows} in all, "
            f"got {excerpt(str(sizes.tolist()))}. Count the rows anew."
        )
