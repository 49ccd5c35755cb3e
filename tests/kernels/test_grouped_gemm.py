"""Grouped GEMMs: on a CPU each group is `gemm` of its own operands, bit for bit; on a GPU within the bound of FP8
tensor cores, the same bits at every run, and the same as the group has alone."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from octavo import backend
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.formats import E5M2
from octavo.kernels import grouped_gemm
from octavo.kernels.gemm import gemm
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise
from octavo.quant.grouped import member, quantize_groups
from octavo.quant.groups import Groups, split
from tests.support.grouped_products import (
    BLOCKS,
    DTYPES,
    SENTINEL,
    STEP,
    Layer,
    Scheme,
    alone,
    assert_all_within,
    assert_within,
    dgrad,
    fprop,
    layer,
    made,
    randn,
    spoiled,
    stacked,
    up,
    values,
    wgrad,
)
from tests.support.pairs import pairs, turns
from tests.support.ragged_groups import SPLITS, layout, many, pieces
from tests.support.same_tensors import assert_exact
from tests.support.waiting import no_waiting

OTHERS = {
    "tensorwise": Scheme(Tensorwise(), Tensorwise(), Tensorwise(E5M2)),
    "rowwise": Scheme(Rowwise(), Rowwise(), Rowwise(E5M2)),
    "mixed": Scheme(Rowwise(), Tensorwise(), Tensorwise(E5M2)),
    "mx": Scheme(MX(), MX(), MX(E5M2)),
    "mx-square": Scheme(MX(), MX(square=True), MX()),
    "nvfp4": Scheme(NVFP4(), NVFP4(square=True), NVFP4()),
    "nvfp4-rht": Scheme(NVFP4(rht=True), NVFP4(rht=True), NVFP4(rht=True)),
    "fine-weights": Scheme(Block1D(), Block1D(), Block1D()),
}
schemes = pytest.mark.parametrize("scheme", OTHERS.values(), ids=OTHERS)


# N below, at and above a multiple of 128, stacked closely or not; K odd
SHAPES = [(128, 128, 128), (100, 40, 128), (130, 129, 256), (128, 33, 256), (256, 300, 256), (1, 1, 128), (40, 16, 384)]
shapes = pytest.mark.parametrize(("n", "k", "height"), SHAPES)
splits = pytest.mark.parametrize("sizes", SPLITS, ids=str)
FEW = [[65, 128, 0, 97], [0, 3, 200]]


# -- on a CPU: each group is gemm of its own ---------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", FEW, ids=str)
@shapes
def test_fprop_is_gemm_of_each_group(sizes, n, k, height):
    found = spoiled(layer(sizes, n, k, height=height))
    bias = randn(len(sizes), n)
    for dtype in DTYPES:
        for b in (None, bias):
            want = [
                gemm(Block1D().quantize(x), Block2D().quantize(w), out_dtype=dtype, bias=None if b is None else b[g])
                for g, (x, _, w) in enumerate(alone(found))
            ]
            assert_exact(fprop(found, dtype, b)[: found.end], torch.cat(want))


@pytest.mark.parametrize("sizes", FEW, ids=str)
@shapes
def test_dgrad_is_gemm_of_each_group(sizes, n, k, height):
    found = spoiled(layer(sizes, n, k, height=height))
    for dtype in DTYPES:
        want = [
            gemm(Block1D().quantize(dy), Block2D().quantize(w, axis=0), out_dtype=dtype) for _, dy, w in alone(found)
        ]
        assert_exact(dgrad(found, dtype)[: found.end], torch.cat(want))


@pytest.mark.parametrize("sizes", FEW, ids=str)
@shapes
def test_wgrad_is_gemm_of_each_group(sizes, n, k, height):
    found = spoiled(layer(sizes, n, k, height=height))
    for dtype in DTYPES:
        want = [
            gemm(Block1D().quantize(dy, axis=0), Block1D().quantize(x, axis=0), out_dtype=dtype)
            for x, dy, _ in alone(found)
        ]
        assert_exact(wgrad(found, dtype), torch.stack(want))


@splits
@pytest.mark.parametrize(("scale", "dy_fmt"), [("fp32", None), ("pow2", E5M2)], ids=str)
def test_every_split_and_setting(sizes, scale, dy_fmt):
    found = spoiled(layer(sizes, 48, 130, scale=scale, dy_fmt=dy_fmt))
    fine, coarse = Block1D(scale=scale), Block2D(scale=scale)
    steep = fine if dy_fmt is None else Block1D(dy_fmt, scale)
    y, dx, dw = fprop(found), dgrad(found), wgrad(found)
    of_y, of_dx = pieces(y, sizes), pieces(dx, sizes)
    for g, (x, dy, w) in enumerate(alone(found)):
        assert_exact(of_y[g], gemm(fine.quantize(x), coarse.quantize(w)))
        assert_exact(of_dx[g], gemm(steep.quantize(dy), coarse.quantize(w, axis=0)))
        assert_exact(dw[g], gemm(steep.quantize(dy, axis=0), fine.quantize(x, axis=0)))


def test_a_bias_is_added_in_float32_before_the_one_rounding():
    found = layer([65, 0, 97], 48, 130)
    bias = randn(3, 48) * 1000
    exact = fprop(found, torch.float32)
    for part, b, got in zip(
        pieces(exact, [65, 0, 97]), bias, pieces(fprop(found, bias=bias), [65, 0, 97]), strict=True
    ):
        assert_exact(got, (part + b.float()).bfloat16())


@schemes
@pytest.mark.parametrize("sizes", FEW, ids=str)
@pytest.mark.parametrize(("n", "k", "height"), [(128, 128, 128), (48, 208, 128), (144, 32, 256)])
def test_every_scheme_is_gemm_of_each_group(scheme, sizes, n, k, height):
    found = spoiled(layer(sizes, n, k, height=height, scheme=scheme))
    fine, coarse, steep = scheme
    y, dx, dw = fprop(found), dgrad(found), wgrad(found)
    of_y, of_dx = pieces(y, sizes), pieces(dx, sizes)
    for g, (x, dy, w) in enumerate(alone(found)):
        assert_exact(of_y[g], gemm(fine.quantize(x), coarse.quantize(w)))
        assert_exact(of_dx[g], gemm(steep.quantize(dy), coarse.quantize(w, axis=0)))
        if sizes[g]:
            assert_exact(dw[g], gemm(steep.quantize(dy, axis=0), fine.quantize(x, axis=0)))
        else:
            assert not dw[g].any() and not dw[g].signbit().any()
    held = randn(*dw.shape)
    assert_exact(wgrad(found, out=held.clone(), accumulate=True), held + dw)


@schemes
@pytest.mark.parametrize(("n", "k"), [(41, 35), (130, 120), (200, 300)])
def test_codes_may_have_rows_and_columns_more_than_the_result(scheme, n, k):
    """Operands are filled up with zeros to multiples of 16; y, dx and dw have none of that."""
    sizes = [65, 0, 130]
    wide = [F.pad(t, (0, -t.shape[-1] % 16)) for t in (randn(195, k), randn(195, n))]
    w = randn(3, n, k)
    found = made(sizes, *wide, F.pad(w, (0, -k % 16)), up(n), scheme)
    y, dx, dw = torch.zeros(195, n), torch.zeros(195, k), torch.zeros(3, n, k)
    grouped_gemm.rows(found.x_both[0], found.w_both[0], y, height=up(n))
    grouped_gemm.rows(found.dy_both[0], found.w_both[1], dx, height=up(n), along="columns")
    grouped_gemm.grouped_wgrad(found.dy_both[1], found.x_both[1], dw)
    fine, coarse, steep = scheme
    x_parts, dy_parts = pieces(wide[0], sizes), pieces(wide[1], sizes)
    for g in (0, 2):
        down, across = F.pad(w[g], (0, -k % 16)), F.pad(w[g], (0, -k % 16, 0, -n % 16))
        whole = gemm(steep.quantize(dy_parts[g], axis=0), fine.quantize(x_parts[g], axis=0), out_dtype=torch.float32)
        assert_exact(pieces(y, sizes)[g], gemm(fine.quantize(x_parts[g]), coarse.quantize(down), out_dtype=y.dtype))
        to_x = gemm(steep.quantize(dy_parts[g]), coarse.quantize(across, axis=0), out_dtype=y.dtype)
        assert_exact(pieces(dx, sizes)[g], to_x[:, :k].contiguous())
        assert_exact(dw[g], whole[:n, :k].contiguous())


@schemes
def test_accumulation_is_a_permission_that_the_reference_does_not_use(scheme):
    found = spoiled(layer([65, 0, 97], 48, 208, scheme=scheme))
    assert_exact(fprop(found, how="fast"), fprop(found))
    assert_exact(dgrad(found, how="fast"), dgrad(found))


def test_another_accumulation_is_refused():
    with pytest.raises(UnsupportedConfig, match="accumulation must be one of 'fast', 'precise', got 'exact'"):
        fprop(layer([3, 5], 128, 128), how="exact")


@pytest.mark.parametrize(
    ("n", "blocks", "wide"),
    [(4096, 128, True), (1160, 128, True), (768, 128, True), (640, 128, False), (2048, 8, False), (2048, 17, True)],
)
def test_the_tile_of_a_fast_sum_is_wide_unless_that_wastes_columns_or_processors(n, blocks, wide):
    pytest.importorskip("triton")
    from octavo.kernels.grouped_gemm.hopper.fast_row_groups import fast_tile

    assert fast_tile(n, blocks, 132) == ((256, 4) if wide else (128, 6))


@splits
@pytest.mark.parametrize("kind", DTYPES, ids=str)
def test_a_bias_is_scaled_row_by_row(sizes, kind):
    found = spoiled(layer(sizes, 48, 130))
    bias, scales = randn(len(sizes), 48), torch.rand(found.x.shape[0]).to(kind)
    scales[found.end :] = float("nan")
    exact, y = fprop(found, torch.float32), fprop(found, bias=bias, scales=scales)
    for part, b, s, got in zip(
        pieces(exact, sizes), bias, pieces(scales[:, None], sizes), pieces(y, sizes), strict=True
    ):
        assert_exact(got, (part + s.float() * b.float()).bfloat16())
    assert (y[found.end :] == SENTINEL).all()
    assert_exact(fprop(found, scales=scales), fprop(found))


@splits
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_groups_are_gemm_of_each(sizes, dtype):
    rows, count = sum(sizes) + 40, len(sizes)
    x, dy, w = randn(rows, 35, dtype=dtype), randn(rows, 21, dtype=dtype), randn(count, 21, 35, dtype=dtype)
    x[sum(sizes) :] = dy[sum(sizes) :] = float("nan")
    bias, scales, groups = randn(count, 21), torch.rand(rows), split(torch.tensor(sizes), rows)
    y, dx = torch.full((rows, 21), SENTINEL, dtype=dtype), torch.full((rows, 35), SENTINEL, dtype=dtype)
    assert grouped_gemm.plain_rows(x, w, y, groups, bias, scales) is y
    assert grouped_gemm.plain_rows(dy, w.transpose(1, 2), dx, groups) is dx
    dw = grouped_gemm.plain_wgrad(dy, x, torch.full((count, 21, 35), float("nan"), dtype=dtype), groups)
    main_grad = grouped_gemm.plain_wgrad(dy, x, torch.ones(count, 21, 35), groups, accumulate=True)
    for g, (xg, dyg, sg) in enumerate(
        zip(pieces(x, sizes), pieces(dy, sizes), pieces(scales[:, None], sizes), strict=True)
    ):
        exact = gemm(xg, w[g], out_dtype=torch.float32)
        assert_exact(pieces(y, sizes)[g], (exact + sg * bias[g].float()).to(dtype))
        assert_exact(pieces(dx, sizes)[g], gemm(dyg, w[g].T))
        assert_exact(dw[g], gemm(dyg.T, xg.T))
        assert_exact(main_grad[g], 1 + gemm(dyg.T, xg.T, out_dtype=torch.float32))
    assert (y[sum(sizes) :] == SENTINEL).all() and (dx[sum(sizes) :] == SENTINEL).all()


def test_plain_groups_of_nothing():
    for sizes, n, k in (([0, 0], 5, 3), ([2, 1], 0, 3), ([2, 1], 5, 0)):
        groups, rows = split(torch.tensor(sizes), sum(sizes)), sum(sizes)
        y = grouped_gemm.plain_rows(torch.ones(rows, k), torch.ones(2, n, k), torch.ones(rows, n), groups)
        assert_exact(y, torch.full((rows, n), float(k)))
        dw = grouped_gemm.plain_wgrad(torch.ones(rows, n), torch.ones(rows, k), torch.full((2, n, k), SENTINEL), groups)
        assert_exact(dw, torch.tensor(sizes)[:, None, None].float().expand(2, n, k).contiguous())
        held = torch.full((2, n, k), SENTINEL)
        grouped_gemm.plain_wgrad(torch.ones(rows, n), torch.ones(rows, k), held, groups, accumulate=True)
        assert_exact(held, dw + SENTINEL)


@splits
def test_the_tail_of_out_keeps_what_it_held(sizes):
    found = spoiled(layer(sizes, 48, 130))
    for sentinel in (SENTINEL, float("nan")):
        for make, columns in ((fprop, 48), (dgrad, 130)):
            out = torch.full((found.x.shape[0], columns), sentinel)
            assert make(found, out=out) is out
            assert torch.equal(out[found.end :].nan_to_num(-1), torch.full((40, columns), sentinel).nan_to_num(-1))
            assert out[: found.end].isfinite().all()


def test_out_may_be_a_view_into_a_larger_allocation():
    found = layer([65, 0, 97], 48, 130)
    whole = torch.full((300, 48), SENTINEL, dtype=torch.bfloat16)
    y = fprop(found, out=whole[50 : 50 + 202])
    assert y.data_ptr() == whole[50].data_ptr()
    assert_exact(whole[50 : 50 + 162], fprop(found)[:162])
    assert (whole[:50] == SENTINEL).all() and (whole[50 + 162 :] == SENTINEL).all()


@splits
def test_an_empty_group_has_exact_zeros_and_adds_nothing(sizes):
    found = spoiled(layer(sizes, 48, 130))
    for dtype in DTYPES:
        dw, held = wgrad(found, dtype), randn(len(sizes), 48, 130, dtype=dtype)
        added = wgrad(found, out=held.clone(), accumulate=True)
        assert_exact(added, held + dw)
        for g, size in enumerate(sizes):
            if size == 0:
                assert not dw[g].any() and not dw[g].signbit().any()
                assert_exact(added[g], held[g])
        over_nan = wgrad(found, out=torch.full_like(held, float("nan")))
        assert_exact(over_nan, dw)


@splits
def test_zero_tail_zeros_the_tail_and_nothing_else(sizes):
    groups = split(torch.tensor(sizes), sum(sizes) + 40)
    for dtype in DTYPES:
        out = torch.full((sum(sizes) + 40, 33), float("nan"), dtype=dtype)
        grouped_gemm.zero_tail(out, groups)
        assert out[: sum(sizes)].isnan().all()
        assert not out[sum(sizes) :].any()
    full = torch.full((sum(sizes), 3), SENTINEL)
    grouped_gemm.zero_tail(full, split(torch.tensor(sizes), sum(sizes)))
    assert (full == SENTINEL).all()


@splits
def test_column_sums_are_each_groups_own(sizes):
    dy = randn(sum(sizes) + 40, 33)
    dy[sum(sizes) :] = float("nan")
    groups = split(torch.tensor(sizes), dy.shape[0])
    want = torch.stack([part.double().sum(0) for part in pieces(dy, sizes)])
    for dtype in DTYPES:
        assert_exact(grouped_gemm.column_sums_of(dy, groups, dtype), want.to(dtype))
        assert_exact(grouped_gemm.column_sums_of(dy.T.contiguous().T, groups, dtype), want.to(dtype))
    row, counts = randn(1, 33), torch.tensor(sizes).double()[:, None]
    sums = grouped_gemm.column_sums_of(row.expand(dy.shape), groups, torch.float32)
    assert_exact(sums, (counts * row.double()).float())


@splits
def test_sums_of_scaled_rows_and_products_with_the_bias(sizes):
    rows, count = sum(sizes) + 40, len(sizes)
    dy, scales, bias, groups = randn(rows, 33), torch.rand(rows), randn(count, 33), split(torch.tensor(sizes), rows)
    dy[sum(sizes) :] = scales[sum(sizes) :] = float("nan")
    scaled = dy.double() * scales.double()[:, None]
    want = torch.stack([part.sum(0) for part in pieces(scaled, sizes)])
    products = [part.double() @ b.double() for part, b in zip(pieces(dy, sizes), bias, strict=True)]
    for dtype in DTYPES:
        assert_exact(grouped_gemm.column_sums_of(dy, groups, dtype, scales), want.to(dtype))
        found = grouped_gemm.bias_products(dy, bias, groups, dtype)
        assert_exact(found[: sum(sizes)], torch.cat(products).to(dtype))
        assert found.shape == (rows,) and not found[sum(sizes) :].any()


def test_no_rows_or_features_give_empty_products():
    for sizes, n, k in (([0], 48, 32), ([0, 0], 48, 32), ([0], 0, 32), ([3, 4], 0, 32)):
        found = layer(sizes, n, k, spare=0, height=128)
        assert fprop(found).shape == (sum(sizes), n)
        assert dgrad(found).shape == (sum(sizes), k)
        assert_exact(wgrad(found)[:, :, :0], torch.zeros(len(sizes), n, 0, dtype=torch.bfloat16))
        if sum(sizes) == 0:
            assert not wgrad(found).any()
        grouped_gemm.zero_tail(torch.empty(0, n), found.groups)
        assert grouped_gemm.column_sums_of(found.dy, found.groups, torch.float32).shape == (len(sizes), n)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [Tensorwise(), Rowwise(), MX(), NVFP4()], ids=str)
def test_operands_that_are_scaled_differently_are_refused(spec):
    found = layer([3, 5], 128, 128)
    with pytest.raises(UnsupportedConfig, match=r"are block-1d and .* must be scaled alike along the contraction"):
        grouped_gemm.rows(found.x_both[0], spec.quantize(found.w.flatten(0, 1)), torch.zeros(48, 128), height=128)
    _, other = quantize_groups(found.x, None, spec, found.groups)
    with pytest.raises(UnsupportedConfig, match="scaled alike along the contraction"):
        grouped_gemm.grouped_wgrad(found.dy_both[1], other, torch.zeros(2, 128, 128))


def test_square_blocks_on_both_sides_are_refused():
    found = layer([3, 5], 128, 128)
    row, column = quantize_groups(found.x, Block2D(), Block2D(), found.groups)
    with pytest.raises(UnsupportedConfig, match="no block GEMM takes 128x128 scales on both sides"):
        grouped_gemm.rows(row, found.w_both[0], torch.zeros(48, 128), height=128)
    with pytest.raises(UnsupportedConfig, match="no block GEMM takes 128x128 scales on both sides"):
        grouped_gemm.grouped_wgrad(column, column, torch.zeros(2, 128, 128))


def test_different_bases_are_refused():
    groups, x = split(torch.tensor([3, 5]), 8), randn(8, 128)
    (_, turned), (_, plain) = (quantize_groups(x, None, NVFP4(rht=rht), groups) for rht in (True, False))
    with pytest.raises(UnsupportedConfig, match="same basis"):
        grouped_gemm.grouped_wgrad(turned, plain, torch.zeros(2, 128, 128))


def test_plain_operands_of_two_dtypes_are_refused():
    groups = split(torch.tensor([3, 5]), 8)
    with pytest.raises(UnsupportedDtype, match="both operands alike"):
        grouped_gemm.plain_rows(randn(8, 4), torch.zeros(2, 4, 4), torch.zeros(8, 4), groups)
    with pytest.raises(UnsupportedShape, match="contiguous"):
        grouped_gemm.plain_wgrad(randn(8, 4), randn(8, 4), torch.zeros(2, 4, 4).transpose(1, 2), groups)


def test_a_cpu_takes_the_reference_for_every_scheme():
    cpu = torch.device("cpu")
    for fine, coarse, _ in (BLOCKS, *OTHERS.values()):
        assert grouped_gemm.route(fine, coarse, cpu) == "reference"
    assert grouped_gemm.route(None, None, cpu) == "reference"


@pytest.mark.gpu
def test_routes_on_hopper():
    cuda = torch.device("cuda")
    found = {name: grouped_gemm.route(s.fine, s.coarse, cuda) for name, s in OTHERS.items()}
    native = {"tensorwise", "rowwise", "mixed", "fine-weights"}
    assert found == {name: "native" if name in native else "emulated" for name in OTHERS}
    assert grouped_gemm.route(BLOCKS.fine, BLOCKS.coarse, cuda) == "native"
    assert grouped_gemm.route(None, None, cuda) == "native"


@pytest.mark.parametrize("height", [1, 100, 129])
def test_a_height_that_is_no_multiple_of_128_is_refused(height):
    found = layer([3, 5], 128, 128)
    for along in ("rows", "columns"):
        with pytest.raises(UnsupportedConfig) as refused:
            grouped_gemm.rows(found.x_both[0], found.w_both[0], torch.zeros(48, 128), height=height, along=along)
        assert str(refused.value) == (
            f"Stacked matrices begin at multiples of 128, got a height of {height}. Pad them."
        )


def test_e5m2_by_e5m2_is_refused():
    groups, x = split(torch.tensor([3, 5]), 8), randn(8, 128)
    _, column = quantize_groups(x, None, Block1D(E5M2), groups)
    with pytest.raises(UnsupportedConfig, match="E5M2"):
        grouped_gemm.grouped_wgrad(column, column, torch.zeros(2, 128, 128))


# -- on the device -----------------------------------------------------------------------------------------------------
# rows: the contraction is a multiple of 16, as the copies of tiles need; depth: K of 4. N of fprop and wgrad is any.


@pytest.mark.gpu
@splits
@pytest.mark.parametrize(("n", "k", "height"), [(256, 256, 256), (304, 272, 384), (128, 16, 256), (16, 400, 128)])
def test_within_the_bound_of_the_reference(sizes, n, k, height):
    found = spoiled(layer(sizes, n, k, height=height, device="cuda"))
    assert_all_within(found)
    assert_all_within(found, randn(len(sizes), n, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scale", "dy_fmt"), [("pow2", None), ("fp32", None), ("pow2", E5M2)], ids=str)
def test_every_dtype_and_setting(dtype, scale, dy_fmt):
    found = spoiled(layer([65, 128, 0, 97], 304, 272, device="cuda", dtype=dtype, scale=scale, dy_fmt=dy_fmt))
    for out_dtype in DTYPES:
        assert_all_within(found, randn(4, 304, device="cuda", dtype=dtype), out_dtype)


@pytest.mark.gpu
@schemes
@splits
def test_every_scheme_within_the_bound(scheme, sizes):
    found = spoiled(layer(sizes, 304, 272, height=384, device="cuda", scheme=scheme))
    scales = torch.rand(found.x.shape[0], device="cuda")
    scales[found.end :] = float("nan")
    assert_all_within(found)
    assert_all_within(found, randn(len(sizes), 304, device="cuda"), scales=scales)


@pytest.mark.gpu
@pairs(scheme=OTHERS, dtype=DTYPES, kind=DTYPES)
def test_every_scheme_in_every_dtype(scheme, dtype, kind):
    """`kind` is the dtype of bias and scales."""
    found = spoiled(layer([65, 128, 0, 97], 128, 528, device="cuda", dtype=dtype, scheme=scheme))
    scales = torch.rand(found.x.shape[0], device="cuda").to(kind)
    assert_all_within(found, randn(4, 128, device="cuda", dtype=kind), dtype, scales)


@pytest.mark.gpu
@turns(scheme=OTHERS, size=[(33, 40), (257, 129), (1, 1)])
def test_every_scheme_with_odd_features(scheme, size):
    """Codes of x and dy are then not aligned for the copies of tiles: fprop and dgrad run emulated."""
    assert_all_within(spoiled(layer([65, 128, 0, 97], *size, device="cuda", scheme=scheme)))


@pytest.mark.gpu
def test_blocks_with_odd_features():
    assert_all_within(spoiled(layer([65, 128, 0, 97], 33, 41, device="cuda")))


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@schemes
def test_codes_wider_than_the_result_on_the_device(scheme):
    wide = [randn(195, size, device="cuda") for size in (304, 208)]
    found = made([65, 0, 130], *wide, randn(3, 200, 304, device="cuda"), 256, scheme)
    y, dx, dw = (torch.zeros(*size, device="cuda") for size in ((195, 200), (195, 300), (3, 200, 300)))
    same = [torch.zeros_like(t) for t in (y, dx, dw)]
    for a, b, c in ((y, dx, dw), same):
        with backend.use("auto" if a is y else "reference"):
            grouped_gemm.rows(found.x_both[0], found.w_both[0], a, height=256)
            grouped_gemm.rows(found.dy_both[0], found.w_both[1], b, height=256, along="columns")
            grouped_gemm.grouped_wgrad(found.dy_both[1], found.x_both[1], c)
    for got, want in zip((y, dx, dw), same, strict=True):
        assert (got - want).abs().max() <= 2e-3 * want.abs().max()


EXACT = {name: OTHERS[name] for name in ("mx", "mx-square", "nvfp4", "nvfp4-rht")}
exact_schemes = pytest.mark.parametrize("scheme", EXACT.values(), ids=EXACT)


@pytest.mark.gpu
@pairs(scheme=EXACT, shape=[(304, 272, 384), (130, 129, 256), (1280, 1100, 1280), (96, 96, 128)], dtype=DTYPES)
def test_products_of_exact_values_round_sums_alone(scheme, dtype, shape):
    """Above 64 rows for each group, and 64 features, operands are decoded first on Hopper."""
    n, k, height = shape
    found = spoiled(layer([65, 300, 0, 97], n, k, height=height, device="cuda", scheme=scheme))
    scales = torch.rand(found.x.shape[0], device="cuda")
    scales[found.end :] = float("nan")
    assert_all_within(found, dtype=dtype, drop=5e-7)
    assert_all_within(found, randn(4, n, device="cuda"), dtype, scales, drop=5e-7)


@pytest.mark.gpu
@exact_schemes
@pytest.mark.parametrize(("sizes", "n", "k"), [([3, 0, 5], 304, 272), ([300, 80], 64, 272), ([300, 80], 304, 48)])
def test_products_of_exact_values_with_few_rows_or_features(scheme, sizes, n, k):
    assert_all_within(spoiled(layer(sizes, n, k, spare=0, device="cuda", scheme=scheme)), drop=5e-7)


@pytest.mark.gpu
@exact_schemes
@pytest.mark.parametrize("sizes", [[500, 0, 700, 900], [0, 2100, 0, 0], [1, 2000, 98, 1]], ids=str)
def test_products_of_exact_values_in_more_tiles_than_programs(scheme, sizes):
    assert_all_within(spoiled(layer(sizes, 2048, 1536, spare=0, device="cuda", scheme=scheme)), drop=5e-7)


@pytest.mark.gpu
@exact_schemes
def test_a_value_that_is_not_finite_stays_in_its_group(scheme):
    found = layer([100, 130, 70], 304, 272, spare=0, device="cuda", scheme=scheme)
    clean = fprop(found), dgrad(found), wgrad(found)
    x, dy, w = found.x.clone(), found.dy.clone(), found.w.clone()
    x[150, 3] = dy[229, 303] = w[1, 5, 7] = float("nan")
    spoilt = made(found.sizes, x, dy, w, found.height, scheme)
    y, dx, dw = fprop(spoilt), dgrad(spoilt), wgrad(spoilt)
    for g in (0, 2):
        for got, want in ((y, clean[0]), (dx, clean[1])):
            assert_exact(pieces(got, found.sizes)[g], pieces(want, found.sizes)[g])
        assert_exact(dw[g], clean[2][g])
    for got in (pieces(y, found.sizes)[1], pieces(dx, found.sizes)[1], dw[1]):
        assert got.isnan().any()


@pytest.mark.gpu
@schemes
def test_every_scheme_gives_the_same_bits_every_time(scheme):
    found = layer([500, 0, 700, 900], 512, 272, device="cuda", scheme=scheme)
    bias, scales = randn(4, 512, device="cuda"), torch.rand(found.x.shape[0], device="cuda")
    first = fprop(found, bias=bias, scales=scales), dgrad(found), wgrad(found), wgrad(found, torch.float32)
    for _ in range(20):
        again = fprop(found, bias=bias, scales=scales), dgrad(found), wgrad(found), wgrad(found, torch.float32)
        for got, want in zip(again, first, strict=True):
            assert_exact(got, want)


# -- fast, on the device -----------------------------------------------------------------------------------------------

WHOLE = {  # by whether each row of a and of b has a scale of its own
    "neither": OTHERS["tensorwise"],
    "both": OTHERS["rowwise"],
    "a": OTHERS["mixed"],
    "b": Scheme(Tensorwise(), Rowwise(), Rowwise(E5M2)),
}
whole = pytest.mark.parametrize("scheme", WHOLE.values(), ids=WHOLE)
tiles = pytest.mark.parametrize("tile", [(256, 4), (128, 6)], ids=["wide", "narrow"], indirect=True)


@pytest.fixture
def tile(request, monkeypatch):
    """Every fast GEMM takes this tile, and so few programs run that each has several."""
    from octavo.kernels.grouped_gemm.hopper import fast_row_groups

    monkeypatch.setattr(fast_row_groups, "fast_tile", lambda n, blocks, programs: request.param)
    monkeypatch.setattr(fast_row_groups, "processors", lambda device: 3)


def assert_fast_within(found: Layer, dtype=torch.bfloat16, bias=None, scales=None) -> None:
    """y and dx against the decoded codes. A sum over K loses 1e-6 · K of its terms, or what one step loses."""
    y, dx = fprop(found, dtype, bias, scales=scales, how="fast"), dgrad(found, dtype, how="fast")
    n, k = found.w.shape[1:]
    x_row, dy_row = found.x_both[0].members(), found.dy_both[0].members()
    each = torch.ones(found.x.shape[0], device="cuda") if scales is None else scales
    for g in range(len(found.sizes)):
        a, b = values(x_row[g]), values(member(found.w_both[0], "row", g, g * found.height, n))
        want, own = a @ b.T, pieces(each[:, None], found.sizes)[g].double()
        want = want if bias is None else want + own * bias[g].double()
        assert_within(pieces(y, found.sizes)[g], want, a.abs() @ b.abs().T, drop=max(8e-4, 1e-6 * k))
        a, b = values(dy_row[g]), values(member(found.w_both[1], "column", g, g * found.height, n))
        assert_within(pieces(dx, found.sizes)[g], a @ b.T, a.abs() @ b.abs().T, drop=max(8e-4, 1e-6 * n))
    for out in (y, dx):
        assert (out[found.end :] == SENTINEL).all()


@pytest.mark.gpu
@whole
@tiles
def test_fast_sums_within_their_bound(scheme, tile):
    """N a multiple of 256, of 128, of 8 and of nothing; K of 128, of 16, and less than a step. One kind of bias, since
    each is a kernel to compile: the next test has the others."""
    for sizes in FEW:
        for n, k, height in ((512, 256, 512), (384, 272, 384), (1160, 400, 1280), (33, 16, 128), (257, 528, 384)):
            found = spoiled(layer(sizes, n, k, height=height, device="cuda", scheme=scheme))
            scales = torch.rand(found.x.shape[0], device="cuda")
            scales[found.end :] = float("nan")
            assert_fast_within(found, bias=randn(len(sizes), n, device="cuda"), scales=scales)


@pytest.mark.gpu
@tiles
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fast_sums_in_every_dtype_and_with_every_bias(tile, dtype):
    found = spoiled(layer([65, 128, 0, 97], 528, 272, device="cuda", dtype=dtype, scheme=OTHERS["rowwise"]))
    bias, scales = randn(4, 528, device="cuda", dtype=dtype), torch.rand(found.x.shape[0], device="cuda").to(dtype)
    assert_fast_within(found, dtype)
    assert_fast_within(found, dtype, bias)
    assert_fast_within(found, dtype, bias, scales)


@pytest.mark.gpu
@whole
@tiles
def test_fast_sums_of_groups_of_every_size(scheme, tile):
    for sizes in ([*range(1, 140, 3), 0, 64, 128, 192, 300], many(65), [1] * 20, [0, 0, 300, 0], [0, 0, 0]):
        assert_fast_within(spoiled(layer(sizes, 272, 208, device="cuda", scheme=scheme)))


@pytest.mark.gpu
@whole
@pytest.mark.parametrize("sizes", [[37, 2500, 3], [700, 0, 900, 640]], ids=str)
def test_long_fast_sums_in_many_tiles(scheme, sizes):
    """The tile is chosen as ever, and both GEMMs have more of them than programs."""
    assert_fast_within(spoiled(layer(sizes, 2048, 16400, device="cuda", scheme=scheme)))


@pytest.mark.gpu
@whole
def test_fast_sums_have_the_same_bits_every_time_in_every_tile_and_alone(scheme, monkeypatch):
    from octavo.kernels.grouped_gemm.hopper import fast_row_groups

    sizes = [500, 0, 700, 900]
    found = spoiled(layer(sizes, 1168, 1040, device="cuda", scheme=scheme))
    bias, scales = randn(4, 1168, device="cuda"), torch.rand(found.x.shape[0], device="cuda")
    y, dx = fprop(found, bias=bias, scales=scales, how="fast"), dgrad(found, how="fast")
    for shape in ((256, 4), (128, 6)):
        monkeypatch.setattr(fast_row_groups, "fast_tile", lambda n, blocks, programs, shape=shape: shape)
        for _ in range(100):
            assert_exact(fprop(found, bias=bias, scales=scales, how="fast"), y)
            assert_exact(dgrad(found, how="fast"), dx)
    for g, (x, dy, w) in enumerate(alone(found)):
        if sizes[g]:
            single = made([sizes[g]], x.clone(), dy.clone(), w[None].clone(), found.height, scheme)
            own = bias[g : g + 1].clone(), pieces(scales[:, None], sizes)[g].flatten().clone()
            assert_exact(pieces(y, sizes)[g], fprop(single, bias=own[0], scales=own[1], how="fast"))
            assert_exact(pieces(dx, sizes)[g], dgrad(single, how="fast"))


@pytest.mark.gpu
@tiles
@splits
def test_fast_sums_leave_the_tail_and_what_surrounds_a_view(tile, sizes):
    found = spoiled(layer(sizes, 304, 272, device="cuda", scheme=OTHERS["rowwise"]))
    rows = found.x.shape[0]
    for make, columns in ((fprop, 304), (dgrad, 272)):
        around = torch.full((rows + 7, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
        out = make(found, out=around[3 : 3 + rows], how="fast")
        assert_exact(out[: found.end], make(found, how="fast")[: found.end])
        assert out[found.end :].isnan().all()
        assert around[:3].isnan().all() and around[3 + rows :].isnan().all()


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_fast_sums_run_in_kernels_of_their_own_if_no_scale_reaches_128_or_less():
    from octavo.launch import listening

    for scheme in (BLOCKS, *OTHERS.values()):
        found, ran = layer([65, 128, 0, 97], 256, 272, device="cuda", scheme=scheme), []
        with listening(lambda launch, _, ran=ran: ran.append(launch.kernel.fn.__name__)):
            precise, fast = (fprop(found, how=how) for how in ("precise", "fast"))
        if scheme.fine.block[1] is None:
            assert ran == ["whole_rows_kernel", "fast_rows_kernel"]
        else:
            assert ran[0] == ran[1] != "fast_rows_kernel"
            assert_exact(fast, precise)


# -- unquantized, on the device ----------------------------------------------------------------------------------------


class Plain(NamedTuple):
    sizes: list[int]
    groups: Groups
    x: torch.Tensor
    dy: torch.Tensor
    w: torch.Tensor

    def outputs(self, dtype: torch.dtype) -> list[torch.Tensor]:
        shapes = (self.x.shape[0], self.w.shape[1]), self.x.shape, self.w.shape
        return [torch.full(shape, SENTINEL, dtype=dtype, device="cuda") for shape in shapes]

    def run(self, y, dx, dw, bias=None, scales=None) -> list[torch.Tensor]:
        grouped_gemm.plain_rows(self.x, self.w, y, self.groups, bias, scales)
        grouped_gemm.plain_rows(self.dy, self.w.transpose(1, 2), dx, self.groups)
        grouped_gemm.plain_wgrad(self.dy, self.x, dw, self.groups)
        return [y, dx, dw]


def plain(sizes: list[int], n: int, k: int, dtype: torch.dtype, spare: int = 40) -> Plain:
    rows = sum(sizes) + spare
    x, dy = randn(rows, k, device="cuda", dtype=dtype), randn(rows, n, device="cuda", dtype=dtype)
    x[sum(sizes) :] = dy[sum(sizes) :] = float("nan")
    groups = split(torch.tensor(sizes, device="cuda"), rows)
    return Plain(sizes, groups, x, dy, randn(len(sizes), n, k, device="cuda", dtype=dtype))


def assert_plain_within(found: Plain, out_dtype: torch.dtype, bias=None, scales=None) -> None:
    y, dx, dw = found.run(*found.outputs(out_dtype), bias, scales)
    held = randn(*found.w.shape, device="cuda", dtype=out_dtype)
    added = grouped_gemm.plain_wgrad(found.dy, found.x, held.clone(), found.groups, accumulate=True)
    end = sum(found.sizes)
    each = torch.ones(end, device="cuda") if scales is None else scales[:end]
    parts = zip(pieces(found.x, found.sizes), pieces(found.dy, found.sizes), found.w, strict=True)
    for g, (x, dy, w) in enumerate((x.double(), dy.double(), w.double()) for x, dy, w in parts):
        own = pieces(each[:, None], found.sizes)[g].double()
        want = x @ w.T if bias is None else x @ w.T + own * bias[g].double()
        assert_within(pieces(y, found.sizes)[g], want, x.abs() @ w.abs().T, drop=2e-5)
        assert_within(pieces(dx, found.sizes)[g], dy @ w, dy.abs() @ w.abs(), drop=2e-5)
        assert_within(dw[g], dy.T @ x, dy.abs().T @ x.abs(), drop=2e-5)
        assert_within(added[g], dy.T @ x, dy.abs().T @ x.abs(), held[g], drop=2e-5)
        if len(x) == 0:
            assert not dw[g].any()
            assert_exact(added[g], held[g])
    for out in (y, dx):
        assert (out[end:] == SENTINEL).all()


@pytest.mark.gpu
@pairs(sizes=SPLITS, dtype=DTYPES, features=[(256, 128), (304, 272), (8, 64)])
def test_plain_groups_within_the_bound(sizes, dtype, features):
    found = plain(sizes, *features, dtype)
    assert_plain_within(found, dtype)
    scales = torch.rand(found.x.shape[0], device="cuda")
    scales[sum(sizes) :] = float("nan")
    assert_plain_within(found, dtype, randn(len(sizes), features[0], device="cuda"), scales)


@pytest.mark.gpu
@pairs(features=[(33, 40), (257, 129), (1, 1), (40, 33), (1040, 1096)], dtype=DTYPES, out_dtype=DTYPES)
def test_plain_groups_of_any_features_and_result(features, dtype, out_dtype):
    assert_plain_within(plain([65, 128, 0, 97], *features, dtype), out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[500, 0, 700, 900], [1, 2000, 98, 1], many(65)], ids=lambda s: str(s[:4]))
def test_plain_groups_of_many_tiles(sizes, dtype):
    assert_plain_within(plain(sizes, 1280, 512, dtype, spare=0), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(304, 272), (96, 96), (128, 256)])
def test_no_group_meets_another_ones_weights(n, k, dtype):
    """Tiles may reach past a matrix: what lies there has no part in the result, even if it is not a number."""
    found = plain([65, 128, 30, 97], n, k, dtype)
    clean = [t[:65].clone() for t in found.run(*found.outputs(dtype))[:2]]
    found.w[1:] = float("nan")
    found.x[65:] = float("inf")
    found.dy[65:] = float("nan")
    y, dx, dw = found.run(*found.outputs(dtype))
    assert_exact(y[:65], clean[0])
    assert_exact(dx[:65], clean[1])
    assert dw[0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_weights_of_any_strides_and_results_in_views(dtype):
    found = plain([65, 128, 0, 97], 256, 192, dtype)
    y, dx, dw = found.run(*found.outputs(dtype))
    wide = torch.full((4, 300, 200), float("nan"), dtype=dtype, device="cuda")
    wide[:, 1:257, 3:195] = found.w
    odd = found._replace(w=wide[:, 1:257, 3:195])
    for got, want in zip(odd.run(*found.outputs(dtype)), (y, dx, dw), strict=True):
        assert ((got.double() - want.double()).abs() <= 4 * STEP[dtype] * want.double().abs() + 1e-3).all()
    rows = found.x.shape[0]
    whole = torch.full((rows + 7, 256), float("nan"), dtype=dtype, device="cuda")
    grouped_gemm.plain_rows(found.x, found.w, whole[3 : 3 + rows], found.groups)
    assert_exact(whole[3:293], y[:290])
    assert whole[:3].isnan().all() and whole[293:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_groups_give_the_same_bits_every_time(dtype):
    found = plain([500, 0, 700, 900], 1024, 272, dtype)
    first = found.run(*found.outputs(dtype))
    for _ in range(20):
        for got, want in zip(found.run(*found.outputs(dtype)), first, strict=True):
            assert_exact(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 33, 256, 1000])
def test_scaled_sums_and_bias_products_on_the_device(columns):
    for sizes in [*SPLITS, many(65), [0, 5000, 3]]:
        rows, count = sum(sizes) + 40, len(sizes)
        dy, scales, bias = randn(rows, columns), torch.rand(rows), randn(count, columns)
        dy[sum(sizes) :] = scales[sum(sizes) :] = float("nan")
        groups = split(torch.tensor(sizes, device="cuda"), rows)
        scaled = dy.double() * scales.double()[:, None]
        sums = torch.stack([part.sum(0) for part in pieces(scaled, sizes)])
        most = torch.stack([part.abs().sum(0) for part in pieces(scaled, sizes)])
        parts = list(zip(pieces(dy.double(), sizes), bias.double(), strict=True))
        products = torch.cat([part @ b for part, b in parts])
        largest = torch.cat([part.abs() @ b.abs() for part, b in parts])
        for view in (dy.cuda(), dy.cuda().T.contiguous().T):
            got = grouped_gemm.column_sums_of(view, groups, torch.float32, scales.cuda())
            bound = max(max(sizes), 2) * 2.0**-23 * most + 1e-38
            assert ((got.cpu().double() - sums).abs() <= bound).all(), sizes
            for dtype in DTYPES:
                found = grouped_gemm.bias_products(view, bias.cuda(), groups, dtype)
                near = max(columns, 2) * 2.0**-23 * largest + STEP[dtype] * products.abs() + 1e-38
                assert ((found[: sum(sizes)].cpu().double() - products).abs() <= near).all(), sizes
                assert not found[sum(sizes) :].any()
        on_gpu = dy.cuda(), groups, torch.float32, scales.cuda()
        for _ in range(5):
            assert_exact(grouped_gemm.column_sums_of(*on_gpu), grouped_gemm.column_sums_of(*on_gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 65, 256])
def test_any_number_of_groups(count):
    assert_all_within(spoiled(layer(many(count), 144, 272, device="cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[500, 0, 700, 900], [0, 2100, 0, 0], [1, 2000, 98, 1]], ids=str)
def test_more_tiles_than_programs(sizes):
    assert_all_within(spoiled(layer(sizes, 2048, 512, spare=0, device="cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [BLOCKS, OTHERS["tensorwise"], OTHERS["rowwise"]], ids=["blocks", "tensor", "row"])
@pytest.mark.parametrize("sizes", [[37, 2500, 3], [700, 0, 900, 640]], ids=str)
def test_a_thousand_times_the_same_bits(scheme, sizes):
    """With the copy unit not fenced off from reads of scales, one in twenty of the block-scaled sums that are added to
    a gradient was wrong, in some columns of one tile."""
    found = spoiled(layer(sizes, 144, 16400, device="cuda", scheme=scheme))
    held = randn(*found.w.shape, dtype=torch.bfloat16, device="cuda")
    y, dx, dw = fprop(found), dgrad(found), wgrad(found)
    for _ in range(250):
        assert_exact(fprop(found), y)
        assert_exact(dgrad(found), dx)
        assert_exact(wgrad(found), dw)
        assert_exact(wgrad(found, out=held.clone(), accumulate=True), dw + held)


@pytest.mark.gpu
def test_a_long_contraction_and_more_row_blocks_than_are_taken_together():
    """16400 is no multiple of 128; 20 row blocks of one group are two spans of 8 and a half."""
    assert_all_within(spoiled(layer([37, 2500, 3], 144, 16400, device="cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 33, 257])
def test_an_odd_number_of_outputs(n):
    """Rows of out are then nowhere aligned."""
    found = spoiled(layer([65, 128, 0, 97], n, 272, device="cuda"))
    bias = randn(4, n, device="cuda")
    y, dw = fprop(found, bias=bias), wgrad(found)
    with backend.use("reference"):
        want, want_dw = fprop(found, torch.float32, bias), wgrad(found, torch.float32)
    for g, (got, same) in enumerate(zip(pieces(y, found.sizes), pieces(want, found.sizes), strict=True)):
        a, b = values(found.x_both[0].members()[g]), values(found.w_both[0])[g * found.height : g * found.height + n]
        assert_within(got, same.double(), a.abs() @ b.abs().T)
        a, b = values(found.dy_both[1].members()[g]), values(found.x_both[1].members()[g])
        assert_within(dw[g], want_dw[g].double(), a.abs() @ b.abs().T)
    assert (y[290:] == SENTINEL).all()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[65, 128, 0, 97], [500, 0, 700, 900]], ids=str)
def test_each_group_has_the_bits_that_it_has_alone(sizes):
    """Alone it is split [n] of its own rows, in tensors of its own."""
    found = spoiled(layer(sizes, 304, 528, device="cuda"))
    bias = randn(len(sizes), 304, device="cuda")
    y, dx, dw = fprop(found, bias=bias), dgrad(found), wgrad(found)
    for g, (x, dy, w) in enumerate(alone(found)):
        if sizes[g]:
            single = made([sizes[g]], x.clone(), dy.clone(), w[None].clone(), found.height)
            assert_exact(pieces(y, sizes)[g], fprop(single, bias=bias[g : g + 1].clone()))
            assert_exact(pieces(dx, sizes)[g], dgrad(single))
            assert_exact(dw[g], wgrad(single)[0])


@pytest.mark.gpu
def test_the_same_bits_every_time():
    found = layer([500, 0, 700, 900], 2048, 512, device="cuda")
    bias, dy = randn(4, 2048, device="cuda"), found.dy

    def work() -> list[torch.Tensor]:
        sums = grouped_gemm.column_sums_of(dy, found.groups, torch.float32)
        return [fprop(found, bias=bias), dgrad(found), wgrad(found), wgrad(found, torch.float32), sums]

    first = work()
    for _ in range(20):
        for got, want in zip(work(), first, strict=True):
            assert_exact(got, want)


@pytest.mark.gpu
@splits
def test_the_tail_on_the_device(sizes):
    """Kept by the GEMMs, whatever it holds, and zeroed on demand, in views whose surroundings stay as they are."""
    found = spoiled(layer(sizes, 304, 272, device="cuda"))
    rows = found.x.shape[0]
    for make, columns in ((fprop, 304), (dgrad, 272)):
        for dtype in DTYPES:
            whole = torch.full((rows + 7, columns), float("nan"), dtype=dtype, device="cuda")
            out = whole[3 : 3 + rows]
            assert make(found, out=out).data_ptr() == out.data_ptr()
            assert_exact(out[: found.end], make(found, dtype)[: found.end])
            assert out[found.end :].isnan().all()
            grouped_gemm.zero_tail(out, found.groups)
            assert not out[found.end :].any()
            assert_exact(out[: found.end], make(found, dtype)[: found.end])
            assert whole[:3].isnan().all() and whole[3 + rows :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 33, 256, 5000])
def test_zero_tail_on_the_device(columns):
    for sizes in SPLITS:
        groups = split(torch.tensor(sizes, device="cuda"), sum(sizes) + 300)
        for dtype in DTYPES:
            out = torch.full((sum(sizes) + 300, columns), float("nan"), dtype=dtype, device="cuda")
            grouped_gemm.zero_tail(out, groups)
            assert out[: sum(sizes)].isnan().all()
            assert not out[sum(sizes) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 33, 256, 1000])
def test_column_sums_on_the_device(columns):
    for sizes in [*SPLITS, many(65), [0, 5000, 3]]:
        dy = randn(sum(sizes) + 40, columns)
        dy[sum(sizes) :] = float("nan")
        groups = split(torch.tensor(sizes, device="cuda"), dy.shape[0])
        want = torch.stack([part.double().sum(0) for part in pieces(dy, sizes)])
        size = torch.stack([part.double().abs().sum(0) for part in pieces(dy, sizes)])
        on_gpu = dy.cuda()
        for dtype in DTYPES:
            for view in (on_gpu, on_gpu.T.contiguous().T):
                got = grouped_gemm.column_sums_of(view, groups, dtype)
                assert got.shape == (len(sizes), columns) and got.dtype == dtype
                # float32 sums of n terms in any order, then one rounding
                bound = max(max(sizes), 1) * 2.0**-24 * size + STEP[dtype] * want.abs() + 1e-38
                assert ((got.cpu().double() - want).abs() <= bound).all(), (sizes, dtype)
        for _ in range(20):
            again = grouped_gemm.column_sums_of(on_gpu, groups, torch.float32)
            assert_exact(again, grouped_gemm.column_sums_of(on_gpu, groups, torch.float32))


@pytest.mark.gpu
def test_column_sums_of_one_row_for_all():
    sizes = [65, 128, 0, 97]
    row = randn(1, 272, device="cuda")
    groups = split(torch.tensor(sizes, device="cuda"), 300)
    sums = grouped_gemm.column_sums_of(row.expand(300, 272), groups, torch.float32)
    assert_exact(sums, torch.tensor(sizes, device="cuda").float()[:, None] * row.float())  # few bits: exact in float32


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [16, 8, 1])
@pytest.mark.parametrize("n", [128, 144])
def test_a_gradient_into_a_view_of_a_larger_allocation(n, offset):
    found = spoiled(layer([65, 128, 0, 97], n, 272, device="cuda"))
    for dtype in DTYPES:
        flat = torch.full((offset + found.w.numel() + 50,), float("nan"), dtype=dtype, device="cuda")
        view = flat[offset : offset + found.w.numel()].view(found.w.shape)
        want = wgrad(found, dtype)
        assert_exact(wgrad(found, out=view), want)
        assert flat[:offset].isnan().all() and flat[offset + found.w.numel() :].isnan().all()
        assert_exact(wgrad(found, out=view, accumulate=True), want + want)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 40])
def test_no_rows_at_all_on_the_device(count):
    """The gradient of a weight is then zero, and everything else has no elements."""
    found = layer([0] * count, 128, 256, spare=0, device="cuda")
    assert fprop(found).shape == (0, 128)
    assert dgrad(found).shape == (0, 256)
    grouped_gemm.zero_tail(torch.empty(0, 128, device="cuda"), found.groups)
    assert not grouped_gemm.column_sums_of(found.dy, found.groups, torch.float32).any()
    assert not wgrad(found).any()
    held = randn(count, 128, 256, device="cuda")
    assert_exact(wgrad(found, out=held.clone(), accumulate=True), held)


# -- captured ----------------------------------------------------------------------------------------------------------

# permuted, one emptied, all on one, none, shrinking, growing to the last row, one size for all that is past, and beyond
CHANGES = [
    [400, 212, 0, 300], [300, 0, 0, 400], [0, 1100, 0, 0], [0, 0, 0, 0], [3, 0, 1, 9], [500, 1, 99, 500],
    [1100, 0, 0, 0], [0, 0, 0, 1100], [600, 600, 600, -1], [300, 0, 212, 400],
]  # fmt: skip


class Step:
    """Everything a grouped layer does with its splits, from static tensors to fresh ones."""

    def __init__(self, n: int = 304, k: int = 272, scheme: Scheme | None = BLOCKS) -> None:
        self.scheme = scheme  # None: unquantized
        self.splits = torch.tensor([300, 0, 212, 400], device="cuda")
        self.x, self.dy = randn(1100, k, device="cuda"), randn(1100, n, device="cuda")
        self.w, self.bias = randn(4, n, k, device="cuda"), randn(4, n, device="cuda")
        self.height, self.scales = up(n), torch.rand(1100, device="cuda")
        if scheme is not None:
            self.w_both = stacked(self.w, self.height, scheme.coarse)
        self.main_grad = torch.zeros(4, n, k, device="cuda")

    def change(self, sizes: list[int]) -> None:
        """New sizes, new rows, NaN in the tail."""
        end = layout(sizes, 1100)[0][-1]
        self.splits.copy_(torch.tensor(sizes))
        for t in (self.x, self.dy, self.scales):
            t.copy_(torch.randn(t.shape))
            t[end:] = float("nan")
        self.main_grad.fill_(0.25)

    def __call__(self) -> list[torch.Tensor]:
        groups = split(self.splits, 1100)
        outs = [torch.full_like(t, SENTINEL) for t in (self.dy, self.x, self.w)]
        y, dx, dw = self.plain(groups, *outs) if self.scheme is None else self.quantized(groups, *outs)
        grouped_gemm.zero_tail(y, groups)
        sums = grouped_gemm.column_sums_of(self.dy, groups, torch.float32, self.scales)
        products = grouped_gemm.bias_products(self.dy, self.bias, groups, torch.float32)
        return [y, dx, dw, torch.cat((sums.flatten(), products))]

    def quantized(self, groups: Groups, y, dx, dw) -> list[torch.Tensor]:
        x_row, x_column = quantize_groups(self.x, self.scheme.fine, self.scheme.fine, groups)
        dy_row, dy_column = quantize_groups(self.dy, self.scheme.steep, self.scheme.steep, groups)
        grouped_gemm.rows(
            x_row, self.w_both[0], y, self.bias, self.scales, height=self.height, accumulation="fast"
        )  # fmt: skip
        grouped_gemm.rows(dy_row, self.w_both[1], dx, height=self.height, along="columns")
        grouped_gemm.grouped_wgrad(dy_column, x_column, dw)
        grouped_gemm.grouped_wgrad(dy_column, x_column, self.main_grad, accumulate=True)
        return [y, dx, dw]

    def plain(self, groups: Groups, y, dx, dw) -> list[torch.Tensor]:
        grouped_gemm.plain_rows(self.x, self.w, y, groups, self.bias, self.scales)
        grouped_gemm.plain_rows(self.dy, self.w.transpose(1, 2), dx, groups)
        grouped_gemm.plain_wgrad(self.dy, self.x, dw, groups)
        grouped_gemm.plain_wgrad(self.dy, self.x, self.main_grad, groups, accumulate=True)
        return [y, dx, dw]

    def results(self, made: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t.clone() for t in (*made, self.main_grad)]


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return graph, made


STEPS = {"blocks": BLOCKS, **OTHERS, "plain": None}
every_step = pytest.mark.parametrize("scheme", STEPS.values(), ids=STEPS)


@pytest.mark.gpu
@every_step
def test_a_product_never_waits_for_the_device(scheme):
    step = Step(scheme=scheme)
    step()  # compiles
    step.change([300, 0, 212, 400])
    want = step.results(step())
    step.main_grad.fill_(0.25)
    with no_waiting():
        made = step()
    for got, same in zip(step.results(made), want, strict=True):
        assert_exact(got, same)


@pytest.mark.gpu
@every_step
def test_replays_follow_the_sizes(scheme):
    step = Step(scheme=scheme)
    graph, made = captured(step)
    for sizes in CHANGES:
        step.change(sizes)
        with no_waiting():
            graph.replay()
        replayed = step.results(made)
        step.main_grad.fill_(0.25)
        for name, got, want in zip(("y", "dx", "dw", "sums", "main_grad"), replayed, step.results(step()), strict=True):
            assert torch.equal(got, want), f"{name} after {sizes}"
            assert got.isfinite().all(), f"{name} after {sizes}"
        end = layout(sizes, 1100)[0][-1]
        assert not replayed[0][end:].any()
        assert (replayed[1][end:] == SENTINEL).all()


@pytest.mark.gpu
def test_replays_back_to_back_and_on_two_streams():
    steps = Step(), Step(144, 528)
    graphs = [captured(step) for step in steps]
    wants = []
    for step in steps:
        step.change([212, 400, 0, 300])
        wants.append(step.results(step())[:4])
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, found), want in zip(graphs, wants, strict=True):
        for got, same in zip(found, want, strict=True):
            assert_exact(got, same)


@pytest.mark.gpu
@pytest.mark.usefixtures("large_memory")
def test_offsets_beyond_two_to_the_31():
    """The last group, whose rows, weight and gradient lie past 2^31 elements, against itself alone."""
    rows, n, k, count = 300_011, 7168, 4352, 70
    x, dy = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16), torch.zeros(rows, n, device="cuda").bfloat16()
    x[-150:], dy[-150:] = randn(150, k, device="cuda"), randn(150, n, device="cuda")
    w = torch.zeros(count, n, k, device="cuda", dtype=torch.bfloat16)
    w[-1] = randn(n, k, device="cuda")
    found = made([rows - 150] + [0] * (count - 2) + [150], x, dy, w, n)
    single = made([150], x[-150:].clone(), dy[-150:].clone(), w[-1:].clone(), n)
    assert_exact(fprop(found)[-150:], fprop(single))
    assert_exact(dgrad(found)[-150:], dgrad(single))
    assert_exact(wgrad(found)[-1], wgrad(single)[0])
    out = fprop(found)
    grouped_gemm.zero_tail(out, split(torch.tensor([rows - 150], device="cuda"), rows))
    assert not out[-150:].any()
