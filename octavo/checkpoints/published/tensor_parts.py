"""The tensors of one weight, between a file and memory.

In memory they are the row codes of the layout's quantizer: bytes, scales as float32 or bytes, and the second level. In
a file each has the dtype and shape of the layout. Both directions keep every value, but for a second level that
divides: its reciprocal is rounded once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.checkpoints.published.layouts import BYTES, FLOATS, Layout
from octavo.checkpoints.tensor_file import DTYPES
from octavo.errors import InvalidCheckpoint
from octavo.formats import E2M1, E4M3, E8M0, unpack_nibbles
from octavo.quant.quantizer import Quantizer

PAIR = 2  # four-bit codes in a byte
BLOCK = 32  # of MXFP4, whose files have a dim for it


class Expected(NamedTuple):
    """The requirements on what a file has under one name."""

    suffix: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def expected(layout: Layout, shape: Sequence[int]) -> list[Expected]:
    """Return the tensors of a weight [..., N, K]: codes, scales, and the second level if there is one."""
    *lead, n, k = shape
    front, spec = tuple(lead), layout.quantizer
    if layout.unpacks:
        blocks = -(-k // BLOCK)
        return [
            Expected(layout.codes, ("U8",), ((*front, n, blocks, BLOCK // PAIR),)),
            Expected(layout.scale, layout.scale_dtypes, ((*front, n, blocks),)),
        ]
    packed = spec.fmt is E2M1
    found = [
        Expected(layout.codes, ("U8",) if packed else ("F8_E4M3",), ((*front, n, k // PAIR if packed else k),)),
        Expected(layout.scale, layout.scale_dtypes, _scale_shapes(layout, front, n, k)),
    ]
    if layout.level2:
        found.append(Expected(layout.level2, ("F32",), _ones(layout, front)))
    return found


def _scale_shapes(layout: Layout, front: tuple[int, ...], n: int, k: int) -> tuple[tuple[int, ...], ...]:
    rows, columns = layout.quantizer.block
    if rows is None:
        return _ones(layout, front)
    grid = *front, -(-n // rows), 1 if columns is None else -(-k // columns)
    return (grid, grid[:-1]) if columns is None else (grid,)


def _ones(layout: Layout, front: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that a scale of a whole matrix may have; the layout's own first."""
    shapes = [(*front, *one) for one in (layout.one, (1,), (), (1, 1))]
    return tuple(dict.fromkeys(shapes))


def unsupported_columns(layout: Layout, k: int) -> str:
    """Return why a weight of `k` columns cannot be in a layout; empty if it can."""
    columns = layout.quantizer.block[1]
    if layout.quantizer.fmt is E2M1 and columns is not None and k % columns:
        return f"its {k} columns are no multiple of {columns}"
    return ""


def in_memory(layout: Layout, tensors: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """Return codes, scales [..., rows, columns] and the second level [..., 1] as a weight has them in memory."""
    codes, scale, *level2 = tensors
    *lead, n, k = shape
    rows, columns = layout.quantizer.block
    if layout.unpacks:
        codes = E4M3.encode(E2M1.decode(unpack_nibbles(codes.flatten(-2)))[..., :k])
    grid = *lead, 1 if rows is None else -(-n // rows), 1 if columns is None else -(-k // columns)
    found = [codes.view(torch.uint8), _wide_scale(layout, scale).reshape(grid)]
    for each in level2:
        value = each.float().reshape(*lead, 1)
        found.append(torch.ones_like(value) / value if layout.divides else value)
    return found


def in_memory_part(layout: Layout, suffix: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return one tensor of a file as it is in memory, without the others."""
    if suffix == layout.codes:
        return tensor.view(torch.uint8)
    if suffix == layout.scale:
        return _wide_scale(layout, tensor).reshape(-1)
    value = tensor.float().reshape(-1)
    return torch.ones_like(value) / value if layout.divides else value


def unsupported_refinement(spec: Quantizer, layout: Layout) -> str:
    """Return why codes of a quantizer cannot be in a layout; empty if they can: a layout with smaller blocks repeats
    scales, and changes no value."""
    other = layout.quantizer
    if layout.unpacks:
        return "Octavo reads this layout, and does not write it"
    if (spec.fmt, spec.scale_format, spec.two_level, spec.basis) != (
        other.fmt,
        other.scale_format,
        other.two_level,
        other.basis,
    ):
        return f"the layout has codes of {other}"
    blocks = zip(other.block, spec.block, strict=True)
    if not all(theirs is None or (ours is not None and theirs % ours == 0) for ours, theirs in blocks):
        return f"the layout has scales for blocks of {_size(other)}, and these codes for {_size(spec)}"
    if layout.pow2 and not getattr(spec, "pow2", False):
        return "the layout has powers of two as scales"
    return ""


def _size(spec: Quantizer) -> str:
    return " x ".join("all" if size is None else str(size) for size in spec.block)


def refined(parts: Sequence[Tensor], spec: Quantizer, layout: Layout, shape: Sequence[int]) -> list[Tensor]:
    """Return the parts of a weight with its scales repeated for the layout's smaller blocks."""
    codes, scale, *level2 = parts
    for dim, ours, theirs in zip((-2, -1), layout.quantizer.block, spec.block, strict=True):
        if ours != theirs and ours is not None:
            blocks = torch.arange(-(-shape[dim] // ours), device=scale.device, dtype=torch.int64)
            scale = scale.index_select(dim, blocks * ours // theirs if theirs is not None else blocks * 0)
    return [codes, scale, *level2]


def _wide_scale(layout: Layout, scale: Tensor) -> Tensor:
    """Return a scale of a file as float32, or as the bytes of the quantizer's format."""
    is_bytes = scale.element_size() == 1
    if layout.quantizer.scale_format is not None:
        return scale.view(torch.uint8)
    return E8M0.decode(scale.view(torch.uint8)) if is_bytes else scale.float()


def in_file(layout: Layout, parts: Sequence[Tensor], shape: Sequence[int], dtype: str = "") -> dict[str, Tensor]:
    """Return the tensors of a weight by what follows its name. `dtype` is that of scales in the file that the weight
    came from: they get it again if it holds them exactly."""
    whole = expected(layout, shape)
    codes, scale, *level2 = parts
    found = {layout.codes: codes.view(DTYPES[whole[0].dtypes[0]]).reshape(whole[0].shapes[0])}
    found[layout.scale] = _file_scale(layout, scale, dtype or layout.scale_dtypes[0]).reshape(whole[1].shapes[0])
    for each in level2:
        value = torch.ones_like(each) / each if layout.divides else each
        found[layout.level2] = value.reshape(whole[2].shapes[0])
    return found


def _file_scale(layout: Layout, scale: Tensor, dtype: str) -> Tensor:
    if layout.quantizer.scale_format is not None:
        return scale.contiguous().view(DTYPES[dtype])
    if dtype in BYTES:
        coded = E8M0.encode(scale)
        if torch.equal(E8M0.decode(coded), scale):
            return coded.view(DTYPES[dtype])
        dtype = FLOATS[0]
    narrow = scale.to(DTYPES[dtype])
    return narrow if torch.equal(narrow.float(), scale) else scale


def check_scales(layout: Layout, name: str, scale: Tensor) -> None:
    """Raise for scales that no program writes: NaN, Inf, negative ones, and those that are no powers of two in a layout
    that has no others."""
    wide = _wide_scale(layout, scale)
    spec = layout.quantizer
    if spec.scale_format is not None:
        wide = spec.scale_format.decode(wide)
    why = "" if bool(wide.isfinite().all()) and bool((wide >= 0).all()) else "a scale that is not finite, or negative"
    if not why and layout.pow2 and not torch.equal(E8M0.decode(E8M0.encode(wide)), wide):
        why = f"a scale that is no power of two, which {layout.name} has"
    if why:
        raise InvalidCheckpoint(
            f"{name} has {why}. Its weight would be nonsense. Get the file again, or name another layout=."
        )
