"""Grouped GEMMs: on a CPU each group is `gemm` of its own operands, bit for bit; on a GPU within the bound of FP8
tensor cores, the same bits at every run, and the same as the group has alone."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from octavo import backend
from octavo.errors import UnsupportedConfig
from octavo.formats import E5M2
from octavo.kernels import grouped_gemm
from octavo.kernels.gemm import gemm
from octavo.quant import MX, Block1D, Block2D, QTensor, Rowwise, Tensorwise
from octavo.quant.grouped import GroupedTensor, quantize_groups
from octavo.quant.groups import Groups, split
from tests.quant.ragged import SPLITS, layout, many, no_waiting, pieces

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}  # half a step, with a bit to spare
SENTINEL = 7.0


def randn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(device)


def up(n: int) -> int:
    return -(-n // 128) * 128


class Layer(NamedTuple):
    """What the three GEMMs of a grouped layer meet: x and dy in groups, w stacked in matrices of `height` rows."""

    sizes: list[int]
    groups: Groups
    x: torch.Tensor  # [rows, K], NaN in the tail
    dy: torch.Tensor  # [rows, N], likewise
    w: torch.Tensor  # [G, N, K]
    height: int
    x_both: tuple[GroupedTensor, GroupedTensor]
    dy_both: tuple[GroupedTensor, GroupedTensor]
    w_both: tuple[QTensor, QTensor]

    @property
    def end(self) -> int:
        return layout(self.sizes, self.x.shape[0])[0][-1]


def layer(sizes, n, k, *, spare=40, height=None, device="cpu", dtype=torch.bfloat16, scale="pow2", dy_fmt=None):
    rows = sum(sizes) + spare
    x, dy, w = randn(rows, k, dtype=dtype), randn(rows, n, dtype=dtype), randn(len(sizes), n, k, dtype=dtype)
    x *= torch.exp2(torch.randint(-4, 4, (rows, 1)))
    x[sum(sizes) :] = float("nan")
    dy[sum(sizes) :] = float("nan")
    return made(sizes, x.to(device), dy.to(device), w.to(device), height or up(n), scale, dy_fmt)


def made(sizes, x, dy, w, height, scale="pow2", dy_fmt=None) -> Layer:
    groups = split(torch.tensor(sizes, device=x.device), x.shape[0])
    fine, coarse = Block1D(scale=scale), Block2D(scale=scale)
    steep = fine if dy_fmt is None else Block1D(dy_fmt, scale)
    stacked = F.pad(w, (0, 0, 0, height - w.shape[1])).flatten(0, 1)
    x_both, dy_both = quantize_groups(x, fine, fine, groups), quantize_groups(dy, steep, steep, groups)
    return Layer(sizes, groups, x, dy, w, height, x_both, dy_both, coarse.quantize_both(stacked))


def spoiled(layer: Layer) -> Layer:
    """NaN in everything past the last group, which is undefined."""
    rows = 128 * int(layer.groups.block[-1])
    for q in (*layer.x_both, *layer.dy_both):
        codes, scale = q.q.codes.view(torch.uint8), q.q.scale
        if q.side == "row":
            codes[rows:], scale[rows:] = 0x7F, float("nan")
        else:
            codes[:, rows:], scale[:, rows // 128 :] = 0x7F, float("nan")
    return layer


def fprop(layer: Layer, dtype=torch.bfloat16, bias=None, out=None) -> torch.Tensor:
    if out is None:
        out = torch.full((layer.x.shape[0], layer.w.shape[1]), SENTINEL, dtype=dtype, device=layer.x.device)
    return grouped_gemm.rows(layer.x_both[0], layer.w_both[0], out, bias, height=layer.height)


def dgrad(layer: Layer, dtype=torch.bfloat16, out=None) -> torch.Tensor:
    if out is None:
        out = torch.full((layer.x.shape[0], layer.w.shape[2]), SENTINEL, dtype=dtype, device=layer.x.device)
    return grouped_gemm.rows(layer.dy_both[0], layer.w_both[1], out, height=layer.height, along="columns")


def wgrad(layer: Layer, dtype=torch.bfloat16, out=None, accumulate=False) -> torch.Tensor:
    if out is None:
        out = torch.full(layer.w.shape, SENTINEL, dtype=dtype, device=layer.x.device)
    return grouped_gemm.depth(layer.dy_both[1], layer.x_both[1], out, accumulate=accumulate)


def alone(layer: Layer) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each group's x, dy and w."""
    return list(zip(pieces(layer.x, layer.sizes), pieces(layer.dy, layer.sizes), layer.w, strict=True))


def assert_exact(found: torch.Tensor, want: torch.Tensor) -> None:
    assert found.dtype == want.dtype
    assert found.shape == want.shape
    assert torch.equal(found, want), f"{(found != want).sum()} of {found.numel()} differ"


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


def test_nothing_at_all():
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

WAY_OUT = r"Use fp8-block\."


@pytest.mark.parametrize("spec", [Tensorwise(), Rowwise(), MX()], ids=str)
def test_another_right_operand_is_refused(spec):
    found = layer([3, 5], 128, 128)
    with pytest.raises(UnsupportedConfig) as refused:
        grouped_gemm.rows(found.x_both[0], spec.quantize(found.w.flatten(0, 1)), torch.zeros(48, 128), height=128)
    assert str(refused.value) == (
        f"This grouped GEMM multiplies 1x128 blocks by 128x128 ones in this version, got block-1d by {spec}. "
        "Use fp8-block."
    )


def test_square_blocks_on_the_left_are_refused():
    found = layer([3, 5], 128, 128)
    square = quantize_groups(found.x, Block2D(), Block2D(), found.groups)
    with pytest.raises(UnsupportedConfig, match=f"got block-2d by block-2d. {WAY_OUT}"):
        grouped_gemm.rows(square[0], found.w_both[0], torch.zeros(48, 128), height=128)
    with pytest.raises(UnsupportedConfig, match=f"got block-2d by block-1d. {WAY_OUT}"):
        grouped_gemm.depth(square[1], found.x_both[1], torch.zeros(2, 128, 128))


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
        grouped_gemm.depth(column, column, torch.zeros(2, 128, 128))


# -- on the device -----------------------------------------------------------------------------------------------------
# rows: the contraction is a multiple of 16, as the copies of tiles need; depth: K of 4. N of fprop and wgrad is any.


def values(q: QTensor) -> torch.Tensor:
    return q.spec.values(q)[:, : q.columns].double()


def assert_within(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor, held: torch.Tensor | None = None) -> None:
    """want and size = |a| @ |b|ᵀ in float64. `held`: what the product, rounded once by then, was added to."""
    step, least = STEP[got.dtype], torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps
    bound = 8e-4 * size + step * want.abs() + least  # what one step of the tensor cores drops: 6e-4 was seen
    if held is not None:
        want = want + held.double()
        bound = bound + step * want.abs()
    worst = ((got.double() - want).abs() / bound).max().item() if got.numel() else 0.0
    assert worst <= 1.0, f"{worst:.3g} times the bound"


def assert_all_within(found: Layer, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    """The three GEMMs against the decoded codes, and what they must leave alone."""
    y, dx, dw = fprop(found, dtype, bias), dgrad(found, dtype), wgrad(found, dtype)
    held = randn(*found.w.shape, dtype=dtype, device="cuda")
    added = wgrad(found, out=held.clone(), accumulate=True)
    of_y, of_dx = pieces(y, found.sizes), pieces(dx, found.sizes)
    x_row, x_column, dy_row, dy_column = (q.members() for q in (*found.x_both, *found.dy_both))
    n, k = found.w.shape[1:]
    w_row, w_column = (values(q) for q in found.w_both)
    for g, size in enumerate(found.sizes):
        own = slice(g * found.height, g * found.height + n)
        a, b = values(x_row[g]), w_row[own]
        want = a @ b.T if bias is None else a @ b.T + bias[g].double()
        assert_within(of_y[g], want, a.abs() @ b.abs().T)
        a, b = values(dy_row[g]), w_column[:, own]
        assert_within(of_dx[g], a @ b.T, a.abs() @ b.abs().T)
        a, b = values(dy_column[g])[:n], values(x_column[g])[:k]
        assert_within(dw[g], a @ b.T, a.abs() @ b.abs().T)
        assert_within(added[g], a @ b.T, a.abs() @ b.abs().T, held[g])
        if size == 0:
            assert not dw[g].any()
            assert_exact(added[g], held[g])
    for out in (y, dx):
        assert (out[found.end :] == SENTINEL).all()


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
@pytest.mark.parametrize("count", [1, 3, 65, 256])
def test_any_number_of_groups(count):
    assert_all_within(spoiled(layer(many(count), 144, 272, device="cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[500, 0, 700, 900], [0, 2100, 0, 0], [1, 2000, 98, 1]], ids=str)
def test_more_tiles_than_programs(sizes):
    assert_all_within(spoiled(layer(sizes, 2048, 512, spare=0, device="cuda")))


@pytest.mark.gpu
def test_a_long_contraction_and_more_row_blocks_than_are_taken_together():
    """16400 is no multiple of 128; 20 row blocks of one group are two spans of 8 and a half."""
    assert_all_within(spoiled(layer([37, 2500, 3], 144, 16400, device="cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 33, 257])
def test_an_odd_number_of_outputs(n):
    """Rows of out are then nowhere aligned. dgrad contracts over N and is left out."""
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

    def __init__(self, n: int = 304, k: int = 272) -> None:
        self.splits = torch.tensor([300, 0, 212, 400], device="cuda")
        self.x, self.dy = randn(1100, k, device="cuda"), randn(1100, n, device="cuda")
        self.w, self.bias = randn(4, n, k, device="cuda"), randn(4, n, device="cuda")
        self.height = up(n)
        stacked = F.pad(self.w, (0, 0, 0, self.height - n)).flatten(0, 1)
        self.w_both = Block2D().quantize_both(stacked)
        self.main_grad = torch.zeros(4, n, k, device="cuda")

    def change(self, sizes: list[int]) -> None:
        """New sizes, new rows, NaN in the tail."""
        end = layout(sizes, 1100)[0][-1]
        self.splits.copy_(torch.tensor(sizes))
        for t in (self.x, self.dy):
            t.copy_(torch.randn(t.shape))
            t[end:] = float("nan")
        self.main_grad.fill_(0.25)

    def __call__(self) -> list[torch.Tensor]:
        groups = split(self.splits, 1100)
        x_row, x_column = quantize_groups(self.x, Block1D(), Block1D(), groups)
        dy_row, dy_column = quantize_groups(self.dy, Block1D(), Block1D(), groups)
        y, dx = torch.full_like(self.dy, SENTINEL), torch.full_like(self.x, SENTINEL)
        grouped_gemm.rows(x_row, self.w_both[0], y, self.bias, height=self.height)
        grouped_gemm.zero_tail(y, groups)
        grouped_gemm.rows(dy_row, self.w_both[1], dx, height=self.height, along="columns")
        dw = grouped_gemm.depth(dy_column, x_column, torch.full_like(self.w, SENTINEL))
        grouped_gemm.depth(dy_column, x_column, self.main_grad, accumulate=True)
        sums = grouped_gemm.column_sums_of(self.dy, groups, torch.float32)
        return [y, dx, dw, sums]

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


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    step = Step()
    step.change([300, 0, 212, 400])
    want = step.results(step())
    step.main_grad.fill_(0.25)
    with no_waiting():
        made = step()
    for got, same in zip(step.results(made), want, strict=True):
        assert_exact(got, same)


@pytest.mark.gpu
def test_replays_follow_the_sizes():
    step = Step()
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
    for (_, made), want in zip(graphs, wants, strict=True):
        for got, same in zip(made, want, strict=True):
            assert_exact(got, same)


@pytest.mark.gpu
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
