"""A quantized matrix whose rows come in ragged groups.

    value = code * scale of its block * global scale of its group        as in `octavo.quant.qtensor`

A scheme with one scale for a whole dim has one scale per group if that dim holds the groups. Blocks of rows restart
with every group, since the padded layout starts each group at a multiple of 128 rows (`octavo.quant.groups`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo._torch.fakes import is_fake
from octavo._torch.tensors import register_pytree_node
from octavo.errors import UnsupportedDevice, UnsupportedShape
from octavo.quant import scale_blocks
from octavo.quant.cast_checks import check_fits, check_flag, check_float, check_scaling, check_source
from octavo.quant.casts import KNOWN, QTensorPair, as_matrix, fill_pair, measure_pair
from octavo.quant.groups import BLOCK, Groups
from octavo.quant.groups.reference import pack
from octavo.quant.qtensor import ORIENTATIONS, QProto, QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, GroupCounts, Quantizer, QuantizerPair


class GroupedJoin(torch.autograd.Function):
    """Return the values and send their gradient to an anchor; that of rows from `end` on is zero, as their values
    are."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor, end: Tensor) -> Tensor:
        ctx.dtype = anchor.dtype
        ctx.save_for_backward(end)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        (end,) = ctx.saved_tensors
        tail = torch.arange(dy.shape[0], device=dy.device, dtype=torch.int64) >= end
        return None, dy.to(ctx.dtype).masked_fill(tail[:, None], 0), None


@dataclass(frozen=True, eq=False)
class GroupedTensor:
    """A quantized matrix whose rows come in groups, each group quantized as if it were alone.

    `Quantizer.quantize_groups(x, sizes)` makes one. GroupedLinear takes one of rows as its input and multiplies its
    codes as they are. It is not a torch.Tensor: a function of torch that gets one raises.

    The padded layout starts each group at a multiple of 128 rows (`octavo.quant.groups`). Padding is zero within a
    group's last block, and undefined past the last group.

    Args:
        q: codes [padded, K] that are contracted over K, or [K, padded] that are contracted over the rows of a group.
            Its grid of scales has an entry for each group if the scheme has one scale for all rows.
        groups: the rows of each group, and their places in the padded layout.
        orientation: "row" for codes [padded, K], "column" for codes [K, padded].
        columns: codes [K, padded] of the same rows beside those of orientation "row", for the weight gradient; None
            if there are none.
        anchor: a tensor that receives the gradient of the values, if there is one. It has the shape and dtype of the
            values, in one stored element.

    Example:
        >>> rows = octavo.quant.Block1D().quantize_groups(torch.ones(10, 64), torch.tensor([4, 0, 5]))
        >>> rows
        GroupedTensor(10x64 in 3 groups, row, block-1d, cpu)
        >>> rows.dequantize().shape
        torch.Size([10, 64])
        >>> [q.shape for q in rows.members()]
        [(4, 64), (0, 64), (5, 64)]
    """

    q: QTensor
    groups: Groups
    orientation: str
    columns: QTensor | None = None
    anchor: Tensor | None = None

    @staticmethod
    def of(
        spec: Quantizer,
        codes: Tensor,
        scale: Tensor,
        sizes: Tensor,
        *,
        source: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        global_scale: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> "GroupedTensor":
        """Put rows of codes in groups that were cast elsewhere, such as rows that other ranks sent. The codes of a
        cast of the same values in these groups are the same, bit for bit.

        Args:
            spec: the quantizer of the codes. Each row has scales of its own, or each group one scale.
            codes: [rows, K], uint8 or the quantizer's dtype, the rows of each group one after another; then a tail,
                which is not read.
            scale: the scales of each row [rows, blocks], row by row; or one for each group [groups]. float32, or uint8
                where the quantizer has a format for scales.
            sizes: int32 or int64 [groups] on the device of the codes. Not read on the host.
            source: int32 [rows] on the device of the codes: takes codes[source], rows in the order of their groups. -1
                makes a row of zeros.
            dtype: the dtype of the values that were quantized.
            global_scale: float32 [groups], for NVFP4.
            anchor: a tensor that receives the gradient of the values: one element, expanded to [rows, K].

        Returns:
            A GroupedTensor of rows, in memory of its own.

        Raises:
            UnsupportedConfig: a scale of the quantizer covers several rows.
            UnsupportedShape: a tensor has another shape than the codes ask for.
            UnsupportedDtype: `spec` is no quantizer, or codes or `dtype` have another dtype.
            UnsupportedDevice: the tensors are on two devices.

        Example:
            >>> spec, x = octavo.quant.MX(), torch.randn(6, 64)
            >>> q = spec.quantize(x)
            >>> octavo.GroupedTensor.of(spec, q.codes, q.scale, torch.tensor([4, 2]))
            GroupedTensor(6x64 in 2 groups, row, mx, cpu)
        """
        from octavo.quant.grouped_codes import group_codes  # it imports this file

        return group_codes(spec, codes, scale, sizes, source, dtype, global_scale, anchor)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the values: all rows, tail included, and K."""
        return self.groups.rows, self.q.columns if self.orientation == "row" else self.q.rows

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that was quantized."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.q.device

    @property
    def requires_grad(self) -> bool:
        """Whether the values take a gradient."""
        return self.anchor is not None and self.anchor.requires_grad

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the tensors inside, in a fixed order.

        Yields:
            The tensors of the QTensor, those of `columns`, then those of the groups.

        Example:
            >>> rows = octavo.quant.Block1D().quantize_groups(torch.ones(10, 64), torch.tensor([4, 6]))
            >>> len(list(rows.tensors()))
            7
        """
        yield from self.q.tensors()
        if self.columns is not None:
            yield from self.columns.tensors()
        yield from self.groups.tensors()

    def nbytes(self) -> int:
        """Count the bytes of all tensors inside, padding included.

        Returns:
            The number of bytes.

        Example:
            >>> rows = octavo.quant.Block1D().quantize_groups(torch.ones(10, 64), torch.tensor([4, 6]))
            >>> rows.nbytes() >= 2 * 128 * 64
            True
        """
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values that the codes stand for, packed as they came, with a gradient if there is an anchor. The
        host reads nothing from the device.

        Args:
            dtype: float32, bfloat16 or float16; None is the dtype of the tensor that was quantized.

        Returns:
            A tensor [rows, K], with zeros in the rows after the last group. Those rows pass no gradient on.

        Raises:
            UnsupportedDtype: `dtype` is none of these.
        """
        q, spec, dim = self.q, self.q.spec, ORIENTATIONS.index(self.orientation)
        dtype = check_float(q.dtype if dtype is None else dtype, "dequantize")
        owner = self.groups.owner.clamp_min(0)[:, None].expand(-1, BLOCK).reshape(-1)
        scale = spec.scale_values(q)
        if spec.block[dim] is None:
            scale = scale.index_select(dim, owner)
        codes = spec.code_values(q)
        values = codes * scale_blocks.spread(scale, spec.block, *codes.shape)
        if q.global_scale is not None:
            values = values * q.global_scale[owner].unsqueeze(1 - dim)
        values = spec._finished(values, q.codes, q.columns, dtype)
        values = pack(values.T if dim else values, self.groups)
        if self.anchor is None:
            return values
        return GroupedJoin.apply(values, self.anchor, self.groups.start[-1])  # type: ignore[no-untyped-call]

    def members(self) -> list[QTensor]:
        """Return the groups by themselves. The host reads the sizes, and so waits for the device.

        Returns:
            A QTensor for each group, as views of this one: `Quantizer.quantize_into` of one changes both. Those of rows
            carry the gradient that this object carries.

        Example:
            >>> rows = octavo.quant.Block1D().quantize_groups(torch.ones(10, 64), torch.tensor([4, 6]))
            >>> octavo.quant.Block1D().quantize_into(rows.members()[1], torch.full((6, 64), 2.0))
            >>> rows.dequantize()[:, 0]
            tensor([1., 1., 1., 1., 2., 2., 2., 2., 2., 2.])
        """
        sizes, firsts = self.groups.sizes(), self.groups.block[:-1].tolist()
        places = enumerate(zip(firsts, sizes, strict=True))
        found = [member(self.q, self.orientation, g, BLOCK * first, size) for g, (first, size) in places]
        if self.anchor is None or self.orientation != "row":
            return found
        anchors = torch.split(self.anchor[: sum(sizes)], sizes)
        return [replace(q, anchor=anchor) for q, anchor in zip(found, anchors, strict=True)]

    def detach(self) -> "GroupedTensor":
        """Return the same codes without a gradient.

        Returns:
            A GroupedTensor that shares the memory of this one.

        Example:
            >>> x = torch.ones(10, 64, requires_grad=True)
            >>> rows = octavo.quant.Block1D().quantize_groups(x, torch.tensor([4, 6]))
            >>> rows.requires_grad, rows.detach().requires_grad
            (True, False)
        """
        return replace(self, anchor=None)

    def save(self) -> "tuple[tuple[Tensor, ...], Settings]":
        """Split this object into plain tensors, for autograd's `save_for_backward`, and settings. The gradient is not
        part of either.

        Returns:
            The tensors, and the settings that `octavo.quant.grouped.restore(tensors, settings)` needs beside them.

        Example:
            >>> rows = octavo.quant.Block1D().quantize_groups(torch.ones(10, 64), torch.tensor([4, 6]))
            >>> octavo.quant.grouped.restore(*rows.save())
            GroupedTensor(10x64 in 2 groups, row, block-1d, cpu)
        """
        columns = None if self.columns is None else self.columns.spec
        settings = self.q.spec, self.q.shape, self.q.dtype, self.groups.rows, self.orientation, columns
        return tuple(self.tensors()), settings

    def __reduce__(self) -> Any:
        raise TypeError("A GroupedTensor is not pickled: pickle what save() gives, with str(spec), and restore() it.")

    def __copy__(self) -> "GroupedTensor":
        return replace(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        raise TypeError(
            f"torch's {name} does not take a GroupedTensor, whose codes and scales belong together. Call it on "
            "dequantize(), or on each of members()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupedTensor":
        tensors, settings = self.save()
        return restore([t.clone() for t in tensors], settings)

    def __repr__(self) -> str:
        rows, width = self.shape
        size = f"{rows}x{width} in {self.groups.number} groups"
        side = self.orientation if self.columns is None else "row and column"
        return f"GroupedTensor({size}, {side}, {self.q.spec.key}, {self.q.device})"


Settings = tuple[Quantizer, tuple[int, ...], torch.dtype, int, str, Quantizer | None]


def restore(tensors: Sequence[Tensor], settings: Settings) -> GroupedTensor:
    """Return the GroupedTensor whose `save` returned these."""
    spec, shape, dtype, rows, orientation, column = settings
    rest = list(tensors)
    q = _taken(rest, spec, shape, dtype)
    columns = None if column is None else _taken(rest, column, shape[::-1], dtype)
    return GroupedTensor(q, Groups._make((*rest, rows)), orientation, columns)


def _taken(rest: list[Tensor], spec: Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> QTensor:
    """Remove the tensors of a QTensor from the head of a list, and return it."""
    codes, scale = rest.pop(0), rest.pop(0)
    return QTensor(codes, scale, spec, shape, dtype, rest.pop(0) if spec.two_level else None)


def _flatten(t: GroupedTensor) -> tuple[list[Any], tuple[Any, ...]]:
    return [t.q, t.columns, *t.groups.tensors(), t.anchor], (t.groups.rows, t.orientation)


def _unflatten(parts: Iterable[Any], settings: tuple[Any, ...]) -> GroupedTensor:
    q, columns, *groups, anchor = parts
    rows, orientation = settings
    return GroupedTensor(q, Groups._make((*groups, rows)), orientation, columns, anchor)


register_pytree_node(GroupedTensor, _flatten, _unflatten)  # a tree of tensors, as a QTensor is


# -- shapes --------------------------------------------------------------------------------------------------------


def _along(orientation: str, number: int) -> GroupCounts:
    """Return how many groups each dim has: the rows of x are the columns of x.T."""
    return (number, 1) if orientation == "row" else (1, number)


def grouped_proto(
    spec: Quantizer, padded: int, number: int, k: int, orientation: str, dtype: torch.dtype, device: torch.device
) -> QProto:
    """Return, without data, the QTensor of `number` groups of rows of k elements, padded to `padded` rows."""
    shape = (padded, k) if orientation == "row" else (k, padded)
    return spec._proto(shape, dtype, device, _along(orientation, number))


@lru_cache(maxsize=4096)
def _cached_proto(number: int, *where: Any) -> QProto:
    """Cache `grouped_proto` by the quantizer's number: an eager layer needs the same few at every step."""
    return grouped_proto(KNOWN[number], *where)


def grouped_assemble(
    spec: Quantizer, parts: Sequence[Tensor], number: int, orientation: str, k: int, dtype: torch.dtype
) -> QTensor:
    """Return the QTensor with these `tensors()`; codes may be plain bytes, the scale flat."""
    rows, columns = parts[0].shape
    shape = (rows, k) if orientation == "row" else (rows, columns * spec.fmt.packed)
    if parts[1].dim() == 1:
        parts = parts[0], spec._unflattened(parts[1], *shape, _along(orientation, number)), *parts[2:]
    return spec.assemble(parts, shape, dtype)


def member(q: QTensor, orientation: str, g: int, start: int, size: int) -> QTensor:
    """Return the QTensor of group g, `size` padded-layout rows from `start`, as views: its rows quantized alone."""
    dim, spec = ORIENTATIONS.index(orientation), q.spec
    end = start + size
    if orientation == "row":
        codes, shape = q.codes[start:end], (size, q.shape[1])
    else:
        first, wide = start // spec.fmt.packed, size if spec.fmt.packed == 1 else spec._code_columns(size)
        codes, shape = q.codes[:, first : first + wide], (q.shape[0], size)
    length = spec.block[dim]
    part = slice(g, g + 1) if length is None else slice(start // length, scale_blocks.ceil_div(end, length))
    scale = q.scale[part] if orientation == "row" else q.scale[:, part]
    return QTensor(codes, scale, spec, shape, q.dtype, None if q.global_scale is None else q.global_scale[g : g + 1])


# -- quantize ------------------------------------------------------------------------------------------------------


def quantize_groups(
    x: Tensor, row: Quantizer | None, column: Quantizer | None, groups: Groups, cast_args: CastArgs | None = None
) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    """Quantize x [rows, K] in the orientations that have a quantizer, each group by itself, from one read of x. The
    cast never reads the tail, so no amax includes it. `cast_args` holds one inverse scale and one running amax per
    group. If it has a `source`, x [T, K] has any number of rows, and the result is that of x[source], bit for bit."""
    matrix, cast_args = _checked(x, (row, column), groups, cast_args)
    first, second = empty_groups(groups, (row, column), matrix.shape[1], x.dtype, x.device)
    if not is_fake(matrix):  # a fake tensor has no values, and its groups have no sizes
        fill_pair(matrix, (first, second), cast_args)
    return (
        None if first is None else GroupedTensor(first, groups, "row"),
        None if second is None else GroupedTensor(second, groups, "column"),
    )


def empty_groups(groups: Groups, pair: QuantizerPair, k: int, dtype: torch.dtype, device: torch.device) -> QTensorPair:
    """Allocate the codes of rows of k elements, in the orientations that have a quantizer."""
    where = groups.padded, groups.number, k
    row, column = (
        None if spec is None else _cached_proto(spec.number, *where, side, dtype, device).empty()
        for spec, side in zip(pair, ORIENTATIONS, strict=True)
    )
    return row, column


def fill_groups(
    x: Tensor, pair: tuple[GroupedTensor | None, GroupedTensor | None], cast_args: CastArgs | None = None
) -> None:
    """Quantize x into existing GroupedTensors, in place. A `skip` flag that is not zero leaves them unchanged. A
    `source` names the rows of x, as in `quantize_groups`."""
    lead = pair[1] if pair[0] is None else pair[0]
    if lead is None:
        return
    groups, (row, column) = lead.groups, (None if t is None else t.q for t in pair)
    matrix, cast_args = _checked(x, [None if q is None else q.spec for q in (row, column)], groups, cast_args)
    where = groups.padded, groups.number, matrix.shape[1]
    for q, side in zip((row, column), ORIENTATIONS, strict=True):
        if q is not None:
            proto = _cached_proto(q.spec.number, *where, side, q.dtype, x.device)
            check_fits(q, proto, "fill_groups", "grouped_proto(...)")
    fill_pair(matrix, (row, column), cast_args)


def both_orientations(t: GroupedTensor) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    """Return the row and the column codes of t, without a gradient."""
    if t.orientation == "column":
        return None, t.detach()
    columns = None if t.columns is None else GroupedTensor(t.columns, t.groups, "column")
    return replace(t, columns=None, anchor=None), columns


def transposed(t: GroupedTensor) -> GroupedTensor:
    """Return the other orientation of t in memory of its own, with the bytes that a cast of the values would write.
    Raise a TypeError unless the scheme's blocks are square."""
    q, groups = t.q, t.groups
    other, k = ("column", q.columns) if t.orientation == "row" else ("row", q.rows)
    proto = _cached_proto(q.spec.number, groups.padded, groups.number, k, other, q.dtype, q.device)
    return GroupedTensor(q.spec._transposed(q, proto), groups, other)


def groups_amax(
    x: Tensor, row: Quantizer | None, column: Quantizer | None, groups: Groups, *, source: Tensor | None = None
) -> AmaxPair:
    """Return the largest magnitudes that a two-pass cast of these groups computes first; None if the cast needs none.
    float32 [number] for one scale, or one global scale, per group; rowwise [padded], and [number, K] for columns. They
    are those of x[source] if a `source` is given."""
    matrix = _matrix(x, groups, source)
    row, column = (spec if spec is not None and spec.two_pass else None for spec in (row, column))
    source = None if source is None else source.contiguous()
    return measure_pair(matrix, row, column, groups, source)


def _matrix(x: Tensor, groups: Groups, source: Tensor | None) -> Tensor:
    matrix = as_matrix(x)
    rows, of = (matrix.shape[0], "x") if source is None else (check_source(source, x), "source")
    if rows != groups.rows:
        raise UnsupportedShape(f"These groups are of {groups.rows} rows, tail included, and {of} has {rows}.")
    if groups.start.device != x.device:
        raise UnsupportedDevice(f"x is on {x.device} and its groups on {groups.start.device}. Move the sizes first.")
    return matrix


def _checked(
    x: Tensor, specs: Sequence[Quantizer | None], groups: Groups, cast_args: CastArgs | None
) -> tuple[Tensor, CastArgs]:
    """Check x and `cast_args`; return x as a matrix, and `cast_args` with these groups."""
    cast_args = CastArgs() if cast_args is None else cast_args
    matrix, number = _matrix(x, groups, cast_args.source), groups.number
    check_scaling(specs, cast_args)
    for name, t in (("inverse_scale", cast_args.inverse_scale), ("running_amax", cast_args.running_amax)):
        # kernels read and write one contiguous float32 per group
        if t is not None and (
            t.shape != (number,) or t.dtype != torch.float32 or t.device != x.device or not t.is_contiguous()
        ):
            raise UnsupportedShape(
                f"{name} of {number} groups is float32 [{number}] on {x.device}, contiguous; "
                f"got {t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}."
            )
    if cast_args.skip is not None:
        check_flag(cast_args.skip, x)
    source = None if cast_args.source is None else cast_args.source.contiguous()
    return matrix, cast_args._replace(groups=groups, source=source)
