"""gemm on a CPU: bit for bit the float64 composition of the decoded codes, for every GEMM of every recipe.

The composition below decodes with ml_dtypes and multiplies with numpy; it shares no code with the package.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import octavo
import octavo.quant as Q
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.formats import E4M3, E5M2
from octavo.kernels.gemm import gemm
from tests.support.linear_oracle import randn
from tests.support.recipe_traits import QUANTIZED, gemm_error
from tests.support.same_tensors import assert_exact
from tests.support.steps import relative_error

CODE = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
RECIPES = [*QUANTIZED, "fp8-block(scale='fp32')"]
GEMMS = ["fprop", "dgrad", "wgrad"]
SEED = torch.tensor([11, 4])

# (left, right) specs that a GEMM may meet
PAIRS = [
    (Q.Tensorwise(), Q.Tensorwise()),
    (Q.Tensorwise(E5M2), Q.Tensorwise()),
    (Q.Rowwise(), Q.Rowwise()),
    (Q.Block1D(), Q.Block2D()),
    (Q.Block1D(), Q.Block1D()),
    (Q.Block1D(scale="fp32"), Q.Block2D(scale="fp32")),
    (Q.MX(), Q.MX()),
    (Q.MX(E5M2), Q.MX(square=True)),
    (Q.NVFP4(), Q.NVFP4(square=True)),
    (Q.NVFP4(rht=True), Q.NVFP4(rht=True)),
]
pairs = pytest.mark.parametrize(("left", "right"), PAIRS, ids=str)


def quantize(spec, x, axis=-1):
    return spec.quantize(x, axis, seed=SEED if getattr(spec, "stochastic", False) else None)


# -- the composition -----------------------------------------------------------------------------------------------


def decoded_codes(q):
    raw = q.codes.view(torch.uint8).numpy()
    if isinstance(q.spec, Q.NVFP4):
        nibbles = np.stack((raw & 0xF, raw >> 4), -1).reshape(raw.shape[0], -1)
        return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return raw.view(CODE[q.codes.dtype]).astype(np.float32)


def decoded_scale(q):
    raw = q.scale.numpy()
    if isinstance(q.spec, Q.MX):
        return raw.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    if isinstance(q.spec, Q.NVFP4):
        return raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return raw


def scaled_values(q):
    """code * block scale, elementwise and exact: what block formats multiply."""
    codes, scale = decoded_codes(q).astype(np.float64), decoded_scale(q).astype(np.float64)
    for dim, block in enumerate(q.spec.block):
        scale = np.repeat(scale, block, axis=dim)
    return codes * scale[: codes.shape[0], : codes.shape[1]]


def compose(a, b):
    """a · bᵀ in float64, rounded once to float32."""
    if isinstance(a, torch.Tensor):
        return torch.from_numpy(a.double().numpy() @ b.double().numpy().T).float()
    if a.spec.block[1] is None:  # one scale a row or a tensor: it multiplies the sum
        total = decoded_codes(a).astype(np.float64) @ decoded_codes(b).astype(np.float64).T
        total = total * (decoded_scale(a).astype(np.float64) * decoded_scale(b).astype(np.float64).T)
    else:
        total = scaled_values(a) @ scaled_values(b).T
    if a.global_scale is not None:
        alpha = a.global_scale.numpy() * b.global_scale.numpy()
        assert alpha.dtype == np.float32
        total = total * alpha.astype(np.float64)
    return torch.from_numpy(total.astype(np.float32))


# -- the three GEMMs of every recipe -------------------------------------------------------------------------------


def operands(recipe, gemm_name, m, n, k, dtype=torch.bfloat16):
    """Left and right operand of one GEMM, quantized as the recipe says, and the product they stand for."""
    quant = getattr(octavo.recipe(recipe).linear(), gemm_name)
    x, w, dy = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1) * 0.02, randn(m, n, dtype=dtype, seed=2)
    left, right, axes, product = {
        "fprop": (x, w, (-1, -1), x.double() @ w.double().T),
        "dgrad": (dy, w, (-1, 0), dy.double() @ w.double()),
        "wgrad": (dy, x, (0, 0), dy.double().T @ x.double()),
    }[gemm_name]
    a, b = quantize(quant.left, left, axes[0]), quantize(quant.right, right, axes[1])
    return a, b, product, quant.accumulation


SHAPES = [(1, 1, 1), (1, 17, 48), (33, 17, 16 * 5), (40, 129, 133), (130, 31, 300), (64, 48, 32)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gemm_name", GEMMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_gemm_of_every_recipe_is_the_float64_composition(recipe, gemm_name, shape):
    a, b, product, accumulation = operands(recipe, gemm_name, *shape)
    want = compose(a, b)
    assert want.shape == product.shape
    assert_exact(gemm(a, b, out_dtype=torch.float32, accumulation=accumulation), want)
    assert_exact(gemm(a, b), want.bfloat16())
    assert_exact(gemm(a, b, out_dtype=torch.float16), want.half())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gemm_name", GEMMS)
def test_every_gemm_of_every_recipe_is_near_the_unquantized_product(recipe, gemm_name):
    a, b, product, _ = operands(recipe, gemm_name, 256, 192, 320)
    error = (gemm(a, b, out_dtype=torch.float32).double() - product).norm() / product.norm()
    assert 0.005 < error < gemm_error(recipe, gemm_name)


@pairs
@pytest.mark.parametrize("k", [1, 16, 48, 127, 16400])
def test_any_length_of_the_contraction_is_exact(left, right, k):
    a, b = quantize(left, randn(3, k)), quantize(right, randn(5, k, seed=1))
    assert_exact(gemm(a, b), compose(a, b))


@pytest.mark.parametrize("accumulation", ["fast", "precise"])
def test_accumulation_is_a_permission_that_the_reference_does_not_use(accumulation):
    a, b = quantize(Q.Tensorwise(), randn(7, 5000)), quantize(Q.Tensorwise(), randn(5, 5000, seed=1))
    assert_exact(gemm(a, b, accumulation=accumulation), compose(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_tensors_multiply_in_float64_too(dtype):
    a, b = randn(33, 130, dtype=dtype), randn(17, 130, dtype=dtype, seed=1)
    assert_exact(gemm(a, b), compose(a, b).to(dtype))
    assert_exact(gemm(a, b, out_dtype=torch.float32), compose(a, b))
    assert_exact(gemm(a.T.contiguous().T, b.T.contiguous().T), compose(a, b).to(dtype))  # strides do not matter


@pytest.mark.parametrize("spec", [Q.Rowwise(), Q.Block1D(), Q.MX()], ids=str)
def test_the_sum_is_wide_enough_for_cancellation(spec):
    # large terms cancel; a float32 sum, 24 bits wide, would have lost the small one between them
    x, w = torch.zeros(1, 2048), torch.zeros(1, 2048)
    x[0, 0], x[0, 512], x[0, 1024] = 256.0, 2.0**-7, -256.0
    w[0, 0], w[0, 512], w[0, 1024] = 256.0, 2.0**-7, 256.0
    assert gemm(quantize(spec, x), quantize(spec, w)).item() == 2.0**-14


@pytest.mark.parametrize("recipe", RECIPES)
def test_leading_dims_are_rows(recipe):
    quant = octavo.recipe(recipe).linear().fprop
    x, w = randn(2, 3, 40), randn(5, 40, seed=1)
    a, b = quantize(quant.left, x), quantize(quant.right, w)
    assert_exact(gemm(a, b), gemm(quantize(quant.left, x.view(6, 40)), b))


# -- empty ---------------------------------------------------------------------------------------------------------


@pairs
def test_an_empty_contraction_sums_to_zero_plus_bias(left, right):
    a, b, bias = quantize(left, torch.empty(3, 0)), quantize(right, torch.empty(5, 0)), randn(5)
    assert_exact(gemm(a, b), torch.zeros(3, 5))
    assert_exact(gemm(a, b, bias=bias), bias.expand(3, 5))


@pairs
@pytest.mark.parametrize(("m", "n"), [(0, 5), (3, 0), (0, 0)])
def test_empty_sides_give_empty_products(left, right, m, n):
    a, b = quantize(left, torch.empty(m, 40)), quantize(right, torch.empty(n, 40))
    assert gemm(a, b, bias=torch.zeros(n)).shape == (m, n)
    out = torch.zeros(m, n)
    assert gemm(a, b, out=out, accumulate=True) is out


def test_empty_plain_tensors():
    assert_exact(gemm(torch.empty(3, 0), torch.empty(5, 0)), torch.zeros(3, 5))
    assert gemm(torch.empty(0, 4), torch.empty(5, 4)).shape == (0, 5)


# -- bias, out, accumulate -----------------------------------------------------------------------------------------


@pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_is_added_in_float32_before_the_last_rounding(left, right, dtype):
    a, b = quantize(left, randn(33, 80)), quantize(right, randn(17, 80, seed=1))
    bias = randn(17, dtype=dtype, seed=3)
    want = compose(a, b) + bias.float()
    assert_exact(gemm(a, b, bias=bias), want)
    found = gemm(a, b, bias=bias, out_dtype=torch.bfloat16)
    assert_exact(found, want.bfloat16())
    early = (compose(a, b).bfloat16() + bias.bfloat16()).bfloat16()
    assert not torch.equal(found, early), "the data must tell one rounding from two"


@pairs
def test_out_is_overwritten_in_place_whatever_it_held(left, right):
    a, b = quantize(left, randn(33, 80)), quantize(right, randn(17, 80, seed=1))
    out = torch.full((33, 17), math.nan)
    assert gemm(a, b, out=out) is out
    assert_exact(out, compose(a, b))


@pytest.mark.parametrize("recipe", RECIPES)
def test_wgrad_accumulates_into_a_float32_buffer(recipe):
    a, b, _, _ = operands(recipe, "wgrad", 40, 31, 48)
    start = randn(31, 48, seed=4)
    out = start.clone()
    address = out.data_ptr()
    assert gemm(a, b, out=out, accumulate=True) is out
    assert out.data_ptr() == address
    assert_exact(out, start + compose(a, b))
    gemm(a, b, out=out, accumulate=True)
    assert_exact(out, start + compose(a, b) + compose(a, b))


def test_accumulating_rounds_the_product_to_the_buffer_before_adding():
    a, b = quantize(Q.MX(), randn(33, 80)), quantize(Q.MX(), randn(17, 80, seed=1))
    start = randn(33, 17, seed=4, dtype=torch.bfloat16)
    out = start.clone()
    gemm(a, b, out=out, accumulate=True)
    assert_exact(out, start + compose(a, b).bfloat16())


def test_out_may_be_strided_and_its_surroundings_stay():
    a, b = quantize(Q.MX(), randn(4, 32)), quantize(Q.MX(), randn(3, 32, seed=1))
    buffer = torch.full((6, 8), 7.0)
    gemm(a, b, out=buffer[1:5, 2:8:2])
    assert_exact(buffer[1:5, 2:8:2].contiguous(), compose(a, b))
    buffer[1:5, 2:8:2] = 7.0
    assert (buffer == 7.0).all()


def test_operands_are_left_alone():
    a, b = quantize(Q.NVFP4(), randn(4, 32)), quantize(Q.NVFP4(), randn(3, 32, seed=1))
    before = [t.clone() for q in (a, b) for t in q.tensors()]
    gemm(a, b, bias=randn(3))
    assert all(torch.equal(t, u) for t, u in zip((t for q in (a, b) for t in q.tensors()), before, strict=True))


# -- padding and batching change nothing ---------------------------------------------------------------------------


def padded(x, rows, columns):
    return torch.nn.functional.pad(x, (0, columns, 0, rows))


@pairs
@pytest.mark.parametrize("padding", [(1, 0, 0), (0, 0, 1), (0, 1, 0), (13, 7, 128), (127, 33, 48)], ids=str)
def test_zero_padding_of_any_dim_is_a_no_op(left, right, padding):
    more_m, more_n, more_k = padding
    x, w = randn(33, 47), randn(17, 47, seed=1)
    plain = gemm(quantize(left, x), quantize(right, w))
    wide = gemm(quantize(left, padded(x, more_m, more_k)), quantize(right, padded(w, more_n, more_k)))
    assert_exact(wide[:33, :17], plain)
    assert not wide[33:].any()
    assert not wide[:, 17:].any()


@pairs
def test_a_row_alone_equals_its_row_in_the_batch(left, right):
    x, w = randn(9, 80), randn(17, 80, seed=1)
    b = quantize(right, w)
    whole = gemm(quantize(left, x), b)
    shared = isinstance(left, (Q.Tensorwise, Q.NVFP4))  # one amax for all rows: a row alone must be told
    for i in range(9):
        row = left.quantize(x[i : i + 1], amax=left.amax(x) if shared else None)
        assert_exact(gemm(row, b)[0], whole[i])


def test_the_order_of_threads_does_not_matter():
    a, b = quantize(Q.Block1D(), randn(65, 3000)), quantize(Q.Block2D(), randn(33, 3000, seed=1))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(gemm(a, b))
    finally:
        torch.set_num_threads(threads)
    assert_exact(found[0], found[1])


# -- alpha ---------------------------------------------------------------------------------------------------------


def test_global_scales_enter_as_one_float32_product():
    a, b = quantize(Q.NVFP4(), randn(33, 160) * 1.7), quantize(Q.NVFP4(), randn(17, 160, seed=1) * 3.3)
    sums = scaled_values(a) @ scaled_values(b).T
    exact = a.global_scale.double().item() * b.global_scale.double().item()
    one = (sums * np.float64(np.float32(a.global_scale.item()) * np.float32(b.global_scale.item()))).astype(np.float32)
    two = (sums * exact).astype(np.float32)
    assert (one != two).any(), "the data must tell a rounded alpha from an exact one"
    assert_exact(gemm(a, b), torch.from_numpy(one))


def test_the_turn_cancels_in_the_product():
    x, w = randn(24, 64, dtype=torch.bfloat16), randn(17, 64, dtype=torch.bfloat16, seed=1)
    product = x.double() @ w.double().T
    turned = gemm(quantize(Q.NVFP4(rht=True), x), quantize(Q.NVFP4(rht=True), w), out_dtype=torch.float32)
    assert (turned.double() - product).norm() / product.norm() < 0.2
    decoded = quantize(Q.NVFP4(rht=True), x).dequantize(torch.float32).double()
    assert (decoded - x.double()).norm() / x.double().norm() < 0.13


# -- refusals ------------------------------------------------------------------------------------------------------


def q(spec, rows=4, k=32):
    return quantize(spec, randn(rows, k))


def test_a_quantized_and_a_plain_operand_are_refused():
    message = r"two QTensors or two plain tensors, got one of each\. Quantize both, or dequantize\(\) the other"
    for a, b in ((q(Q.MX()), randn(3, 32)), (randn(3, 32), q(Q.MX()))):
        with pytest.raises(UnsupportedConfig, match=message):
            gemm(a, b)


@pytest.mark.parametrize("a", [None, [[1.0]], 3.0], ids=repr)
def test_what_is_no_operand_is_refused(a):
    for name, pair in (("a", (a, randn(3, 32))), ("b", (randn(3, 32), a))):
        with pytest.raises(UnsupportedDtype, match=rf"tensors and QTensors, got {type(a).__name__} for {name}"):
            gemm(*pair)


@pytest.mark.parametrize(
    "a", [torch.zeros(2, 3, 32), torch.zeros(32), torch.zeros(3, 32).double(), torch.zeros(3, 32).int()]
)
def test_plain_operands_are_float_matrices(a):
    message = rf"float32, bfloat16 or float16 matrices, got {a.dtype} \({', '.join(map(str, a.shape))},?\) for "
    with pytest.raises(UnsupportedShape, match=message + "a"):
        gemm(a, randn(3, 32))
    with pytest.raises(UnsupportedShape, match=message + "b"):
        gemm(randn(3, 32), a)


def test_contractions_of_two_lengths_are_refused():
    for a, b in ((q(Q.MX(), k=32), q(Q.MX(), k=64)), (randn(3, 32), randn(3, 64))):
        with pytest.raises(UnsupportedShape, match=r"last dim of both operands: a has 32, b has 64.*axis=0"):
            gemm(a, b)
    with pytest.raises(UnsupportedShape, match="a has 30, b has 32"):  # equal once padded to whole blocks
        gemm(q(Q.NVFP4(), k=30), q(Q.NVFP4(), k=32))


def test_plain_operands_of_two_dtypes_are_refused():
    with pytest.raises(UnsupportedDtype, match=r"share a dtype, got torch\.float32 and torch\.bfloat16"):
        gemm(randn(3, 32), randn(3, 32).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_an_output_dtype_outside_the_list_is_refused(dtype):
    with pytest.raises(UnsupportedDtype, match=rf"writes float32, bfloat16 or float16, got out_dtype={dtype}"):
        gemm(q(Q.MX()), q(Q.MX()), out_dtype=dtype)


def test_tensors_on_two_devices_are_refused():
    a, b = q(Q.MX()), q(Q.MX())
    elsewhere = torch.empty(4, device="meta")
    calls = (
        lambda: gemm(a, b, bias=elsewhere),
        lambda: gemm(a, b, out=torch.empty(4, 4, device="meta")),
        lambda: gemm(randn(4, 32), torch.empty(4, 32, device="meta")),
    )
    for call in calls:
        with pytest.raises(UnsupportedDevice, match=r"on one device, got cpu, .*meta.*Move them together"):
            call()


@pytest.mark.parametrize("shape", [(3,), (5,), (1, 4), (4, 1), ()], ids=str)
def test_a_bias_of_another_shape_is_refused(shape):
    with pytest.raises(
        UnsupportedShape, match=r"one element a row of b, \(4,\), in float32, bfloat16 or float16; got "
    ) as error:
        gemm(q(Q.MX(), rows=6), q(Q.MX(), rows=4), bias=torch.zeros(shape))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize(
    "out",
    [torch.zeros(4, 6), torch.zeros(6, 5), torch.zeros(24), torch.zeros(1, 6, 4)],
    ids=lambda t: str(tuple(t.shape)),
)
def test_an_out_of_another_shape_is_refused(out):
    with pytest.raises(UnsupportedShape, match=r"out must be torch\.float32 \(6, 4\), got") as error:
        gemm(q(Q.MX(), rows=6), q(Q.MX(), rows=4), out=out)
    assert f"{out.dtype} {tuple(out.shape)}" in str(error.value)
    assert not out.any()


def test_an_out_of_another_dtype_than_asked_is_refused():
    with pytest.raises(UnsupportedShape, match=r"out must be torch\.bfloat16 \(6, 4\), got torch\.float32 \(6, 4\)"):
        gemm(q(Q.MX(), rows=6), q(Q.MX(), rows=4), out=torch.zeros(6, 4), out_dtype=torch.bfloat16)


def test_accumulating_into_nothing_is_refused():
    with pytest.raises(UnsupportedConfig, match=r"accumulate=True\) adds to out=, which is missing\. Give out="):
        gemm(q(Q.MX()), q(Q.MX()), accumulate=True)


def test_another_accumulation_is_refused():
    with pytest.raises(UnsupportedConfig, match="accumulation must be one of 'fast', 'precise', got 'exact'"):
        gemm(q(Q.MX()), q(Q.MX()), accumulation="exact")


# -- measured errors, as regression values -------------------------------------------------------------------------


E4M3_LIKE = [
    (Q.Tensorwise(), Q.Tensorwise()),
    (Q.Rowwise(), Q.Rowwise()),
    (Q.Block1D(), Q.Block2D()),
    (Q.MX(), Q.MX()),
]
MEASURED = [(*pair, 0.0266, 0.0375) for pair in E4M3_LIKE] + [
    (Q.Tensorwise(E5M2), Q.Tensorwise(), 0.053, 0.059),
    (Q.MX(rounding="floor"), Q.MX(rounding="floor"), 0.029, 0.0415),
    (Q.Block1D(scale="fp32"), Q.Block2D(scale="fp32"), 0.0257, 0.0368),
    (Q.NVFP4(), Q.NVFP4(square=True), 0.095, 0.146),
    (Q.NVFP4(), Q.NVFP4(), 0.095, 0.134),
    (Q.NVFP4(stochastic=True), Q.NVFP4(), 0.137, 0.167),
]


@pytest.mark.parametrize(("left", "right", "of_x", "of_y"), MEASURED, ids=str)
def test_errors_on_gaussian_data_are_the_measured_ones(left, right, of_x, of_y):
    x, w = randn(96, 4096), randn(96, 4096, seed=1) * 0.02
    a, b = quantize(left, x), quantize(right, w)
    assert relative_error(a.dequantize(), x.double()) == pytest.approx(of_x, rel=0.1)
    assert relative_error(gemm(a, b), x.double() @ w.double().T) == pytest.approx(of_y, rel=0.1)


def row_errors(left, right, x):
    """Relative error of each output row with only x quantized: signs are exact in every format."""
    w = randn(512, x.shape[1], seed=1).sign()  # many outputs, so that a row's error is not one draw
    want = x.double() @ w.double().T
    found = gemm(quantize(left, x), quantize(right, w)).double()
    return (found - want).norm(dim=1) / want.norm(dim=1)


def ranged(rows, exponents):
    """Rows times 2^U[-exponents, exponents], the exponents evenly drawn so that the median row is the middle one."""
    return randn(rows, 1024, seed=6) * 2.0 ** torch.linspace(-exponents, exponents, rows).view(-1, 1)


FINE = [(Q.Rowwise(), Q.Rowwise()), (Q.Block1D(), Q.Block2D()), (Q.MX(), Q.MX())]
TENSOR, TENSOR_E5M2, FP4 = (Q.Tensorwise(),) * 2, (Q.Tensorwise(E5M2), Q.Tensorwise()), (Q.NVFP4(),) * 2


@pytest.mark.parametrize("pair", FINE, ids=str)
@pytest.mark.parametrize("exponents", [12, 20])
def test_fine_scales_do_not_notice_a_wide_range_of_rows(pair, exponents):
    errors = row_errors(*pair, ranged(128, exponents))
    assert errors.median() == pytest.approx(0.027, rel=0.1)
    assert errors.max() < 0.034


@pytest.mark.parametrize(
    ("pair", "exponents", "median", "worst"),
    [
        (TENSOR, 12, (0.028, 0.042), (0.9, 1.2)),
        (TENSOR_E5M2, 12, (0.048, 0.058), (0.055, 0.07)),
        (FP4, 12, (0.085, 0.115), (0.9, 1.1)),
        (TENSOR, 20, (0.9, 1.1), (0.95, 1.2)),
        (TENSOR_E5M2, 20, (0.048, 0.060), (0.9, 1.2)),
        (FP4, 20, (0.9, 1.1), (0.95, 1.1)),
    ],
    ids=str,
)
def test_one_scale_for_all_loses_the_small_rows(pair, exponents, median, worst):
    errors = row_errors(*pair, ranged(128, exponents))
    assert median[0] < errors.median() < median[1]
    assert worst[0] < errors.max() < worst[1]


@pytest.mark.parametrize(
    ("pair", "low", "high"),
    [(TENSOR, 0.85, 1.05), (TENSOR_E5M2, 0.048, 0.058), (FP4, 0.7, 0.86)] + [(pair, 0.024, 0.030) for pair in FINE],
    ids=str,
)
def test_one_outlier_erases_only_tensors_with_one_scale(pair, low, high):
    x = randn(128, 1024, seed=7)
    x[3, 5] = 2.0**20
    assert low < row_errors(*pair, x).median() < high


# -- the bound that other devices are held to ----------------------------------------------------------------------


@pairs
def test_the_reference_is_far_inside_the_bound_of_every_device(left, right):
    a, b = quantize(left, randn(33, 512)), quantize(right, randn(17, 512, seed=1))
    x, w = a.dequantize(torch.float32).double(), b.dequantize(torch.float32).double()
    error = (gemm(a, b, out_dtype=torch.bfloat16).double() - x @ w.T).abs()
    rounding = 2.0**-8  # half a step of bfloat16's seven fraction bits, at the bottom of a binade
    assert (error <= 5e-7 * (x.abs() @ w.abs().T) + rounding * (x @ w.T).abs()).all()


# -- what must not leak or be misread ---------------------------------------------------------------------------------


def test_a_strided_or_expanded_bias_is_read_as_it_stands():
    a, b = q(Q.MX(), rows=6), q(Q.MX(), rows=4)
    wide = randn(8)
    for bias in (wide[::2], wide[:1].expand(4)):
        assert torch.equal(gemm(a, b, bias=bias), gemm(a, b, bias=bias.clone()))


def test_an_integer_bias_is_refused():
    with pytest.raises(UnsupportedShape, match=r"in float32, bfloat16 or float16; got torch.int32"):
        gemm(q(Q.MX(), rows=6), q(Q.MX(), rows=4), bias=torch.zeros(4, dtype=torch.int32))


def test_no_gradient_flows_through_any_operand():
    """A layer's backward is written out; half an autograd graph would be a silent wrong gradient."""
    bias = torch.zeros(4, requires_grad=True)
    assert not gemm(q(Q.MX(), rows=6), q(Q.MX(), rows=4), bias=bias).requires_grad
    plain = randn(4, 32).requires_grad_()
    assert not gemm(plain, plain, bias=bias).requires_grad


def swallowed(left, right, count):
    """Operands whose products are `count` times the largest, once the smallest, and the largest again, negative: any
    order of an exact sum leaves the smallest."""
    large = torch.full((count,), left.max), torch.full((count,), right.max)
    a = torch.cat([large[0], torch.tensor([left.min_subnormal]), -large[0]])
    b = torch.cat([large[1], torch.tensor([right.min_subnormal]), large[1]])
    return a, b, left.min_subnormal * right.min_subnormal


@pytest.mark.parametrize(("left", "count"), [(E4M3, 2**15 - 1), (E5M2, 5)], ids=["E4M3 to K = 2^16", "E5M2 below 2^28"])
def test_the_order_of_the_contraction_does_not_matter_where_it_is_said_not_to(left, count):
    a, b, want = swallowed(left, E4M3, count)
    assert left is E4M3 or (a.double() * b.double()).abs().sum() < 2**28
    one = torch.ones(1)
    for seed in range(4):
        order = torch.randperm(len(a), generator=torch.Generator().manual_seed(seed))
        rows = [spec.quantize(t[order].expand(3, -1), inverse_scale=one) for spec, t in
                ((Q.Tensorwise(left), a), (Q.Tensorwise(E4M3), b))]  # fmt: skip
        assert (gemm(*rows, out_dtype=torch.float32) == want).all()
