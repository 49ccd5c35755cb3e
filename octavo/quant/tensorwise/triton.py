"""Tensorwise on the GPU: one pass for the amax when the scale comes from the data, one for the cast."""

from functools import cache, lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo._torch.cuda import is_capturing
from octavo._torch.fast_paths import FastPath, Undecided
from octavo.launch import Launch, apart
from octavo.quant import dual, fp8_words, tile
from octavo.quant.casts import empty_pair
from octavo.quant.groups import Groups
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.tile import (
    Config,
    Sizes,
    amax_bits,
    divide,
    group_of,
    group_tile,
    inverse_scale_from,
    raise_amax,
    tile_index,
)

CONFIGS = (Config(128, 128, 8), Config(64, 128, 4))
_INF = gl.constexpr(0x7F800000)  # bits of float32; those of NaN are above


@gluon.jit
def multiplier(amax, inverse_scale, g, MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr):
    """Return (inverse scale, its reciprocal) of a group, or of all."""
    if inverse_scale is not None:
        s = gl.load(inverse_scale + g)
        undo = divide(1.0, s)
    else:
        s, undo = inverse_scale_from(gl.load(amax + g), MAX, EPS, CEILING, POW2)
    return s, undo


@gluon.jit
def store_scale(row_scale, column_scale, g, undo):
    if row_scale is not None:
        gl.store(row_scale + g, undo)
    if column_scale is not None:
        gl.store(column_scale + g, undo)


@gluon.jit
def store_given_scale(row_scale, column_scale, inverse_scale, s):
    """Store the scale of an inverse scale that was given for the whole tensor. A kernel with several loads calls it
    after them and before the first use of what they bring. It is a branch, and a load before a branch stays there: else
    ptxas moves loads down to where their values are needed, and a program waits for memory several times."""
    if inverse_scale is not None:
        if gl.program_id(0) == 0:
            store_scale(row_scale, column_scale, 0, divide(1.0, s))


@gluon.jit
def _store_tile(
    v, s, largest, row, column, M, K, pitch, first_row, first_column,
    GIVEN: gl.constexpr, TRANSPOSE_CODES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Store the codes of v, in the orientations that are there; `pitch` is how far apart rows of `row` are. By an
    inverse scale that was GIVEN, an Inf stays visible in its code; by one that was measured it saturates, and the scale
    is NaN. `largest` is None or the bits of v's amax: if that is finite, no code of E5M2 is compared with Inf."""
    kind: gl.constexpr = row.dtype.element_ty if row is not None else column.dtype.element_ty
    if GIVEN and (largest is not None) and (kind == gl.float8e5):
        if largest < _INF:
            _store_codes(
                v, s, row, column, M, K, pitch, first_row, first_column, kind, False, TRANSPOSE_CODES,
                ROWS, COLUMNS, W,
            )  # fmt: skip
        else:
            _store_codes(
                v, s, row, column, M, K, pitch, first_row, first_column, kind, True, TRANSPOSE_CODES,
                ROWS, COLUMNS, W,
            )  # fmt: skip
    else:
        _store_codes(
            v, s, row, column, M, K, pitch, first_row, first_column, kind, GIVEN, TRANSPOSE_CODES,
            ROWS, COLUMNS, W,
        )  # fmt: skip


@gluon.jit
def _store_codes(
    v, s, row, column, M, K, pitch, first_row, first_column,
    kind: gl.constexpr, GIVEN: gl.constexpr, TRANSPOSE_CODES: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    codes = fp8_words.cast(v, s, kind, GIVEN)
    if row is not None:
        dual.store_codes_inside(row, codes, M, K, pitch, first_row, first_column, ROWS, COLUMNS, W)
    if column is not None:
        # one scale: the other orientation has the same codes
        if TRANSPOSE_CODES:
            dual.store_transposed(column, codes, K, M, first_column, first_row, ROWS, COLUMNS, W)
        else:
            transposed = fp8_words.cast(dual.transpose(v, ROWS, W), s, kind, GIVEN)
            dual.store_codes(column, transposed, K, M, first_column, first_row, COLUMNS, ROWS, W)


@gluon.jit
def put(
    v, row, column, row_scale, column_scale, s, running_amax, M, K, pitch, first_row, first_column,
    row_stride, row_block_stride, column_stride, column_block_stride,
    RULE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Cast a tile (`octavo.kernels.tile_cast`) as `_cast_kernel` does, once the inverse scale s is known. RULE: whether
    it was given, how an inverse scale follows from an amax, and whether codes are transposed or values. The kernel
    stores the scales itself."""
    largest = None
    if running_amax is not None:
        largest = amax_bits(v)
        raise_amax(running_amax, largest)
    _store_tile(
        v, s, largest, row, column, M, K, pitch, first_row, first_column, RULE[0], RULE[5], ROWS, COLUMNS, W
    )  # fmt: skip


@gluon.jit
def measure(
    v, row, column, row_scale, column_scale, s, running_amax, M, K, pitch, first_row, first_column,
    row_stride, row_block_stride, column_stride, column_block_stride,
    RULE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Raise the amax that the inverse scale follows from: in place of a tile cast, in a pass before it."""
    raise_amax(running_amax, amax_bits(v))


@gluon.jit
def _cast_kernel(
    x, row, column, row_scale, column_scale, amax, inverse_scale, running_amax, skip, owner, source, live, gather,
    M, K, stride_m, stride_k, height,
    MAX: gl.constexpr, EPS: gl.constexpr, CEILING: gl.constexpr, POW2: gl.constexpr, GROUPS: gl.constexpr,
    TRANSPOSE_CODES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    if skip is not None:
        if gl.load(skip) != 0:
            return
    pm, pk = tile_index(K, COLUMNS)
    first, end, g = pm * ROWS, M, 0
    if owner is not None:
        if pk == 0:  # a group without rows has a scale too, and no tile: the tiles share out the groups
            for i in range(pm, GROUPS, gl.maximum(gl.cdiv(M, ROWS), 1)):
                _, undo = multiplier(amax, inverse_scale, i, MAX, EPS, CEILING, POW2)
                store_scale(row_scale, column_scale, i, undo)
        first, end, used = group_tile(source, live, pm * ROWS, M)
        if used == 0:
            return
        g = group_of(owner, pm * ROWS)
    if gather is None:
        v = dual.load_tile(x, end, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
    else:
        v = dual.gather_tile(x, gather, end, height, K, stride_m, stride_k, first, pk * COLUMNS, ROWS, COLUMNS, W)
    s, undo = multiplier(amax, inverse_scale, g, MAX, EPS, CEILING, POW2)
    if owner is None:  # before the amax, so that all loads are before a branch: see `store_given_scale`
        if gl.program_id(0) == 0:
            store_scale(row_scale, column_scale, 0, undo)
    largest = None
    if running_amax is not None:
        largest = amax_bits(v)
        raise_amax(running_amax + g, largest)
    _store_tile(
        v, s, largest, row, column, M, K, K, pm * ROWS, pk * COLUMNS, inverse_scale is not None, TRANSPOSE_CODES,
        ROWS, COLUMNS, W,
    )  # fmt: skip


def amax(
    x: Tensor,
    row: Quantizer | None,
    column: Quantizer | None,
    skip: Tensor | None,
    groups: Groups | None = None,
    source: Tensor | None = None,
) -> AmaxPair:
    found = tile.tensor_amax(x, skip, groups=groups, source=source)
    return (None if row is None else found), (None if column is None else found)


def cast(
    x: Tensor, row: QTensor | None, column: QTensor | None, cast_args: CastArgs, config: Config = CONFIGS[0],
    transpose_codes: bool | None = None,
) -> None:  # fmt: skip
    """Fill row and column. `transpose_codes` says how the columns are made; None is as `transposes_codes` says."""
    lead = column if row is None else row
    assert lead is not None
    found = None if cast_args.inverse_scale is not None else cast_args.amax[0] if row is not None else cast_args.amax[1]
    if row is not None and column is not None and found is not None and found is not cast_args.amax[1]:
        # the caller gave two amaxes: each orientation keeps its own scale
        cast(x, row, None, cast_args, config, transpose_codes)
        cast(x, None, column, cast_args, config, transpose_codes)
        return
    if transpose_codes is None:
        transpose_codes = column is not None and transposes_codes(config, x.device)
    groups, source = cast_args.groups, cast_args.source
    shape, height = tile.shape_inside(x, groups), tile.height_of(x, source)
    _cast_launch(lead.spec, shape, x.stride(), height, tile.number_of(groups), config, transpose_codes)(
        x, *tile.codes_and_scales(row, column), found, cast_args.inverse_scale, cast_args.running_amax, cast_args.skip,
        *tile.pointers_of(groups), source,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _cast_launch(
    spec: Quantizer, shape: Sizes, strides: Sizes, height: int | None, groups: int, config: Config,
    transpose_codes: bool,
) -> Launch:  # fmt: skip
    assert isinstance(spec, Tensorwise)
    constants = {**tile.rule(spec), "GROUPS": groups, "TRANSPOSE_CODES": transpose_codes}
    return tile.launch(_cast_kernel, shape, (*strides, height), config, **constants)


def is_transposable(config: Config) -> bool:
    """Return whether `dual.store_transposed` is meant for tiles of this size. Triton 3.6 writes wrong bytes for tiles
    of 128 rows, for 64x32 on 4 warps and for 64x128 on 16."""
    return config.rows <= 64 and config.columns >= 64 and config.warps <= 8


def transposes_codes(config: Config, device: torch.device) -> bool:
    """Return whether the columns of a tile of this size are the transposed codes of its rows, rather than codes of
    transposed values: both write the same bytes. The first question about a size runs a cast each way, which stands for
    all kernels with such tiles. Caches of launches take the answer as an argument: while a graph is captured it is
    no."""
    return is_transposable(config) and _transposed_codes(config, device).is_on()


@cache
def _transposed_codes(config: Config, device: torch.device) -> FastPath:
    return FastPath(
        f"casts on {device} that transpose codes, in tiles of {config.rows}x{config.columns} on {config.warps} warps",
        "Casts with one scale transpose values instead, to the same bits and up to a third slower.",
        lambda: _check_transposed_codes(config, device),
        lambda: str(triton.__version__),
    )


def _check_transposed_codes(config: Config, device: torch.device) -> str:
    """Compare the columns that both ways write, at the edges of a matrix too."""
    if is_capturing():
        raise Undecided
    with apart():
        shape = 3 * config.rows + 5, 2 * config.columns + 24
        x = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), dtype=torch.bfloat16, device=device)
        args = CastArgs(inverse_scale=torch.full((1,), 64.0, dtype=torch.float32, device=device))
        made = []
        for transpose_codes in (False, True):
            row, column = empty_pair(x, (Tensorwise(), Tensorwise()))
            cast(x, row, column, args, config, transpose_codes)
            assert row is not None and column is not None
            made.append([q.codes.view(torch.uint8) for q in (row, column)])
        same = all(torch.equal(a, b) for a, b in zip(*made, strict=True)) and torch.equal(made[0][0].T, made[1][1])
    return "" if same else f"Triton {triton.__version__} writes wrong bytes"
