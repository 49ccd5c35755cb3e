"""Codes that were cast elsewhere, put in groups by `GroupedTensor.of`: such as rows that another rank sent.

    octavo::group_codes (Tensor codes, Tensor scale, Tensor sizes, Tensor? source, str quantizer) -> Tensor[]

is the node of a graph; eager mode runs the same code without it. Its results are the codes as bytes and the flat scale,
in the padded layout, and the places of the groups.
"""

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.quant.cast_checks import check_float
from octavo.quant.grouped import GroupedTensor, grouped_assemble, grouped_proto
from octavo.quant.grouped_cast import crossing
from octavo.quant.groups import BLOCK, Groups, abstract, split
from octavo.quant.groups.reference import places
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer
from octavo.values import parse


def group_codes(
    spec: Quantizer, codes: Tensor, scale: Tensor, sizes: Tensor, source: Tensor | None, dtype: torch.dtype,
    global_scale: Tensor | None, anchor: Tensor | None,
) -> GroupedTensor:  # fmt: skip
    """Return the GroupedTensor of rows of codes and scales."""
    _check(spec, codes, scale, sizes, source, global_scale)
    check_float(dtype, "GroupedTensor.of")
    rows = codes.shape[0] if source is None else source.shape[0]
    if anchor is not None and tuple(anchor.shape) != (rows, codes.shape[1] * spec.fmt.packed):
        raise UnsupportedShape(
            f"The anchor has the shape of the values, {(rows, codes.shape[1] * spec.fmt.packed)}, got "
            f"{tuple(anchor.shape)}. Pass one element, expanded to that shape."
        )
    codes = codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)
    if torch.compiler.is_compiling():
        codes, scale, *where = torch.ops.octavo.group_codes(codes, scale, sizes, source, spec.key)
        groups = Groups(where[0], where[1], where[2], where[3], where[4], rows)
    else:
        groups = split(sizes, rows)
        codes, scale = _placed(spec, codes, scale, groups, source)
    parts = [codes, scale, *([] if global_scale is None else [global_scale])]
    q = grouped_assemble(spec, parts, sizes.shape[0], "row", codes.shape[1] * spec.fmt.packed, dtype)
    return GroupedTensor(q, groups, "row", None, anchor)


def _placed(
    spec: Quantizer, codes: Tensor, scale: Tensor, groups: Groups, source: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of rows in the padded layout. Padding is zero, as a cast writes it."""
    at, live = places(groups)
    if codes.shape[0] == 0 or groups.rows == 0:
        at, live, codes = at.clamp_max(0), live & False, codes.new_zeros(1, codes.shape[1])
        scale = scale if spec.block[0] is None else scale.new_zeros(1, scale.shape[1])
    else:
        at = at.clamp_max(groups.rows - 1)
        if source is not None:
            at = source.long()[at]
            live = live & (at >= 0) & (at < codes.shape[0])
            at = at.clamp(0, codes.shape[0] - 1)
    empty = ~live[:, None]
    placed = codes.index_select(0, at).masked_fill_(empty, 0)
    if spec.block[0] is None:  # one scale for each group
        return placed, scale.reshape(-1, 1).clone()
    scales = scale.index_select(0, at).masked_fill_(empty, 0)
    strides = spec._scale_strides(*scales.shape, is_grouped=True)
    if strides is None:
        return placed, scales
    return placed, torch.empty_strided(scales.shape, strides, dtype=scale.dtype, device=scale.device).copy_(scales)


def _check(
    spec: Quantizer, codes: Tensor, scale: Tensor, sizes: Tensor, source: Tensor | None, global_scale: Tensor | None
) -> None:
    if not isinstance(spec, Quantizer):
        raise UnsupportedDtype(
            f"GroupedTensor.of takes a quantizer, such as recipe.linear().fprop.left, got {type(spec).__name__}."
        )
    if spec.block[0] not in (1, None):
        raise UnsupportedConfig(
            f"A scale of {spec} covers {spec.block[0]} rows, and rows that arrive in another order share no scale. Use "
            "a quantizer with scales of each row, such as Block1D, Rowwise or MX."
        )
    if codes.dim() != 2 or codes.dtype not in (torch.uint8, spec.fmt.dtype):
        raise UnsupportedDtype(
            f"Codes of {spec} are rows of {spec.fmt.dtype} or uint8, got {codes.dtype} {tuple(codes.shape)}. Pass "
            "codes [rows, bytes]."
        )
    kind = torch.float32 if spec.scale_format is None else torch.uint8
    wide = codes.shape[1] * spec.fmt.packed
    grid = (
        (sizes.numel(), 1) if spec.block[0] is None else (codes.shape[0], -(-wide // (spec.block[1] or max(wide, 1))))
    )
    if scale.dtype != kind or (tuple(scale.shape) != grid and not (spec.block[0] is None and scale.numel() == grid[0])):
        raise UnsupportedShape(
            f"Scales of {spec} beside codes {tuple(codes.shape)} in {sizes.numel()} groups are {kind} {grid}, got "
            f"{scale.dtype} {tuple(scale.shape)}. Send the scales of a row with its codes."
        )
    if (global_scale is not None) != spec.two_level or (
        global_scale is not None and (global_scale.shape != sizes.shape or global_scale.dtype != torch.float32)
    ):
        raise UnsupportedShape(
            f"{spec} has {'a float32 global scale for each group' if spec.two_level else 'no global scale'}, got "
            f"{None if global_scale is None else (global_scale.dtype, tuple(global_scale.shape))}. Pass "
            f"global_scale={'[groups]' if spec.two_level else 'None'}."
        )
    if source is not None and (source.dim() != 1 or source.dtype not in (torch.int32, torch.int64)):
        raise UnsupportedShape(
            f"source is the row of the codes for each row, int32 [rows], got {source.dtype} {tuple(source.shape)}."
        )
    for name, t in (("scale", scale), ("sizes", sizes), ("source", source), ("global_scale", global_scale)):
        if t is not None and t.device != codes.device:
            raise UnsupportedDevice(f"The codes are on {codes.device} and {name} on {t.device}. Move them together.")


# -- rows as bytes -----------------------------------------------------------------------------------------------------


def rows_as_bytes(q: QTensor) -> Tensor:
    """Return each row's codes, then its scales, as uint8 [rows, bytes]: what travels to another rank in one piece.

    Args:
        q: codes of rows with scales of their own, as a quantizer with blocks in a row makes them.

    Returns:
        A tensor of its own memory. `bytes_as_rows(spec, received, K)` takes rows of it apart.

    Raises:
        UnsupportedConfig: a scale covers several rows.

    Example:
        >>> q = octavo.quant.Block1D().quantize(torch.ones(3, 256))
        >>> sent = octavo.quant.rows_as_bytes(q)
        >>> sent.shape  # 256 codes and two float32 scales
        torch.Size([3, 264])
    """
    if q.spec.block[0] != 1 or q.global_scale is not None:
        raise UnsupportedConfig(
            f"Rows of {q.spec} share a scale, and do not travel alone. Use a quantizer with scales of each row, such "
            "as Block1D, Rowwise or MX."
        )
    scale = torch.empty(q.scale.shape, dtype=q.scale.dtype, device=q.device).copy_(q.scale)  # row by row
    return torch.cat([q.codes.view(torch.uint8), scale.view(torch.uint8)], 1)


def bytes_as_rows(spec: Quantizer, rows: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Take rows apart that `rows_as_bytes` made.

    Args:
        spec: the quantizer of the codes.
        rows: uint8 [rows, bytes].
        columns: the number of values in a row.

    Returns:
        Codes, which share the memory of `rows`, and scales, for `GroupedTensor.of`.

    Example:
        >>> spec, x = octavo.quant.Block1D(), torch.randn(5, 256)
        >>> sent = octavo.quant.rows_as_bytes(spec.quantize(x))
        >>> codes, scale = octavo.quant.bytes_as_rows(spec, sent, 256)
        >>> octavo.GroupedTensor.of(spec, codes, scale, torch.tensor([2, 3]))
        GroupedTensor(5x256 in 2 groups, row, block-1d, cpu)
    """
    wide = spec._code_columns(columns)
    scale = rows[:, wide:].contiguous()
    return rows[:, :wide], scale if spec.scale_format is not None else scale.view(torch.float32)


# -- the node of a graph -----------------------------------------------------------------------------------------------


@torch.library.custom_op("octavo::group_codes", mutates_args=())
def _group_codes(codes: Tensor, scale: Tensor, sizes: Tensor, source: Tensor | None, quantizer: str) -> list[Tensor]:
    groups = split(sizes, codes.shape[0] if source is None else source.shape[0])
    placed, scales = _placed(parse(quantizer), codes, scale, groups, source)
    return [placed, scales.as_strided((scales.numel(),), (1,)), *groups.tensors()]


@_group_codes.register_fake
def _(codes: Tensor, scale: Tensor, sizes: Tensor, source: Tensor | None, quantizer: str) -> list[Tensor]:
    spec, number = parse(quantizer), sizes.shape[0]
    rows = codes.shape[0] if source is None else source.shape[0]
    where = abstract(rows, number, codes.device)
    padded = where[2].shape[0] * BLOCK
    proto = grouped_proto(spec, padded, number, codes.shape[1] * spec.fmt.packed, "row", torch.bfloat16, codes.device)
    return [*crossing(proto.empty())[:2], *[place.empty() for place in where]]
