"""The native and the emulated GEMM on the GPU against float64 of the same codes: the bounds of docs/numerics.md."""

import pytest
import torch

from octavo import backend
from octavo.formats import E5M2
from octavo.kernels.gemm import gemm, native, reference, route
from octavo.kernels.gemm import triton as emulated
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise

pytestmark = pytest.mark.gpu

PAIRS = {
    "tensorwise": (Tensorwise(), Tensorwise()),
    "tensorwise e5m2": (Tensorwise(E5M2), Tensorwise()),
    "rowwise": (Rowwise(), Rowwise()),
    "rowwise by tensorwise": (Rowwise(), Tensorwise()),
    "block 1d by 2d": (Block1D(), Block2D()),
    "block 1d by 1d": (Block1D(), Block1D()),
    "block 2d by 1d": (Block2D(), Block1D()),
    "block fp32": (Block1D(scale="fp32"), Block2D(scale="fp32")),
    "mx": (MX(), MX()),
    "mx square": (MX(), MX(square=True)),
    "mx e5m2": (MX(E5M2), MX()),
    "nvfp4": (NVFP4(), NVFP4(square=True)),
    "nvfp4 rht": (NVFP4(rht=True), NVFP4(rht=True)),
}
NATIVE_ON_HOPPER = [name for name in PAIRS if not name.startswith(("mx", "nvfp4"))]
# sizes of one and multiples of 16 are compilations of their own: grouped, so that there are few
ODD, ALIGNED = [(17, 33, 65), (130, 257, 300), (300, 200, 1100)], [(16, 32, 48), (128, 256, 512), (64, 64, 16400)]
SHAPES = [(1, 16, 16), (16, 8, 48), (64, 96, 112), *ODD, *ALIGNED]


def operands(pair, shape, *, spread: int = 6):
    m, n, k = shape
    made = []
    for spec, rows in zip(pair, (m, n), strict=True):
        x = torch.randn(rows, k, device="cuda") * torch.exp2(
            torch.randint(-spread, spread + 1, (rows, 1), device="cuda")
        )
        made.append(spec.quantize(x.to(torch.bfloat16)))
    return made


def magnitude(a, b) -> torch.Tensor:
    """Sum of |a||b|, scales included, in float64."""
    size = a.spec.values(a).abs().double() @ b.spec.values(b).abs().double().T
    for q in (a, b):
        size = size if q.global_scale is None else size * q.global_scale.double()
    return size


def assert_within(got, a, b, *, c: float, bias=None):
    want = reference.gemm(a, b, torch.float32, bias).double()
    last = 2.0**-9 if got.dtype == torch.bfloat16 else 2.0**-12 if got.dtype == torch.float16 else 2.0**-24
    bound = c * magnitude(a, b) + 2 * last * want.abs() + 1e-38
    worst = ((got.double() - want).abs() / bound).max().item()
    assert worst <= 1.0, f"{worst:.3g} times the bound"


@pytest.mark.parametrize("name", PAIRS)
def test_emulated_is_exact_up_to_the_order_of_additions(name):
    """float32 out, so that no rounding of the output hides an error; every configuration."""
    for shape in ODD + ALIGNED:
        a, b = operands(PAIRS[name], shape)
        for config in emulated.CONFIGS[a.spec.block[1] or 0]:
            assert_within(emulated.gemm(a, b, torch.float32, None, config), a, b, c=5e-7)


@pytest.mark.parametrize("name", ["block 1d by 2d", "mx", "nvfp4"])
def test_emulated_in_bfloat16(name):
    for shape in ALIGNED:
        a, b = operands(PAIRS[name], shape)
        assert_within(emulated.gemm(a, b, torch.bfloat16, None), a, b, c=5e-7)


@pytest.mark.parametrize("name", ["mx", "nvfp4"])
def test_emulated_single_row_float16_and_bias(name):
    a, b = operands(PAIRS[name], (1, 48, 80), spread=0)
    bias = torch.randn(48, device="cuda", dtype=torch.float16)
    want = reference.gemm(a, b, torch.float32, bias).double()
    got = gemm(a, b, out_dtype=torch.float16, bias=bias)
    assert ((got.double() - want).abs() <= 5e-7 * magnitude(a, b) + 2**-10 * want.abs() + 1e-6).all()


# both sides above 64 rows: operands are decoded first on Hopper. The last has enough tiles for wide ones
DECODED = [(65, 66, 1), (130, 257, 300), (300, 200, 1100), (128, 256, 512), (200, 1100, 80), (2200, 2560, 528)]
decoded = pytest.mark.parametrize("name", ["mx", "mx square", "mx e5m2", "nvfp4", "nvfp4 rht"])


@decoded
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoded_products_are_exact_up_to_the_order_of_additions(name, dtype):
    for shape in [*DECODED, (136, 200, 16400)]:
        a, b = operands(PAIRS[name], shape)
        assert_within(emulated.gemm(a, b, dtype, None), a, b, c=5e-7)
        bias = torch.randn(shape[1], device="cuda", dtype=dtype)
        with_bias = emulated.gemm(a, b, dtype, bias)
        want = reference.gemm(a, b, torch.float32, bias).double()
        last = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-22
        bound = 5e-7 * magnitude(a, b) + last * (want.abs() + bias.double().abs())
        assert ((with_bias.double() - want).abs() <= bound).all()


@decoded
def test_decoded_products_in_float16(name):
    for shape in DECODED[1:]:  # a product of two numbers may be subnormal in float16
        a, b = operands(PAIRS[name], shape, spread=0)
        assert_within(emulated.gemm(a, b, torch.float16, None), a, b, c=5e-7)


@decoded
def test_decoded_products_equal_those_of_the_kernel_that_decodes_as_it_multiplies(name):
    """Within twice the bound, and to the bit where no sum rounds."""
    a, b = operands(PAIRS[name], (200, 1100, 528))
    fused = emulated.gemm(a, b, torch.float32, None, emulated.CONFIGS[a.spec.block[1]][0])
    assert ((emulated.gemm(a, b, torch.float32, None) - fused).abs() <= 1e-6 * magnitude(a, b) + 1e-38).all()
    if not name.endswith("rht"):
        ones = [
            spec.quantize(torch.ones(n, 528, device="cuda")) for spec, n in zip(PAIRS[name], (200, 1100), strict=True)
        ]
        fused = emulated.gemm(*ones, torch.float32, None, emulated.CONFIGS[a.spec.block[1]][0])
        assert torch.equal(emulated.gemm(*ones, torch.float32, None), fused)


@decoded
def test_a_value_that_is_not_finite_stays_in_its_row_and_column(name):
    for bad in (float("nan"), float("inf")):
        x, w = (torch.randn(n, 300, device="cuda", dtype=torch.bfloat16) for n in (300, 257))
        x[7, 299] = w[256, 0] = bad
        a, b = (spec.quantize(t) for spec, t in zip(PAIRS[name], (x, w), strict=True))
        want = reference.gemm(a, b, torch.float32, None)
        assert not want.isfinite().all()
        assert torch.equal(emulated.gemm(a, b, torch.float32, None).isfinite(), want.isfinite())


@decoded
def test_zeros_give_zeros(name):
    a, b = (spec.quantize(torch.zeros(n, 300, device="cuda")) for spec, n in zip(PAIRS[name], (130, 257), strict=True))
    y = emulated.gemm(a, b, torch.bfloat16, None)
    assert not y.any() and not y.signbit().any()


@decoded
def test_decoded_products_have_the_same_bits_every_time(name):
    a, b = operands(PAIRS[name], (2200, 2560, 2000))
    first = emulated.gemm(a, b, torch.bfloat16, None)
    for _ in range(50):
        assert torch.equal(emulated.gemm(a, b, torch.bfloat16, None), first)


@decoded
def test_a_product_takes_memory_for_two_decoded_operands(name):
    m, n, k = 2048, 1280, 4096
    a, b = operands(PAIRS[name], (m, n, k))
    emulated.gemm(a, b, torch.bfloat16, None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = emulated.gemm(a, b, torch.bfloat16, None)
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + 2 * (m + n) * k
    assert torch.cuda.memory_allocated() - before == y.nbytes


@pytest.mark.parametrize("name", NATIVE_ON_HOPPER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_native_within_split_accumulation(name, dtype):
    a, b = operands(PAIRS[name], (64, 64, 512))
    verdict = native.support(a.spec, b.spec, a.device)
    if torch.cuda.get_device_capability() == (9, 0):
        assert verdict.ok, verdict.reason
    for shape in SHAPES:
        a, b = operands(PAIRS[name], shape)
        bias = torch.randn(shape[1], device="cuda", dtype=dtype)
        assert_within(gemm(a, b, out_dtype=dtype), a, b, c=2e-4)
        with_bias = gemm(a, b, out_dtype=dtype, bias=bias)
        want = reference.gemm(a, b, torch.float32, bias).double()
        assert (
            (with_bias.double() - want).abs() <= 2e-4 * magnitude(a, b) + 2**-7 * want.abs() + 2**-7 * bias.abs()
        ).all()


@pytest.mark.parametrize("name", ["tensorwise", "tensorwise e5m2", "rowwise"])
def test_fast_accumulation_within_its_own_bound(name):
    for shape in ((128, 128, 1024), (128, 128, 16384)):
        a, b = operands(PAIRS[name], shape)
        assert_within(gemm(a, b, out_dtype=torch.bfloat16, accumulation="fast"), a, b, c=1e-6 * shape[2])


@pytest.mark.gpu_smoke
@pytest.mark.parametrize("name", PAIRS)
def test_accumulates_into_a_float32_out(name):
    a, b = operands(PAIRS[name], (48, 80, 256))
    start = torch.randn(48, 80, device="cuda")
    out = start.clone()
    assert gemm(a, b, out=out, accumulate=True) is out
    assert torch.equal(out, start + gemm(a, b, out_dtype=torch.float32))


@pytest.mark.parametrize("name", PAIRS)
def test_products_without_rows_columns_or_contraction(name):
    for shape in ((0, 16, 32), (16, 0, 32)):
        assert gemm(*operands(PAIRS[name], shape)).shape == shape[:2]
    y = gemm(*operands(PAIRS[name], (16, 32, 0)), bias=torch.ones(32, device="cuda", dtype=torch.bfloat16))
    assert torch.equal(y, torch.ones_like(y))


def test_route_follows_the_chip_and_the_forced_backend():
    a, b = operands(PAIRS["mx"], (32, 32, 64))
    assert route(a, b) == "emulated"
    with backend.use("reference"):
        assert route(a, b) == "reference"
        want = gemm(a, b, out_dtype=torch.float32)
    assert_within(gemm(a, b, out_dtype=torch.float32), a, b, c=5e-7)
    assert torch.allclose(want, gemm(a, b, out_dtype=torch.float32), rtol=1e-4, atol=1e-3)


def test_high_precision_operands():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = torch.randn(33, 70, device="cuda", dtype=dtype), torch.randn(51, 70, device="cuda", dtype=dtype)
        bias = torch.randn(51, device="cuda", dtype=dtype)
        want = (a.double() @ b.double().T + bias.double()).float()
        for out_dtype in (dtype, torch.float32):
            got = gemm(a, b, bias=bias, out_dtype=out_dtype).float()
            assert (got - want).norm() / want.norm() < 5e-3


@pytest.mark.parametrize("name", ["tensorwise", "block 1d by 2d", "mx"])
def test_a_strided_bias_is_read_as_it_stands(name):
    a, b = operands(PAIRS[name], (48, 80, 256))
    wide = torch.randn(160, device="cuda", dtype=torch.bfloat16)
    for bias in (wide[::2], wide[:1].expand(80)):
        assert torch.equal(gemm(a, b, bias=bias), gemm(a, b, bias=bias.clone()))


@pytest.mark.gpu_smoke
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "block 1d by 2d", "mx", "nvfp4 rht"])
def test_column_operands_multiply_like_a_weight_gradient(name):
    """Both operands quantized along the tokens, as wgrad has them."""
    left, right = PAIRS[name]
    right = Block1D() if right == Block2D() else right
    dy, x = (torch.randn(200, n, device="cuda", dtype=torch.bfloat16) for n in (96, 130))
    a, b = left.quantize(dy, axis=0), right.quantize(x, axis=0)
    assert_within(gemm(a, b, out_dtype=torch.float32), a, b, c=2e-4)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", [(64, 96, 256), (130, 256, 300)])
def test_capturable_in_a_cuda_graph(name, shape):
    a, b = operands(PAIRS[name], shape)
    want = gemm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, values = gemm(a, b), a.dequantize()
    graph.replay()
    assert torch.equal(got, want)
    assert torch.equal(values, a.dequantize())
