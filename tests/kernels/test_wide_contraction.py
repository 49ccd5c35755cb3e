"""dw of block-scaled groups in tiles of 128x256: the bits of the tiles of 128x128, in every shape, dtype and mode."""

import pytest
import torch

from octavo.formats import E5M2
from octavo.quant import Block1D, Block2D
from tests.support.grouped_products import DTYPES, Scheme, alone, assert_all_within, layer, made, randn, spoiled, wgrad
from tests.support.ragged_groups import many
from tests.support.same_tensors import assert_exact

SIZES = [[0, 1, 127, 128, 129, 1000], [65, 128, 0, 97], [0, 0, 300, 0], [0, 0, 0], [*range(1, 140, 9), 0, 640]]
STEEP = Scheme(Block1D(), Block2D(), Block1D(E5M2))


@pytest.fixture
def choose(monkeypatch):
    """Sets the tile, and so few programs that each has several tiles."""
    wgrads = pytest.importorskip("octavo.kernels.grouped_gemm.hopper.wgrad")
    monkeypatch.setattr(wgrads, "processors", lambda device: 3)

    def choose(wide: bool) -> None:
        monkeypatch.setattr(wgrads, "is_wide", lambda columns, lines, programs: wide)

    return choose


def both_tiles(choose, found, **settings) -> list[torch.Tensor]:
    """dw in narrow and in wide tiles."""
    from octavo.kernels.grouped_gemm import hopper

    assert hopper.takes_wgrad(found.dy_both[1], found.x_both[1])
    results = []
    for wide in (False, True):
        choose(wide)
        out = settings["out"].clone() if "out" in settings else None
        results.append(wgrad(found, **{**settings, "out": out}))
    return results


@pytest.mark.parametrize(
    ("columns", "lines", "wide"),
    [(4096, 14, True), (4096, 8, False), (256, 132, True), (384, 1000, False), (1152, 1000, True), (128, 1000, False)],
)
def test_a_tile_is_wide_unless_that_wastes_columns_or_processors(columns, lines, wide):
    pytest.importorskip("triton")
    from octavo.kernels.grouped_gemm.hopper.tiles import is_wide

    assert is_wide(columns, lines, 132) == wide


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [None, STEEP], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(("n", "k"), [(512, 512), (384, 1408), (132, 276), (128, 136), (36, 260), (256, 64)])
def test_wide_tiles_have_the_bits_of_narrow_ones(choose, scheme, n, k):
    """n and k a multiple of the tile, of half of it, of 8, and of 4, without which TMA copies no scales."""
    for sizes in SIZES:
        found = spoiled(layer(sizes, n, k, device="cuda", scheme=scheme))
        assert_exact(*both_tiles(choose, found))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_tiles_in_every_dtype_and_added(choose, dtype):
    for n, k in ((384, 640), (132, 260)):
        found = spoiled(layer([65, 128, 0, 500], n, k, device="cuda", dtype=dtype))
        held = randn(*found.w.shape, dtype=dtype, device="cuda")
        assert_exact(*both_tiles(choose, found, dtype=dtype))
        assert_exact(*both_tiles(choose, found, dtype=torch.float32))
        assert_exact(*both_tiles(choose, found, out=held, accumulate=True))
        assert_exact(*both_tiles(choose, found, out=held.float(), accumulate=True))


@pytest.mark.gpu
def test_wide_tiles_within_the_bound_of_the_reference(choose):
    choose(True)
    for n, k in ((512, 528), (304, 272), (16, 400)):
        assert_all_within(spoiled(layer([65, 128, 0, 97, 700], n, k, device="cuda")))


@pytest.mark.gpu
def test_wide_tiles_of_many_groups_and_of_each_alone(choose):
    choose(True)
    for sizes in ([500, 0, 700, 900], many(65)):
        found = spoiled(layer(sizes, 304, 528, device="cuda"))
        dw = wgrad(found)
        for g, (x, dy, w) in enumerate(alone(found)[:8]):
            if sizes[g]:
                single = made([sizes[g]], x.clone(), dy.clone(), w[None].clone(), found.height)
                assert_exact(dw[g], wgrad(single)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[37, 2500, 3], [700, 0, 900, 640]], ids=str)
def test_wide_tiles_give_the_same_bits_hundreds_of_times(sizes):
    """The tile is chosen as ever, by all programs: reads of scales are fenced off from the copy unit."""
    from octavo.kernels.grouped_gemm.hopper.tiles import is_wide

    assert is_wide(16400, 2 * len(sizes), 132)
    found = spoiled(layer(sizes, 256, 16400, device="cuda"))
    held = randn(*found.w.shape, dtype=torch.bfloat16, device="cuda")
    dw = wgrad(found)
    for _ in range(250):
        assert_exact(wgrad(found), dw)
        assert_exact(wgrad(found, out=held.clone(), accumulate=True), dw + held)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [16, 8, 1])
def test_wide_tiles_into_a_view_of_a_larger_allocation(choose, offset):
    choose(True)
    for n in (128, 144):
        found = spoiled(layer([65, 128, 0, 97], n, 392, device="cuda"))
        for dtype in DTYPES:
            flat = torch.full((offset + found.w.numel() + 50,), float("nan"), dtype=dtype, device="cuda")
            view = flat[offset : offset + found.w.numel()].view(found.w.shape)
            assert_exact(wgrad(found, out=view), wgrad(found, dtype))
            assert flat[:offset].isnan().all() and flat[offset + found.w.numel() :].isnan().all()
