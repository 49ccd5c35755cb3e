"""A tile in both orientations, in Gluon. If scales follow from blocks along the contraction, each orientation needs
whole blocks within a few threads; plain Triton would reduce across warps and transpose the tile byte by byte.

The kernel loads a tile with sixteen neighbours of a row per thread, eight threads per 128 columns. The transpose goes
through shared memory once, still in two-byte elements, into that same layout. From there on the two orientations share
the same code: a block's amax takes sixteen values in a thread and at most three shuffles, and each thread writes
sixteen codes. With one scale for all, small tiles transpose the codes themselves (`store_transposed`): each is made
once, and half the bytes pass through shared memory. Elementwise helpers are plain Triton (`octavo.quant.tile`), which
Gluon compiles as its own.

Measured on an H200, both orientations of 16384x8192 bfloat16: 1x128 blocks 0.25 ms in plain Triton, 0.144 here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.quant.tile import named_rows


@gluon.constexpr_function
def row_layout(columns, warps):
    """Return a layout with sixteen neighbours of a row per thread, and the rows spread over the warps."""
    across = min(columns // 16, 32)
    return gl.BlockedLayout([1, 16], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def load_tile(x, M, K, stride_m, stride_k, first_row, first_column, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Return x[first_row:, first_column:] as [R, C] in its own dtype; zero outside."""
    layout: gl.constexpr = row_layout(C, W)
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    at = rows.to(gl.int64)[:, None] * stride_m + columns.to(gl.int64)[None, :] * stride_k
    return gl.load(x + at, mask=(rows < M)[:, None] & (columns < K)[None, :], other=0.0)


@gluon.jit
def gather_tile(
    x, gather, M, height, K, stride_m, stride_k, first_row, first_column,
    R: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Return x[gather[first_row:], first_column:] as [R, C] in its own dtype; zero outside, and where x has no such
    row."""
    layout: gl.constexpr = row_layout(C, W)
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    named, there = named_rows(gather, rows, M, height)
    at = named.to(gl.int64)[:, None] * stride_m + columns.to(gl.int64)[None, :] * stride_k
    return gl.load(x + at, mask=there[:, None] & (columns < K)[None, :], other=0.0)


@gluon.jit
def transpose(v, R: gl.constexpr, W: gl.constexpr):
    """Return the transpose [C, R] of v [R, C], laid out like any other tile."""
    return gl.convert_layout(gl.permute(v, (1, 0)), row_layout(R, W))


@gluon.jit
def only(values, rows, columns):
    """Return the first `rows` and `columns` of values [R, C]; zero elsewhere, whatever an inverse scale of NaN made of
    it."""
    layout: gl.constexpr = values.type.layout
    is_row = gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, layout)) < rows
    is_column = gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout)) < columns
    return gl.where(is_row[:, None] & is_column[None, :], values, 0.0)


@gluon.jit
def store_codes(codes, values, M, K, first_row, first_column, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Store values [R, C] to codes[first_row:, first_column:] of a contiguous [M, K]."""
    store_codes_inside(codes, values, M, K, K, first_row, first_column, R, C, W)


@gluon.jit
def store_codes_inside(
    codes, values, M, K, pitch, first_row, first_column, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Store values as `store_codes` does where only the first K of `pitch` columns may be written: tiles of what is
    beside them would overlap."""
    layout: gl.constexpr = row_layout(C, W)
    rows = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    at = rows.to(gl.int64)[:, None] * pitch + columns[None, :]
    quantized = gl.convert_layout(values.to(codes.dtype.element_ty), layout)
    gl.store(codes + at, quantized, mask=(rows < M)[:, None] & (columns < K)[None, :])


@gluon.constexpr_function
def _pair_layout(columns, warps):
    """Return `row_layout` for pairs of neighbours: eight per thread."""
    across = min(columns // 16, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _transposed_layout(rows, columns, warps):
    """Return a layout of [columns / 2, rows] with up to sixteen neighbours of a row per thread, so that no thread is
    idle."""
    each = max(4, min(16, rows * columns // (64 * warps)))
    across = min(rows // each, 32)
    return gl.BlockedLayout([1, each], [32 // across, across], [warps, 1], [1, 0])


_BYTES_APART = gl.constexpr("prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;")  # of four pairs


@gluon.jit
def store_transposed(codes, values, M, K, first_row, first_column, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Store codes of values [R, C], transposed, to codes[first_row:, first_column:] of a contiguous [M, K]. They pass
    through shared memory as pairs of neighbours, in the two bytes that ldmatrix transposes; after that a thread has the
    pairs of two neighbouring columns, and takes them apart. A version of Triton may compile this wrong for some sizes:
    `octavo.quant.tensorwise.triton.transposes_codes` says for which it was right."""
    left, right = gl.split(gl.reshape(values.to(gl.uint8, bitcast=True), (R, C // 2, 2)))
    pairs = gl.convert_layout(left.to(gl.uint16) | (right.to(gl.uint16) << 8), _pair_layout(C, W))
    layout: gl.constexpr = _transposed_layout(R, C, W)
    transposed = gl.convert_layout(gl.permute(pairs, (1, 0)), layout)
    rows = first_row + 2 * gl.arange(0, C // 2, layout=gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, R, layout=gl.SliceLayout(0, layout))
    at = rows.to(gl.int64)[:, None] * K + columns[None, :]
    kind: gl.constexpr = codes.dtype.element_ty
    inside = (columns < K)[None, :]
    even, odd = gl.inline_asm_elementwise(
        _BYTES_APART, "=r,=r,r,r", [transposed], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    gl.store(codes + at, even.to(kind, bitcast=True), mask=(rows < M)[:, None] & inside)
    gl.store(codes + at + K, odd.to(kind, bitcast=True), mask=(rows + 1 < M)[:, None] & inside)
