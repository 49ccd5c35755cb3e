"""Tokens to the rows of their experts, and back: `sort`, `permute`, `unpermute`, `permute_probs`."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from octavo import backend
from octavo._torch.fakes import FakeTensor
from octavo.errors import (
    UnsupportedConfig,
    UnsupportedDevice,
    UnsupportedDtype,
    UnsupportedShape,
    check_choice,
    check_whole,
    is_whole,
)
from octavo.foreign_keywords import refused
from octavo.kernels.permute import MAX_EXPERTS, most_rows
from octavo.moe.mask_bits import unpack_mask
from octavo.moe.permuted_codes import moved_rows
from octavo.ops.inputs import arrived, check_input, check_layout, wanted_gradients
from octavo.quant import QTensor
from octavo.runtime.call import Stage, call, takes_nodes

CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)  # that are moved without a gradient
TAILS = ("zero", "untouched")
Rows = TypeVar("Rows", bound=Tensor | QTensor)


class Permutation(NamedTuple):
    """The rows of tokens sorted by expert: the rows of expert 0, then those of expert 1, and so on.

    A token has K assignments, one for each expert that it goes to. All tensors are on the device of the map. Their
    shapes follow from the map's shape and the options of `sort`, never from its values.

    Attributes:
        sizes: the number of rows of each expert [E], int64, pads included. Pass them to `octavo.GroupedLinear`.
        positions: the row of each assignment [..., K], int32; -1 for an assignment that was dropped.
        assignments: the assignment that each row comes from [rows], int32, counted through the flattened positions; -1
            for a pad, -2 for a row after the last expert.
        experts: of a mask, the expert of each assignment [..., K], int32; -1 for an assignment that is left. None for
            an index.

    Example:
        >>> permutation = octavo.moe.sort(torch.tensor([[2, 0], [0, 1]]), num_experts=3)
        >>> permutation.sizes, permutation.sources
        (tensor([2, 1, 1]), tensor([0, 1, 1, 0], dtype=torch.int32))
    """

    sizes: Tensor
    positions: Tensor
    assignments: Tensor
    experts: Tensor | None = None

    @property
    def sources(self) -> Tensor:
        """The token that each row comes from [rows], int32, counted through all leading dims; -1 for a row without
        one."""
        return torch.div(self.assignments, self.positions.shape[-1], rounding_mode="floor").clamp_min(-1)


def sort(
    routing: Tensor,
    num_experts: int | None = None,
    *,
    top_k: int | None = None,
    capacity: int | None = None,
    align: int = 1,
) -> Permutation:
    """Sort the assignments of tokens by expert, and inside an expert by token.

    The sort is stable, takes a constant number of launches, and reads nothing on the host. A CUDA graph follows maps
    that change.

    Args:
        routing: an index [..., K], int32 or int64, of the experts that each token goes to; entries outside of
            0 ... num_experts - 1, such as -1, are dropped. Or a mask [..., E], bool, True where a token goes to an
            expert; or the bits of one, uint8, as `pack_mask` makes them.
        num_experts: the number of experts, 1 to 4096. Required for an index and for bits; a mask has it in its shape.
        top_k: of a mask, the most experts of a token; those beyond are dropped. None, the default, allows for all
            experts, which takes more memory and time.
        capacity: the number of rows. Assignments whose row would come after them are dropped, from the last expert on.
            None, the default, has room for every assignment and every pad.
        align: fill up the rows of each expert with pads to a multiple of this number.

    Returns:
        The permutation.

    Raises:
        UnsupportedDtype: the map is neither bool nor uint8 nor int32 nor int64.
        UnsupportedShape: the map has no dims, or there are too many experts or rows.
        UnsupportedConfig: an option does not fit the map, `capacity` is negative or no multiple of `align`, or `align`
            is below 1.

    Example:
        >>> mask = torch.tensor([[True, False, True], [True, True, False]])
        >>> octavo.moe.sort(mask, top_k=2).positions
        tensor([[0, 3],
                [1, 2]], dtype=torch.int32)
        >>> octavo.moe.sort(mask, top_k=2, align=4).sizes
        tensor([4, 4, 4])
    """
    routing = arrived(routing)
    if getattr(routing, "dtype", None) is torch.uint8:
        if num_experts is None:
            raise UnsupportedConfig("Bits of a mask do not tell how many experts there are. Pass num_experts.")
        routing, num_experts = unpack_mask(routing, num_experts), None
    experts, assignments = _checked_map(routing, num_experts, top_k)
    check_whole(align, what="align")
    rows = None
    if capacity is not None:
        check_capacity(capacity, align)
        rows = torch.empty(capacity, 0, dtype=torch.uint8, device=routing.device)  # a graph may know it as a symbol
    number = math.prod(routing.shape[:-1]) * assignments
    if max(most_rows(number, experts, align), number, capacity or 0) >= 2**31:
        raise UnsupportedShape(
            f"Rows are counted in 32 bits, and {tuple(routing.shape)} may need more. Sort it in pieces."
        )
    is_mask = routing.dtype == torch.bool
    key = (
        f"token-sort(experts={_number(experts)},top_k={_number(assignments) if is_mask else 0},align={_number(align)})"
    )
    found = _call(Stage("token-sort", key, (rows,), (), False), routing)
    return Permutation(found[0], found[1], found[2], found[3] if is_mask else None)


@refused
def permute(
    x: Rows,
    routing: Tensor | Permutation,
    num_experts: int | None = None,
    *,
    top_k: int | None = None,
    capacity: int | None = None,
    align: int = 1,
    tail: str = "zero",
) -> tuple[Rows, Permutation]:
    """Copy each token to the rows of its assignments, sorted by expert.

    Backward sums the gradients of a token's rows, in float32 and in the order of its assignments. It reads no other
    row: pads and the tail of the gradient may hold anything, NaN too.

    Args:
        x: the tokens [..., D], in float32, bfloat16 or float16; or codes or their scales, in float8 or uint8, which
            carry no gradient; or a `QTensor` [tokens, D] whose scales are those of rows or of the whole, whose codes
            and scales then move together.
        routing: a `Permutation`, or a map for `sort`: an index [..., K] or a mask [..., E]. Its leading dims are those
            of x.
        num_experts: as in `sort`. Leave this and the next three out if `routing` is a `Permutation`.
        top_k: as in `sort`.
        capacity: as in `sort`.
        align: as in `sort`. Pads are zeros.
        tail: the rows after the last expert: "zero" writes zeros, "untouched" leaves any values there, which saves the
            write. `octavo.GroupedLinear` does not read them.

    Returns:
        The rows [rows, D], and the permutation.

    Raises:
        UnsupportedDtype: x or the map has another dtype.
        UnsupportedShape: the leading dims of x and the map differ.
        UnsupportedDevice: x and the map are on two devices.
        UnsupportedConfig: an option is given beside a `Permutation`, or has a wrong value; or on a CPU, no `sort` can
            have made the `Permutation`.

    Example:
        >>> tokens, index = torch.arange(3.0)[:, None], torch.tensor([[1, 0], [0, 2], [1, 2]])
        >>> rows, permutation = octavo.moe.permute(tokens, index, num_experts=3)
        >>> rows.flatten(), permutation.sizes
        (tensor([0., 1., 0., 2., 1., 2.]), tensor([2, 2, 2]))
    """
    check_choice(tail, TAILS, what="tail")
    if isinstance(routing, Permutation):
        if (num_experts, top_k, capacity, align) != (None, None, None, 1):
            raise UnsupportedConfig(
                "A Permutation is sorted already. Pass num_experts, top_k, capacity, align to sort."
            )
        check_permutation("permute", routing)
        permutation = routing
    else:
        permutation = sort(routing, num_experts, top_k=top_k, capacity=capacity, align=align)
    if isinstance(x, QTensor):
        return moved_rows(x, lambda t: permute(t, permutation, tail=tail)[0]), permutation  # type: ignore[return-value]
    values: Tensor = arrived(x)
    if getattr(values, "dtype", None) in CODES:
        check_layout("permute", values)
        if values.requires_grad:
            raise UnsupportedDtype(f"Codes carry no gradient, and this x, {values.dtype}, requires one. Detach it.")
    else:
        check_input("permute", values)
    _check_tokens("permute, as x,", values, permutation, values.shape[-1] if values.dim() else 0)
    needs = torch.is_grad_enabled() and values.requires_grad
    key = f"permute(tail='{tail}',wants_dx={needs})"
    stage = Stage("permute", key, (permutation.positions, permutation.assignments), (), needs)
    rows: Any = _call(stage, values)[0]
    # codes leave a graph's node as bytes
    return rows if rows.dtype == values.dtype else rows.view(values.dtype), permutation


@refused
def unpermute(
    rows: Tensor | QTensor, permutation: Permutation, probs: Tensor | None = None, *, tail: str = "zero"
) -> Tensor:
    """Sum the rows of each token's assignments, each multiplied by its probability.

    The sum runs in float32, assignment after assignment, and is rounded once. Two runs give the same bits. Rows without
    an assignment are not read. A dropped assignment adds nothing, and the gradient of its probability is zero.

    Args:
        rows: the rows [rows, D] of the permutation, in float32, bfloat16 or float16; or a `QTensor`, whose values are
            summed.
        permutation: the permutation that `permute` or `sort` returned.
        probs: the probability of each assignment, in one of these dtypes: [..., K] if the map was an index, [..., E] if
            it was a mask. None, the default, adds the rows as they are.
        tail: the gradients of rows after the last expert: "zero" writes zeros, "untouched" leaves any values there.
            Those of pads are zero.

    Returns:
        y [..., D], in the dtype of the rows.

    Raises:
        UnsupportedDtype: the rows or the probabilities have another dtype.
        UnsupportedShape: the rows or the probabilities do not have the shape that the permutation has.
        UnsupportedDevice: the tensors are on two devices.

    Example:
        >>> tokens, index = torch.ones(2, 4), torch.tensor([[1, 0], [0, 2]])
        >>> rows, permutation = octavo.moe.permute(tokens, index, num_experts=3)
        >>> octavo.moe.unpermute(rows, permutation, torch.tensor([[0.5, 0.25], [0.5, 0.5]]))[:, 0]
        tensor([0.7500, 1.0000])
    """
    check_choice(tail, TAILS, what="tail")
    values: Tensor = arrived(rows.dequantize() if isinstance(rows, QTensor) else rows)
    check_input("unpermute", values)
    check_permutation("unpermute", permutation)
    positions, assignments = permutation.positions, permutation.assignments
    if values.dim() != 2 or values.shape[0] != assignments.shape[0]:
        raise UnsupportedShape(
            f"unpermute takes the {assignments.shape[0]} rows of the permutation, [rows, D], got "
            f"{tuple(values.shape)}. Pass the rows that were made from what permute returned, with its tail."
        )
    _check_device("the rows", values, permutation)
    experts = None
    if probs is not None:
        probs, experts = _checked_probs("unpermute", probs, permutation), permutation.experts
    dx, dprobs = wanted_gradients(values.requires_grad, probs)
    key = f"unpermute(tail='{tail}',wants_dx={dx},wants_dprobs={dprobs})"
    return _call(Stage("unpermute", key, (positions, assignments, probs, experts), (), dx or dprobs), values)[0]


def permute_probs(probs: Tensor, permutation: Permutation) -> Tensor:
    """Return the probability of each row, for a layer between `permute` and `unpermute` that multiplies by it.

    Args:
        probs: the probability of each assignment, in float32, bfloat16 or float16: [..., K] if the map was an index,
            [..., E] if it was a mask.
        permutation: the permutation that `permute` or `sort` returned.

    Returns:
        One number for each row [rows]; zero for pads and for rows after the last expert, whose gradients are not read.

    Raises:
        UnsupportedDtype: the probabilities have another dtype.
        UnsupportedShape: the probabilities do not have the shape that the permutation has.
        UnsupportedDevice: the tensors are on two devices.

    Example:
        >>> permutation = octavo.moe.sort(torch.tensor([[1, 0], [0, 2]]), num_experts=3)
        >>> octavo.moe.permute_probs(torch.tensor([[0.5, 0.25], [0.75, 0.125]]), permutation)
        tensor([0.2500, 0.7500, 0.5000, 0.1250])
    """
    check_permutation("permute_probs", permutation)
    probs = _checked_probs("permute_probs", probs, permutation)
    needs = torch.is_grad_enabled() and probs.requires_grad
    inputs = (permutation.positions, permutation.assignments, permutation.experts)
    return _call(Stage("permute-probs", f"permute-probs(wants_dprobs={needs})", inputs, (), needs), probs)[0]


def _call(stage: Stage, x: Tensor) -> Sequence[Tensor]:
    # fake and meta tensors have shapes only
    return call(stage, x, takes_nodes() or isinstance(x, FakeTensor) or x.is_meta)


def check_capacity(capacity: Any, align: int = 1) -> None:
    if isinstance(capacity, (bool, float, str)) or capacity < 0:
        raise UnsupportedConfig(f"capacity is a number of rows, from 0 up, got {capacity!r}. Pass an int.")
    if capacity % align:
        raise UnsupportedConfig(
            f"capacity is a number of rows, a multiple of align={align}, got {capacity}. Round it up."
        )


def _number(n: int) -> int:
    """Return a number that a graph may know as a symbol as the one that the graph is made for."""
    return len(range(n))


def _checked_map(routing: Tensor, num_experts: int | None, top_k: int | None) -> tuple[int, int]:
    """Return the number of experts, and of a token's assignments."""
    if not isinstance(routing, Tensor) or routing.dtype not in (torch.bool, torch.int32, torch.int64):
        got: Any = routing.dtype if isinstance(routing, Tensor) else type(routing).__name__
        raise UnsupportedDtype(
            f"A map is an index, int32 or int64 [..., K], or a mask, bool [..., E] or its bits, uint8; got {got}. "
            + (
                "octavo.moe.route returns weights first, then the index."
                if isinstance(routing, Tensor) and routing.is_floating_point()
                else "Cast it by .long() or .bool()."
            )
        )
    check_layout("sort", routing)
    if routing.dim() < 1 or routing.shape[-1] < 1:
        raise UnsupportedShape(
            f"A map has a last dim of at least one assignment or expert, got {tuple(routing.shape)}."
        )
    if routing.dtype == torch.bool:
        experts = routing.shape[-1]
        if num_experts not in (None, experts):
            raise UnsupportedConfig(f"This mask has {experts} experts, and num_experts={num_experts}. Leave it out.")
        assignments = experts if top_k is None else top_k
        if not is_whole(assignments) or not 1 <= assignments <= experts:
            raise UnsupportedConfig(f"top_k is the most experts of a token, 1 to {experts} here, got {top_k!r}.")
    else:
        if top_k is not None:
            raise UnsupportedConfig(
                f"An index has its assignments in its last dim, {routing.shape[-1]}. Leave top_k out."
            )
        if num_experts is None:
            raise UnsupportedConfig("An index does not tell how many experts there are. Pass num_experts.")
        experts, assignments = num_experts, routing.shape[-1]
    if not is_whole(experts) or not 1 <= experts <= MAX_EXPERTS:
        raise UnsupportedShape(f"There are 1 to {MAX_EXPERTS} experts, got {experts!r}.")
    return experts, assignments


def check_permutation(title: str, permutation: Any) -> None:
    """Raise for a permutation that `sort` cannot have made. Values are read on a CPU; on a GPU, where the host would
    wait for them, the device checks them under `octavo.backend.use("checked")`."""
    if not isinstance(permutation, Permutation):
        raise UnsupportedDtype(
            f"{title} takes an octavo.moe.Permutation, got {type(permutation).__name__}. Make it with "
            "octavo.moe.sort(index, num_experts), or take the one that octavo.moe.permute returned."
        )
    sizes, positions, assignments, experts = permutation
    fields = [("sizes", sizes, 1), ("positions", positions, None), ("assignments", assignments, 1)]
    for name, t, dims in fields if experts is None else [*fields, ("experts", experts, None)]:
        dtypes = (torch.int32, torch.int64) if name == "sizes" else (torch.int32,)
        if not isinstance(t, Tensor) or t.dtype not in dtypes:
            got: Any = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise UnsupportedDtype(f"A Permutation has {name} as a tensor of {dtypes[-1]}, got {got}. {_WAY_OUT}")
        if t.dim() < 1 or t.dim() != (dims or t.dim()):
            raise UnsupportedShape(f"A Permutation has {name} [{_SHAPES[name]}], got {tuple(t.shape)}. {_WAY_OUT}")
        if t.device != assignments.device:
            raise UnsupportedDevice(
                f"A Permutation has {name} on {t.device} and assignments on {assignments.device}. {_WAY_OUT}"
            )
    if experts is not None and experts.shape != positions.shape:
        raise UnsupportedShape(
            f"A Permutation has experts in the shape of its positions, {tuple(positions.shape)}, got "
            f"{tuple(experts.shape)}. {_WAY_OUT}"
        )
    if torch.compiler.is_compiling() or isinstance(assignments, FakeTensor) or assignments.is_meta:
        return
    number, rows = positions.numel(), assignments.shape[0]
    rule = (
        f"positions from -1 to {rows - 1} and assignments from -2 to {number - 1}, each in the row that its position "
        "names"
    )
    if assignments.device.type != "cpu":
        backend.check_on_device(lambda: _is_sorted(positions, assignments), f"Octavo: a Permutation has {rule}")
    elif not _is_sorted(positions, assignments):
        raise UnsupportedConfig(f"A Permutation has {rule}, and this one does not. {_WAY_OUT}")


def _is_sorted(positions: Tensor, assignments: Tensor) -> Tensor:
    """Return whether positions and assignments are the inverse of each other, as a bool on their device."""
    rows_of, assignments_of = positions.reshape(-1).long(), assignments.long()
    number, rows = rows_of.shape[0], assignments_of.shape[0]
    found = ((rows_of >= -1) & (rows_of < rows)).all() & ((assignments_of >= -2) & (assignments_of < number)).all()
    if number == 0 or rows == 0:
        return found
    own_assignments, own_rows = (torch.arange(n, device=assignments.device, dtype=torch.int64) for n in (number, rows))
    there = (rows_of < 0) | (assignments_of[rows_of.clamp(0, rows - 1)] == own_assignments)
    back = (assignments_of < 0) | (rows_of[assignments_of.clamp(0, number - 1)] == own_rows)
    return found & there.all() & back.all()


_SHAPES = {"sizes": "E", "positions": "..., K", "assignments": "rows", "experts": "..., K"}
_WAY_OUT = "Make it with octavo.moe.sort."


def _check_tokens(title: str, x: Tensor, permutation: Permutation, width: int) -> None:
    want = (*permutation.positions.shape[:-1], width)
    if len(want) == 1 and x.dim() == 2:
        raise UnsupportedShape(
            f"{title} takes a map [..., K] with the experts of each token in its last dim, and the map "
            f"{tuple(permutation.positions.shape)} beside {tuple(x.shape)} has no dim for them. For one expert each "
            "pass index[:, None]."
        )
    if x.dim() == 0 or tuple(x.shape) != want:
        leading = ", ".join(map(str, want[:-1]))
        raise UnsupportedShape(
            f"{title} takes [{leading}, {width or 'D'}], as the map has these leading dims, got {tuple(x.shape)}. "
            "Reshape it, or the map."
        )
    _check_device("x", x, permutation)


def _check_device(what: str, x: Tensor, permutation: Permutation) -> None:
    if x.device != permutation.assignments.device:
        raise UnsupportedDevice(
            f"{what} is on {x.device} and the permutation on {permutation.assignments.device}. Move them together."
        )


def _checked_probs(title: str, probs: Tensor, permutation: Permutation) -> Tensor:
    probs = arrived(probs)
    check_input(title, probs, "probs")
    is_mask = permutation.experts is not None
    width = permutation.sizes.shape[0] if is_mask else permutation.positions.shape[-1]
    _check_tokens(f"{title}, as probs,", probs, permutation, width)
    return probs
