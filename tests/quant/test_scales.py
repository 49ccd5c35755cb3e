"""Scales: the multiplier of every scheme for every bf16 amax, and the bytes at the edges, from exact arithmetic.

The oracle works in float64 on fp32 inputs. A quotient of two 24-bit numbers rounded to 53 bits and then to 24 is the
quotient rounded once, so float64 is exact here, and it has no subnormals where fp32 does; `Fraction` confirms it on a
sample, and on everything under `-m slow`.
"""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

import octavo.quant as Q
from octavo.formats import E4M3, E5M2

INF, NAN = math.inf, math.nan
FLT_MAX = float(np.finfo(np.float32).max)
BF16_MAX = float(torch.finfo(torch.bfloat16).max)
TINY = 2.0**-126
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ORACLE_TYPE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
LARGEST_EXPONENT = {E4M3: 8, E5M2: 15}
FP8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
POW2 = pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "fp32"])


# ------------------------------------------------------------------------------------------------------------ oracles


def clear_mantissa(s: np.ndarray) -> np.ndarray:
    """Largest power of two <= s, for positive s."""
    fraction, exponent = np.frexp(s)
    return np.ldexp(np.where(fraction > 0, 0.5, fraction), exponent)


def multiplier(amax: np.ndarray, largest: float, *, pow2: bool, ceiling: float = FLT_MAX, eps: float = 0.0):
    """s of the specification: 1 for 0, Inf and NaN, else RN32(largest / amax), overflow -> ceiling, then pow2."""
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the inputs
        a = np.asarray(amax, np.float32).astype(np.float64)
    a = np.where(np.isnan(a), NAN, np.maximum(a, float(np.float32(eps))))
    ordinary = np.isfinite(a) & (a > 0)
    with np.errstate(over="ignore"):
        s = (largest / np.where(ordinary, a, 1.0)).astype(np.float32).astype(np.float64)
    s = np.where(np.isinf(s), ceiling, s)
    s = clear_mantissa(s) if pow2 else s
    return np.where(ordinary, s, 1.0)


def stored(s: np.ndarray, amax: np.ndarray | float = 1.0) -> np.ndarray:
    """Bits of RN32(1 / s), or of NaN where the amax is not finite."""
    return np.where(np.isfinite(amax), (1.0 / s).astype(np.float32), np.float32(NAN)).view(np.uint32)


def cast_product(x: np.ndarray, s: np.ndarray, fmt) -> np.ndarray:
    """Bytes of cast(x * s): the product rounded to fp32, clamped, then rounded to the format; NaN is 0x7f."""
    with np.errstate(over="ignore", invalid="ignore"):
        v = (x.astype(np.float64) * s).astype(np.float32)
    clamped = np.clip(np.where(np.isnan(v), np.float32(0), v), np.float32(-LARGEST[fmt]), np.float32(LARGEST[fmt]))
    return np.where(np.isnan(v), np.uint8(0x7F), clamped.astype(ORACLE_TYPE[fmt]).view(np.uint8))


def round_to_fp32(q: Fraction) -> float:
    """RN32 of a positive rational, ties to even, Inf past the range: from the definition, no floating point used."""
    exponent = q.numerator.bit_length() - q.denominator.bit_length()
    if Fraction(2) ** exponent > q:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(q / ulp) * ulp  # round() on a Fraction ties to even
    return INF if rounded >= Fraction(2) ** 128 else float(rounded)


def multiplier_by_fraction(amax: float, largest: float, *, pow2: bool, ceiling: float) -> Fraction:
    if amax == 0 or not math.isfinite(amax):
        return Fraction(1)
    s = round_to_fp32(Fraction(largest) / Fraction(amax))
    s = Fraction(ceiling) if s == INF else Fraction(s)
    if not pow2:
        return s
    exponent = s.numerator.bit_length() - s.denominator.bit_length()
    return Fraction(2) ** (exponent - 1 if Fraction(2) ** exponent > s else exponent)


def mx_byte_by_fraction(amax: float, fmt, rounding: str) -> int:
    """What each rounding means, without bit tricks, for a finite amax."""
    if amax == 0:
        return 0
    a = Fraction(amax)
    floor_log2 = a.numerator.bit_length() - a.denominator.bit_length()
    if Fraction(2) ** floor_log2 > a:
        floor_log2 -= 1
    if rounding == "rceil":
        power = floor_log2 - LARGEST_EXPONENT[fmt] - 1
        while Fraction(LARGEST[fmt]) * Fraction(2) ** power < a:
            power += 1
    elif rounding == "floor":
        power = floor_log2 - LARGEST_EXPONENT[fmt]
    elif rounding == "ceil":
        power = floor_log2 + (Fraction(2) ** floor_log2 != a) - LARGEST_EXPONENT[fmt]
    else:  # "even": the exponent that amax has once rounded to the element's mantissa
        half = Fraction(2) ** (floor_log2 - MANTISSA_BITS[fmt] - 1)
        power = floor_log2 + (a + half >= Fraction(2) ** (floor_log2 + 1)) - LARGEST_EXPONENT[fmt]
    return min(max(power + 127, 0), 254)


def mx_byte(amax: np.ndarray, fmt, rounding: str) -> np.ndarray:
    """The same, vectorised on integers: fp32 bits for floor, ceil and even, frexp of the exact value for rceil."""
    a = np.asarray(amax, np.float32)
    bits = a.view(np.uint32).astype(np.int64)
    if rounding == "rceil":  # largest = 0.875 * 2^k in both formats, so amax / largest is compared without dividing
        fraction, exponent = np.frexp(np.where(np.isfinite(a), a, 1).astype(np.float64))
        byte = exponent - (LARGEST_EXPONENT[fmt] + 1) + (fraction > 0.875) + 127
        byte = np.where(a == 0, 0, byte)
    else:
        if rounding == "even":
            bits = bits + (1 << (22 - MANTISSA_BITS[fmt]))
        byte = (bits >> 23) - LARGEST_EXPONENT[fmt]
        if rounding == "ceil":
            byte = byte + ((bits & 0x7FFFFF) != 0)
    return np.where(np.isfinite(a), np.clip(byte, 0, 254), 255).astype(np.uint8)


# ------------------------------------------------------------------------------------------------------------- inputs


def every_bf16_amax() -> torch.Tensor:
    """All non-negative bf16 bit patterns: zero, subnormals, normals, Inf, NaNs."""
    return torch.arange(0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def random_fp32_amax(count: int = 200_000) -> torch.Tensor:
    bits = np.random.default_rng(0).integers(0, 0x7F800000, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def sample(values: np.ndarray, count: int = 1500) -> np.ndarray:
    return values[np.random.default_rng(1).permutation(len(values))[:count]]


def bits_of(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.int32).numpy().view(np.uint32)


def bytes_of(t: torch.Tensor) -> np.ndarray:
    """Row by row; flattened first, because a column of block scales may be stored with rows fastest."""
    return t.contiguous().flatten().view(torch.uint8).numpy().reshape(t.shape[0], -1)


def check_column(spec, x: torch.Tensor, s: np.ndarray) -> None:
    """x [n, 1]: each row is its own amax. Stored scale and code must both follow from the oracle's multiplier."""
    q = spec.quantize(x)
    assert np.array_equal(bits_of(q.scale).ravel(), stored(s, x.float().numpy().ravel()))
    assert np.array_equal(bytes_of(q.codes).ravel(), cast_product(x.float().numpy().ravel(), s, spec.fmt))


# ---------------------------------------------------------------------------------------- the oracles check each other


@POW2
@FP8
@pytest.mark.parametrize("ceiling", [FLT_MAX, BF16_MAX], ids=["fp32-max", "bf16-max"])
def test_float64_oracle_is_exact_on_a_sample(fmt, pow2, ceiling):
    amax = sample(every_bf16_amax().float().numpy())
    s = multiplier(amax, LARGEST[fmt], pow2=pow2, ceiling=ceiling)
    check_against_fractions(amax, s, fmt, pow2, ceiling)


@pytest.mark.slow
@POW2
@FP8
@pytest.mark.parametrize("ceiling", [FLT_MAX, BF16_MAX], ids=["fp32-max", "bf16-max"])
def test_float64_oracle_is_exact_for_every_bf16_amax(fmt, pow2, ceiling):
    amax = every_bf16_amax().float().numpy()
    s = multiplier(amax, LARGEST[fmt], pow2=pow2, ceiling=ceiling)
    check_against_fractions(amax, s, fmt, pow2, ceiling)


def check_against_fractions(amax: np.ndarray, s: np.ndarray, fmt, pow2: bool, ceiling: float) -> None:
    inverse = stored(s).view(np.float32)
    for a, actual, decode in zip(amax.tolist(), s.tolist(), inverse.tolist(), strict=True):
        expected = multiplier_by_fraction(a, LARGEST[fmt], pow2=pow2, ceiling=ceiling)
        assert Fraction(actual) == expected, a
        assert decode == round_to_fp32(1 / expected), a


ROUNDINGS = pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil", "even"])


@ROUNDINGS
@FP8
def test_integer_mx_oracle_is_exact_on_a_sample(fmt, rounding):
    check_mx_against_fractions(sample(every_bf16_amax().float().numpy()), fmt, rounding)


@pytest.mark.slow
@ROUNDINGS
@FP8
def test_integer_mx_oracle_is_exact_for_every_bf16_amax(fmt, rounding):
    check_mx_against_fractions(every_bf16_amax().float().numpy(), fmt, rounding)


def check_mx_against_fractions(amax: np.ndarray, fmt, rounding: str) -> None:
    finite = amax[np.isfinite(amax)]
    expected = [mx_byte_by_fraction(a, fmt, rounding) for a in finite.tolist()]
    assert mx_byte(finite, fmt, rounding).tolist() == expected


# ----------------------------------------------------------------------------------------------------------- formula


@POW2
@FP8
def test_rowwise_scale_of_every_bf16_amax(fmt, pow2):
    x = every_bf16_amax()[:, None]
    s = multiplier(x.float().numpy().ravel(), LARGEST[fmt], pow2=pow2)
    check_column(Q.Rowwise(fmt=fmt, pow2=pow2, eps=0.0), x, s)


@POW2
@FP8
def test_rowwise_scale_of_random_fp32_amaxes(fmt, pow2):
    x = random_fp32_amax()[:, None]
    check_column(Q.Rowwise(fmt=fmt, pow2=pow2, eps=0.0), x, multiplier(x.numpy().ravel(), LARGEST[fmt], pow2=pow2))


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@FP8
def test_1d_block_scale_of_every_bf16_amax_overflows_to_bf16_max(fmt, scale):
    x = every_bf16_amax()[:, None]
    s = multiplier(x.float().numpy().ravel(), LARGEST[fmt], pow2=scale == "pow2", ceiling=BF16_MAX)
    check_column(Q.Block1D(fmt=fmt, scale=scale), x, s)


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@FP8
def test_1d_block_scale_of_random_fp32_amaxes_overflows_to_fp32_max(fmt, scale):
    x = random_fp32_amax()[:, None]
    s = multiplier(x.numpy().ravel(), LARGEST[fmt], pow2=scale == "pow2", ceiling=FLT_MAX)
    check_column(Q.Block1D(fmt=fmt, scale=scale), x, s)


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_1d_block_scale_of_every_fp16_amax(scale):
    """448 / (smallest fp16) is 7.5e9: nothing overflows, though fp16's own max is only 65504."""
    x = torch.arange(0x8000, dtype=torch.int32).to(torch.int16).view(torch.float16)[:, None]
    s = multiplier(x.float().numpy().ravel(), 448.0, pow2=scale == "pow2", ceiling=65504.0)
    check_column(Q.Block1D(scale=scale), x, s)


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@FP8
def test_2d_block_scale_of_every_bf16_amax(fmt, scale):
    """One amax per 128-wide block of a single row, the other 127 elements a mix of magnitudes below it."""
    amax = every_bf16_amax()[None, :, None].expand(1, -1, 128).clone()
    amax[:, :, 1::2] *= -0.25
    amax[:, :, 2::4] *= 0.125
    x = amax.reshape(1, -1)
    q = Q.Block2D(fmt=fmt, scale=scale).quantize(x)
    s = multiplier(every_bf16_amax().float().numpy(), LARGEST[fmt], pow2=scale == "pow2", ceiling=BF16_MAX)
    assert np.array_equal(bits_of(q.scale).ravel(), stored(s, every_bf16_amax().float().numpy()))
    expected = cast_product(x.float().numpy().ravel(), np.repeat(s, 128), fmt)
    assert np.array_equal(bytes_of(q.codes).ravel(), expected)


def check_tensorwise(amaxes: torch.Tensor, fmt, pow2: bool) -> None:
    spec = Q.Tensorwise(fmt=fmt, pow2=pow2)
    quantized = [spec.quantize(a.view(1, 1)) for a in amaxes]
    x = amaxes.float().numpy()
    s = multiplier(x, LARGEST[fmt], pow2=pow2)
    assert np.array_equal(bits_of(torch.cat([q.scale for q in quantized])).ravel(), stored(s, x))
    codes = torch.cat([q.codes.view(torch.uint8) for q in quantized])
    assert np.array_equal(codes.numpy().ravel(), cast_product(x, s, fmt))


@POW2
@FP8
def test_tensorwise_scale_of_every_sixteenth_bf16_amax(fmt, pow2):
    check_tensorwise(every_bf16_amax()[::16], fmt, pow2)


@pytest.mark.slow
@POW2
@FP8
def test_tensorwise_scale_of_every_bf16_amax(fmt, pow2):
    check_tensorwise(every_bf16_amax(), fmt, pow2)


@POW2
def test_amax_is_taken_over_the_magnitudes_of_the_whole_group(pow2):
    """A negative maximum, in the last place, of every group: a max without abs or a missed tail would show."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(5, 300, generator=g) * 0.5
    x[:, 127], x[:, 255], x[:, 299] = -3.0, -5.0, -7.0
    scale = "pow2" if pow2 else "fp32"
    cases = [
        (Q.Tensorwise(pow2=pow2), np.array([[7.0]])),
        (Q.Rowwise(pow2=pow2), np.full((5, 1), 7.0)),
        (Q.Block1D(scale=scale), np.tile([3.0, 5.0, 7.0], (5, 1))),
        (Q.Block2D(scale=scale), np.array([[3.0, 5.0, 7.0]])),
    ]
    for spec, amax in cases:
        assert np.array_equal(spec.amax(x).numpy().astype(np.float64).reshape(amax.shape), amax), spec
        s = multiplier(amax, 448.0, pow2=pow2)
        assert np.array_equal(bits_of(spec.quantize(x).scale), stored(s)), spec


def test_columns_are_scaled_over_the_rows():
    x = torch.rand(300, 4, generator=torch.Generator().manual_seed(0)) * 0.5
    x[299] = torch.tensor([-1.0, 2.0, -4.0, 28.0])
    x[0, 0] = 0.75
    for spec in (Q.Rowwise(), Q.Block1D(), Q.MX()):
        direct = spec.quantize(x.t().contiguous())
        turned = spec.quantize(x, axis=0)
        assert np.array_equal(bytes_of(turned.codes), bytes_of(direct.codes)), spec
        assert np.array_equal(bytes_of(turned.scale), bytes_of(direct.scale)), spec
    rowwise = Q.Rowwise(pow2=False).quantize(x, axis=0).scale
    assert np.array_equal(bits_of(rowwise).ravel(), stored(multiplier(np.array([1.0, 2, 4, 28]), 448.0, pow2=False)))


def test_a_given_amax_replaces_the_tensors_own():
    x = torch.tensor([[1.0, -2.0]])
    q = Q.Tensorwise().quantize(x, amax=torch.full((1, 1), 4.0))
    assert q.scale.item() == np.float32(1) / np.float32(112)
    assert bytes_of(q.codes).tolist() == [[0x6E, 0xF6]]  # 112 and -224


# ----------------------------------------------------------------------------------------- a multiplier given: delayed


def test_a_given_multiplier_is_used_as_it_is():
    x = torch.tensor([[0.5, -1.0, 3.0, 1e30, -0.0]])
    for t in (1.0, 0.3, 1000.0, 2.0**127, FLT_MAX):
        inverse_scale = torch.tensor([t])
        s = np.float64(inverse_scale.item())
        q = Q.Tensorwise().quantize(x, inverse_scale=inverse_scale)
        assert np.array_equal(bytes_of(q.codes), cast_product(x.numpy(), s, E4M3)), t
        assert bits_of(q.scale).ravel().tolist() == [int(stored(np.array(s)))], t


def test_observe_casts_with_the_given_multiplier_and_reports_the_amax():
    x = torch.randn(33, 17, generator=torch.Generator().manual_seed(0)) * 3
    x[20, 3] = -41.0
    inverse_scale = torch.tensor([7.0])
    spec = Q.Tensorwise(fmt=E5M2)
    row, column, amax = spec.observe(x, inverse_scale)
    assert amax.shape == (1, 1) and amax.item() == 41.0
    expected = cast_product(x.numpy(), np.float64(7.0), E5M2)
    assert np.array_equal(bytes_of(row.codes), expected)
    assert np.array_equal(bytes_of(column.codes), expected.T)
    for q in (row, column):
        assert bits_of(q.scale).ravel().tolist() == [int(stored(np.array(7.0)))]


def test_observe_reports_non_finite_amaxes():
    for bad in (INF, -INF, NAN):
        x = torch.ones(4, 4)
        x[2, 2] = bad
        amax = Q.Tensorwise().observe(x, torch.ones(1))[2].item()
        assert math.isnan(amax) if math.isnan(bad) else amax == INF


# -------------------------------------------------------------------------------------------------- the edges, as bytes

# Worked by hand from the formulas. Each row: amax -> (bits of the stored fp32 scale, code of that element).
# 448 / 2^-126 and all below it overflow: s = FLT_MAX, whose reciprocal 2^-128 is the subnormal 0x00200000.
TENSORWISE_FP32 = {
    0.0: (0x3F800000, 0x00),
    1e-45: (0x00200000, 0x00),
    1e-38: (0x00200000, 0x46),  # 1e-38 * FLT_MAX = 3.403 -> 3.5
    TINY: (0x00200000, 0x48),  # 4
    FLT_MAX: (0x7B124924, 0x7E),
    INF: (0x7FC00000, 0x7E),  # the scale is NaN, whatever the code
    NAN: (0x7FC00000, 0x7F),
}
# FLT_MAX with its mantissa cleared is 2^127; 2^-127 is 0x00400000.
TENSORWISE_POW2 = {
    0.0: (0x3F800000, 0x00),
    1e-45: (0x00400000, 0x00),
    1e-38: (0x00400000, 0x3E),  # 1e-38 * 2^127 = 1.701 -> 1.75
    TINY: (0x00400000, 0x40),  # 2
    FLT_MAX: (0x7B800000, 0x78),  # s = 2^-120, code 256
    INF: (0x7FC00000, 0x7E),  # the scale is NaN, whatever the code
    NAN: (0x7FC00000, 0x7F),
}
# eps = 1e-12 lifts everything small: 448e12 floors to 2^48.
ROWWISE_POW2 = {
    0.0: (0x27800000, 0x00),
    1e-45: (0x27800000, 0x00),
    1e-38: (0x27800000, 0x00),
    TINY: (0x27800000, 0x00),
    FLT_MAX: (0x7B800000, 0x78),
    INF: (0x7FC00000, 0x7E),  # the scale is NaN, whatever the code
    NAN: (0x7FC00000, 0x7F),
}
# bf16 input: 2^-133 is its smallest number and 0x7f7f, 255 * 2^120, its largest. Overflow goes to the latter,
# whose reciprocal, 2105376.25 * 2^-149, is 0x00202020.
BLOCK_BF16_FP32 = {
    0.0: (0x3F800000, 0x00),
    2.0**-133: (0x00202020, 0x10),  # 2^-133 * 2^128 = 2^-5
    TINY: (0x00202020, 0x48),  # 3.98 -> 4
    BF16_MAX: (0x7B11B6DB, 0x7E),
    INF: (0x7FC00000, 0x7E),  # the scale is NaN, whatever the code
    NAN: (0x7FC00000, 0x7F),
}
BLOCK_BF16_POW2 = {
    0.0: (0x3F800000, 0x00),
    2.0**-133: (0x00400000, 0x08),  # 2^-6
    TINY: (0x00400000, 0x40),
    BF16_MAX: (0x7B800000, 0x78),
    INF: (0x7FC00000, 0x7E),  # the scale is NaN, whatever the code
    NAN: (0x7FC00000, 0x7F),
}
F32, BF16 = torch.float32, torch.bfloat16
FP32_SCALE_EDGES = [
    pytest.param(Q.Tensorwise(), F32, TENSORWISE_FP32, id="tensorwise"),
    pytest.param(Q.Tensorwise(pow2=True), F32, TENSORWISE_POW2, id="tensorwise-pow2"),
    pytest.param(Q.Rowwise(), F32, ROWWISE_POW2, id="rowwise"),
    pytest.param(Q.Rowwise(eps=0.0), F32, TENSORWISE_POW2, id="rowwise-eps0"),
    pytest.param(Q.Rowwise(pow2=False, eps=0.0), F32, TENSORWISE_FP32, id="rowwise-fp32-eps0"),
    pytest.param(Q.Block1D(), F32, TENSORWISE_POW2, id="block1d"),
    pytest.param(Q.Block1D(scale="fp32"), F32, TENSORWISE_FP32, id="block1d-fp32"),
    pytest.param(Q.Block2D(), F32, TENSORWISE_POW2, id="block2d"),
    pytest.param(Q.Block2D(scale="fp32"), F32, TENSORWISE_FP32, id="block2d-fp32"),
    pytest.param(Q.Block1D(), BF16, BLOCK_BF16_POW2, id="block1d-bf16"),
    pytest.param(Q.Block1D(scale="fp32"), BF16, BLOCK_BF16_FP32, id="block1d-fp32-bf16"),
    pytest.param(Q.Block2D(scale="fp32"), BF16, BLOCK_BF16_FP32, id="block2d-fp32-bf16"),
]


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["plus", "minus"])
@pytest.mark.parametrize(("spec", "dtype", "edges"), FP32_SCALE_EDGES)
def test_edge_amaxes_give_these_bytes(spec, dtype, edges, sign):
    for amax, (scale_bits, code) in edges.items():
        x = torch.tensor([[0.0, sign * amax]], dtype=dtype)
        q = spec.quantize(x)
        assert [hex(b) for b in bits_of(q.scale).ravel()] == [hex(scale_bits)], amax
        signed_code = code if math.isnan(amax) or sign > 0 else code | 0x80
        assert [hex(b) for b in bytes_of(q.codes).ravel()] == ["0x0", hex(signed_code)], amax


# amax -> (E8M0 byte, code).
MX_E4M3_RCEIL = {
    0.0: (0, 0x00),
    1e-45: (0, 0x00),
    1e-38: (0, 0x3E),
    TINY: (0, 0x40),
    448 * 2.0**-127: (0, 0x7E),  # exactly at the end of what byte 0 serves
    448 * 2.0**-127 + 2.0**-142: (0, 0x7E),  # one fp32 step more: amax * fp32(1/448) rounds back to 2^-127
    450 * 2.0**-127: (1, 0x76),  # one bf16 step more: 225 -> 224
    1.75: (119, 0x7E),
    1.875: (120, 0x77),  # 1.875 * 2^7 = 240
    FLT_MAX: (247, 0x78),
    INF: (255, 0x7F),
    NAN: (255, 0x7F),
}
MX_E4M3_FLOOR = {
    0.0: (0, 0x00),
    1e-45: (0, 0x00),
    1e-38: (0, 0x3E),
    TINY: (0, 0x40),
    450 * 2.0**-127: (0, 0x7E),
    1.0: (119, 0x78),
    1.75: (119, 0x7E),
    1.875: (119, 0x7E),  # 480 saturates: what RCEIL is for
    FLT_MAX: (246, 0x7E),
    INF: (255, 0x7F),
    NAN: (255, 0x7F),
}
MX_E4M3_CEIL = {
    0.0: (0, 0x00),
    1e-45: (0, 0x00),
    TINY: (0, 0x40),
    1.0: (119, 0x78),
    1.0 + 2.0**-23: (120, 0x70),
    1.875: (120, 0x77),
    FLT_MAX: (247, 0x78),
    INF: (255, 0x7F),
    NAN: (255, 0x7F),
}
MX_E4M3_EVEN = {
    0.0: (0, 0x00),
    1e-45: (0, 0x00),
    TINY: (0, 0x40),
    1.875: (119, 0x7E),
    1.9375 - 2.0**-23: (119, 0x7E),
    1.9375: (120, 0x78),  # rounds to 2 in three mantissa bits; 248 ties to 256
    FLT_MAX: (247, 0x78),
    INF: (255, 0x7F),
    NAN: (255, 0x7F),
}
MX_E5M2_RCEIL = {
    0.0: (0, 0x00),
    1e-45: (0, 0x00),
    1e-38: (0, 0x3F),  # 1.701 -> 1.75
    TINY: (0, 0x40),
    1.75: (112, 0x7B),
    1.875: (113, 0x78),  # 1.875 * 2^14 ties between 1.75 and 2
    FLT_MAX: (240, 0x78),
    INF: (255, 0x7F),
    NAN: (255, 0x7F),
}


@pytest.mark.parametrize(
    ("spec", "edges"),
    [
        pytest.param(Q.MX(), MX_E4M3_RCEIL, id="rceil"),
        pytest.param(Q.MX(rounding="floor"), MX_E4M3_FLOOR, id="floor"),
        pytest.param(Q.MX(rounding="ceil"), MX_E4M3_CEIL, id="ceil"),
        pytest.param(Q.MX(rounding="even"), MX_E4M3_EVEN, id="even"),
        pytest.param(Q.MX(fmt=E5M2), MX_E5M2_RCEIL, id="e5m2-rceil"),
        pytest.param(Q.MX(square=True), MX_E4M3_RCEIL, id="square-rceil"),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["plus", "minus"])
def test_edge_amaxes_give_these_mx_bytes(spec, edges, sign):
    for amax, (byte, code) in edges.items():
        q = spec.quantize(torch.tensor([[sign * float(amax)]]))
        signed_code = code if not math.isfinite(amax) or sign > 0 else code | 0x80
        assert (q.scale.item(), bytes_of(q.codes).item()) == (byte, signed_code), amax


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_bad_element_spoils_its_own_mx_block_and_no_other(bad):
    x = torch.ones(2, 64)
    x[0, 40] = bad
    q = Q.MX().quantize(x)
    assert q.scale.tolist() == [[119, 255], [119, 119]]  # 2^8 * 2^-8: amax 1 is 256 * 2^-8
    codes = bytes_of(q.codes)
    assert (codes[0, 32:] == 0x7F).all()
    assert (codes[0, :32] == 0x78).all() and (codes[1] == 0x78).all()


@pytest.mark.parametrize(
    ("spec", "others"),
    [
        (Q.Tensorwise(), NAN),
        (Q.Rowwise(), 2.0**-8),
        (Q.Block1D(), 2.0**-8),
        (Q.Block2D(), NAN),  # both rows are in the one block
    ],
)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_bad_element_makes_the_scale_of_its_group_nan(spec, others, bad):
    """All that shares the scale decodes to NaN, and nothing else does. The codes there are of x as it is."""
    x = torch.ones(2, 128)
    x[1, 5] = bad
    q = spec.quantize(x)
    scale = q.scale.expand(2, 1) if q.scale.shape[0] == 1 else q.scale
    np.testing.assert_array_equal(scale.ravel().tolist(), [others, NAN])
    codes = bytes_of(q.codes)
    assert codes[1, 5] == {INF: 0x7E, -INF: 0xFE}.get(bad, 0x7F)
    assert codes[1, 6] == 0x38  # 1, unscaled
    assert codes[0, 6] == (0x38 if math.isnan(others) else 0x78)
    assert q.dequantize().isnan().tolist() == [[math.isnan(others)] * 128, [True] * 128]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_by_a_given_multiplier_a_bad_element_spoils_itself_alone(fmt, dtype):
    """And a finite one whose product overflows, float32's or the format's, saturates."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([[INF, -INF, NAN, largest, -largest, 1.0, -0.0]], dtype=dtype)
    q, column, _ = Q.Tensorwise(fmt).observe(x, torch.tensor([3e38]))
    infinite = [0x7C, 0xFC] if fmt is E5M2 else [0x7F, 0x7F]
    top = 0x7B if fmt is E5M2 else 0x7E
    want = [*infinite, 0x7F, top, top | 0x80, top, 0x80]
    assert bytes_of(q.codes).ravel().tolist() == want
    assert bytes_of(column.codes).ravel().tolist() == want
    back = q.dequantize().ravel()
    assert back[:2].tolist() == [INF, -INF] if fmt is E5M2 else back[:2].isnan().all()
    assert back[2].isnan() and back[3:].isfinite().all()


def test_an_infinite_code_decodes_to_inf_beside_one_that_saturates():
    """1 / encode is so large that the largest finite code decodes past float16."""
    x = torch.tensor([[INF, -INF, 60000.0, -60000.0]], dtype=torch.float16)
    q = Q.Tensorwise(E5M2).observe(x, torch.tensor([0.5]))[0]
    assert q.dequantize().tolist() == [[INF, -INF, 57344.0, -57344.0]]
    assert Q.Tensorwise(E5M2).observe(x * 1.0, torch.tensor([0.9]))[0].dequantize()[0, 2].isfinite()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("spec", [Q.Tensorwise(), Q.Rowwise(), Q.Block1D(), Q.Block2D(), Q.MX(), Q.NVFP4()])
def test_amax_keeps_nan_and_inf(spec, bad):
    """Dropped NaNs are how a broken step goes unnoticed. First, middle and last places: reductions differ there."""
    for place in (0, 63, 127):
        x = torch.ones(1, 128)
        x[0, place] = bad
        for amax in (spec.amax(x), spec.amax(x.t().contiguous(), 0)):
            assert (amax.isnan() if math.isnan(bad) else amax.isposinf()).any(), place


# ---------------------------------------------------------------------------------------------------------------- eps


@pytest.mark.parametrize(
    "make",
    [
        lambda eps: Q.Tensorwise(eps=eps),
        lambda eps: Q.Rowwise(pow2=False, eps=eps),
        lambda eps: Q.Block1D(scale="fp32", eps=eps),
        lambda eps: Q.Block2D(scale="fp32", eps=eps),
    ],
    ids=["tensorwise", "rowwise", "block1d", "block2d"],
)
@pytest.mark.parametrize("eps", [1e-12, 1e-4, 3.0])
def test_eps_is_a_floor_under_the_amax_and_nothing_else(make, eps):
    floor = float(np.float32(eps))
    above = float(np.nextafter(np.float32(eps), np.float32(INF)))
    for amax in (0.0, 1e-45, floor / 2, floor, above, 10.0 * floor, INF, NAN):
        q = make(eps).quantize(torch.tensor([[amax]]))
        s = multiplier(np.array([amax], np.float32), 448.0, pow2=False, eps=eps)
        assert bits_of(q.scale).ravel().tolist() == stored(s, amax).tolist(), amax


def test_rowwise_default_eps_keeps_an_all_zero_row_finite():
    q = Q.Rowwise().quantize(torch.zeros(2, 8))
    assert q.scale.ravel().tolist() == [2.0**-48] * 2
    assert not bytes_of(q.codes).any()
    assert not q.dequantize(torch.float32).any()


# --------------------------------------------------------------------------------------------------------------- MX


@pytest.mark.parametrize("square", [False, True], ids=["1x32", "32x32"])
@ROUNDINGS
@FP8
def test_mx_byte_of_every_bf16_amax(fmt, rounding, square):
    amax = every_bf16_amax()
    x = amax[None, :, None].expand(1, -1, 32).clone()
    x[:, :, 1::2] *= -0.5  # the block also holds smaller elements, of both signs
    x = x.reshape(1, -1)
    q = Q.MX(fmt=fmt, rounding=rounding, square=square).quantize(x)
    expected = mx_byte(amax.float().numpy(), fmt, rounding)
    assert np.array_equal(q.scale.numpy().ravel(), expected)
    inverse_scale = np.where(expected == 255, NAN, np.ldexp(1.0, 127 - expected.astype(np.int64)))
    codes = cast_product(x.float().numpy().ravel(), np.repeat(inverse_scale, 32), fmt)
    assert np.array_equal(bytes_of(q.codes).ravel(), codes)


@FP8
def test_mx_rceil_of_random_fp32_amaxes_multiplies_by_the_rounded_reciprocal(fmt):
    """The definition is v = fp32(amax * fp32(1/max)), rounded up: for fp32 amaxes that is not the exact ratio's."""
    amax = np.concatenate([random_fp32_amax().numpy(), neighbours_of_rceil_boundaries(fmt)])
    v = (amax.astype(np.float64) * np.float64(np.float32(1 / LARGEST[fmt]))).astype(np.float32)
    bits = v.view(np.uint32).astype(np.int64)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    expected = np.where(exponent == 0, mantissa > 0x400000, exponent + (mantissa != 0))
    q = Q.MX(fmt=fmt).quantize(torch.from_numpy(amax)[:, None])
    assert np.array_equal(q.scale.numpy().ravel(), np.clip(expected, 0, 254))


def neighbours_of_rceil_boundaries(fmt) -> np.ndarray:
    """largest * 2^k and the fp32 numbers beside it: where the byte changes."""
    boundary = np.ldexp(np.float64(LARGEST[fmt]), np.arange(-127, 128 - LARGEST_EXPONENT[fmt])).astype(np.float32)
    below, above = np.nextafter(boundary, np.float32(0)), np.nextafter(boundary, np.float32(INF))
    return np.concatenate([boundary, below, above])


@pytest.mark.parametrize("rounding", ["floor", "ceil", "even"])
@FP8
def test_mx_bit_roundings_of_random_fp32_amaxes(fmt, rounding):
    amax = random_fp32_amax()
    q = Q.MX(fmt=fmt, rounding=rounding).quantize(amax[:, None])
    assert np.array_equal(q.scale.numpy().ravel(), mx_byte(amax.numpy(), fmt, rounding))


def test_rceil_never_saturates_a_finite_block_and_floor_often_does():
    """Why RCEIL is the default: FLOOR is smaller for a quarter of all bf16 amaxes and clips the block's maximum."""
    x = every_bf16_amax()
    x = x[(x.float() > 2.0**-100) & x.isfinite()][:, None]
    rceil, floor = Q.MX().quantize(x), Q.MX(rounding="floor").quantize(x)
    exact = x.float() * torch.exp2(127 - rceil.scale.float())
    assert exact.max() <= 448
    smaller = floor.scale < rceil.scale
    assert smaller.float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert (bytes_of(floor.codes)[smaller.numpy()] == 0x7E).all()


# -------------------------------------------------------------------------------------------------- dequantized values


FP8_SPECS = pytest.mark.parametrize(
    "spec", [Q.Tensorwise(), Q.Rowwise(), Q.Block1D(), Q.Block1D(scale="fp32"), Q.Block2D(), Q.MX()], ids=str
)


@FP8_SPECS
def test_dequantize_is_code_times_scale_in_fp32(spec):
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 200)
    q = spec.quantize(x)
    code = bytes_of(q.codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale = q.scale.numpy()
    scale = np.ldexp(1.0, scale.astype(np.int64) - 127) if isinstance(spec, Q.MX) else scale.astype(np.float64)
    rows, columns = {1: 130, 2: 128, 130: 1}[scale.shape[0]], {1: 200, 2: 128, 7: 32}[scale.shape[1]]
    spread = scale.repeat(rows, axis=0)[:130].repeat(columns, axis=1)[:, :200]
    assert np.array_equal(q.dequantize(torch.float32).numpy(), (code * spread).astype(np.float32))


@FP8_SPECS
def test_quantization_error_is_within_half_a_step(spec):
    """|e| <= max(2^-4 |x|, 2^-10 scale): true of any right scale, false of one that is half or double."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 256)
    q = spec.quantize(x)
    error = (q.dequantize(torch.float32).double() - x.double()).abs()
    step = spec._spread_scale(q).double() * 2.0**-10
    assert (error <= torch.maximum(x.double().abs() * 2.0**-4 * (1 + 2.0**-20), step)).all()
    # and the range is used: no group's maximum is coded below half of what the format holds
    assert bytes_of(q.codes).max() & 0x7F >= 0x76


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_saturates_to_the_output_dtype(dtype):
    """bf16's largest number rounds up to 256 * 2^120 = 2^128 under a power-of-two scale."""
    for spec in (Q.MX(), Q.Rowwise(), Q.Block1D(), Q.Tensorwise(pow2=True)):
        x = torch.full((1, 32), BF16_MAX, dtype=torch.bfloat16)
        x[0, 1] = -BF16_MAX
        back = spec.quantize(x).dequantize(dtype)
        assert back.dtype == dtype
        assert back[0, :2].tolist() == [torch.finfo(dtype).max, torch.finfo(dtype).min], spec


def test_transposing_is_lossless_where_blocks_are_square_and_refused_elsewhere():
    x = torch.randn(96, 200, generator=torch.Generator().manual_seed(0))
    for spec in (Q.Tensorwise(), Q.Block2D(), Q.MX(square=True)):
        turned, direct = spec.quantize(x).transpose(), spec.quantize(x, axis=0)
        assert np.array_equal(bytes_of(turned.codes), bytes_of(direct.codes)), spec
        assert np.array_equal(bytes_of(turned.scale), bytes_of(direct.scale)), spec
    for spec in (Q.Rowwise(), Q.Block1D(), Q.MX()):
        with pytest.raises(TypeError):
            spec.quantize(x).transpose()


@pytest.mark.parametrize("spec", [Q.Tensorwise(), Q.Rowwise(), Q.Block1D(), Q.Block2D(), Q.MX(), Q.MX(square=True)])
def test_both_orientations_at_once_equal_one_at_a_time(spec):
    x = torch.randn(70, 150, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 150)
    for made, axis in zip(spec.quantize_both(x), (-1, 0), strict=True):
        single = spec.quantize(x, axis=axis)
        assert np.array_equal(bytes_of(made.codes), bytes_of(single.codes))
        assert np.array_equal(bytes_of(made.scale), bytes_of(single.scale))
    for amax, axis in zip(spec.amax_both(x), (-1, 0), strict=True):
        assert torch.equal(amax, spec.amax(x, axis))
