"""Number formats: every code, every 16-bit input, every tie, against ml_dtypes and against arithmetic written out here.

ml_dtypes agrees with us except where we choose otherwise (we saturate, write NaN as 0x7f or +6, and round E8M0 up), so
the oracles below clamp first and put the documented bytes in for NaN.
"""

import math
import shutil
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.errors import UnsupportedDtype, UnsupportedShape
from octavo.formats import E2M1, E4M3, E5M2, E8M0, pack_nibbles, unpack_nibbles

INF, NAN = math.inf, math.nan
FLT_MAX = float(np.finfo(np.float32).max)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# format, ml_dtypes type, largest value, code of NaN, sign bit
SIGNED = [
    pytest.param(E4M3, ml_dtypes.float8_e4m3fn, 448.0, 0x7F, 0x80, id="e4m3"),
    pytest.param(E5M2, ml_dtypes.float8_e5m2, 57344.0, 0x7F, 0x80, id="e5m2"),
    pytest.param(E2M1, ml_dtypes.float4_e2m1fn, 6.0, 0x07, 0x08, id="e2m1"),
]
signed = pytest.mark.parametrize(("fmt", "oracle_type", "largest", "nan_code", "sign_bit"), SIGNED)


def code_bytes(codes: torch.Tensor) -> np.ndarray:
    return codes.view(torch.uint8).numpy()


def encode_one(fmt, value: float, dtype: torch.dtype = torch.float32) -> int:
    return int(code_bytes(fmt.encode(torch.tensor([value], dtype=dtype)))[0])


def saturating_oracle(x: np.ndarray, oracle_type, largest: float, nan_code: int) -> np.ndarray:
    """Finite values saturate. Inf is Inf in E5M2, NaN in E4M3, and 6 in E2M1, which has neither."""
    clamped = np.clip(np.where(np.isnan(x), np.float32(0), x), np.float32(-largest), np.float32(largest))
    codes = clamped.astype(oracle_type).view(np.uint8)
    if largest == 57344.0:
        codes = np.where(np.isinf(x), np.where(x > 0, np.uint8(0x7C), np.uint8(0xFC)), codes)
    elif largest == 448.0:
        codes = np.where(np.isinf(x), np.uint8(0x7F), codes)
    return np.where(np.isnan(x), np.uint8(nan_code), codes)


def rceil_oracle(x: np.ndarray) -> np.ndarray:
    """Exponent of the smallest power of two >= |x|, on float64's own exponent: fp32 subnormals are normal there."""
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the inputs
        fraction, exponent = np.frexp(np.abs(x.astype(np.float64)))
    power = exponent - (fraction == 0.5)
    byte = np.where(x == 0, 0, np.clip(power + 127, 0, 254))
    return np.where(np.isfinite(x), byte, 255).astype(np.uint8)


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def positive_codes_and_values(oracle_type, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Finite codes from +0 to the largest, in order: for these formats a larger code is a larger value."""
    width = 16 if largest == 6.0 else 256
    codes = np.arange(width // 2, dtype=np.uint8)
    values = codes.view(oracle_type).astype(np.float64)
    finite = np.isfinite(values)
    return codes[finite], values[finite]


# ------------------------------------------------------------------------------------------------------------- decode


@signed
def test_every_code_decodes_to_its_value(fmt, oracle_type, largest, nan_code, sign_bit):
    codes = np.arange(2 * sign_bit, dtype=np.uint8)
    expected = codes.view(oracle_type).astype(np.float32)
    actual = fmt.decode(torch.from_numpy(codes)).numpy()
    assert actual.dtype == np.float32
    # Bits, because -0 == 0; NaN has no value to compare and its sign is nobody's business.
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    number = ~np.isnan(expected)
    assert np.array_equal(actual[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.parametrize(
    ("fmt", "torch_type"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_bytes_and_float8_tensors_decode_alike(fmt, torch_type):
    raw = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert fmt.encode(torch.ones(1)).dtype == torch_type
    assert np.array_equal(fmt.decode(raw).numpy(), fmt.decode(raw.view(torch_type)).numpy(), equal_nan=True)


def test_e2m1_values_are_the_published_table():
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert E2M1.decode(torch.arange(16, dtype=torch.uint8)).tolist() == table + [-v for v in table]


@pytest.mark.parametrize(
    ("fmt", "landmarks"),
    [
        (E4M3, {0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x7E: 448.0, 0xFE: -448.0, 0x7F: NAN, 0xFF: NAN}),
        (E5M2, {0x01: 2**-16, 0x03: 3 * 2**-16, 0x04: 2**-14, 0x3C: 1.0, 0x7B: 57344.0, 0x7C: INF, 0xFC: -INF}),
        (E5M2, {0x7D: NAN, 0x7E: NAN, 0x7F: NAN, 0xFD: NAN, 0xFE: NAN, 0xFF: NAN}),
    ],
)
def test_landmarks_of_the_range(fmt, landmarks):
    values = fmt.decode(torch.tensor(list(landmarks), dtype=torch.uint8)).tolist()
    np.testing.assert_array_equal(values, list(landmarks.values()))


def test_every_e8m0_byte_decodes_to_a_power_of_two_and_255_to_nan():
    values = E8M0.decode(torch.arange(256, dtype=torch.int32).to(torch.uint8)).tolist()
    assert [Fraction(v) for v in values[:255]] == [Fraction(2) ** (b - 127) for b in range(255)]
    assert math.isnan(values[255])


# ------------------------------------------------------------------------------------------------------------- encode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@signed
def test_every_16_bit_input_encodes_as_the_oracle(fmt, oracle_type, largest, nan_code, sign_bit, dtype):
    x = every_16_bit_value(dtype)
    expected = saturating_oracle(x.float().numpy(), oracle_type, largest, nan_code)
    assert np.array_equal(code_bytes(fmt.encode(x)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_16_bit_input_rounds_up_to_a_power_of_two(dtype):
    x = every_16_bit_value(dtype)
    assert np.array_equal(code_bytes(E8M0.encode(x)), rceil_oracle(x.float().numpy()))


def random_bit_patterns(seed: int, count: int) -> np.ndarray:
    """Uniform bits reach every exponent, subnormals, infinities and NaNs: uniform values would reach four."""
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)


def random_in_range(seed: int, count: int, largest: float) -> np.ndarray:
    """Log-uniform over the format's own range, where roundings happen."""
    rng = np.random.default_rng(seed)
    magnitude = largest * np.exp2(-rng.uniform(-1.0, 34.0 if largest > 1000 else 20.0, count))
    return (magnitude * rng.choice([-1.0, 1.0], count)).astype(np.float32)


@pytest.mark.parametrize("chunk", range(4))
@signed
def test_2_to_the_24_random_fp32_encode_as_the_oracle(fmt, oracle_type, largest, nan_code, sign_bit, chunk):
    count = 1 << 21
    for x in (random_bit_patterns(chunk, count), random_in_range(chunk, count, largest)):
        expected = saturating_oracle(x, oracle_type, largest, nan_code)
        assert np.array_equal(code_bytes(fmt.encode(torch.from_numpy(x))), expected)


@pytest.mark.parametrize("chunk", range(8))
def test_2_to_the_24_random_fp32_round_up_to_a_power_of_two(chunk):
    x = random_bit_patterns(chunk, 1 << 21)
    assert np.array_equal(code_bytes(E8M0.encode(torch.from_numpy(x))), rceil_oracle(x))


@signed
def test_every_tie_goes_to_the_even_code_and_its_neighbours_do_not(fmt, oracle_type, largest, nan_code, sign_bit):
    codes, values = positive_codes_and_values(oracle_type, largest)
    tie = ((values[:-1] + values[1:]) / 2).astype(np.float32)  # exact: one bit more than the format holds
    assert np.array_equal(2 * tie.astype(np.float64), values[:-1] + values[1:])
    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    below, above = np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(INF))
    for x, expected in ((below, codes[:-1]), (tie, even), (above, codes[1:])):
        assert np.array_equal(code_bytes(fmt.encode(torch.from_numpy(x))), expected)
        assert np.array_equal(code_bytes(fmt.encode(torch.from_numpy(-x))), expected | sign_bit)


@signed
def test_every_value_is_a_fixed_point_and_so_are_its_fp32_neighbours(fmt, oracle_type, largest, nan_code, sign_bit):
    codes, values = positive_codes_and_values(oracle_type, largest)
    exact = values.astype(np.float32)
    for x in (exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(INF))):
        assert np.array_equal(code_bytes(fmt.encode(torch.from_numpy(x))), codes)


@signed
def test_the_chosen_code_is_nearest_by_exact_arithmetic(fmt, oracle_type, largest, nan_code, sign_bit):
    """No oracle but Fraction: no representable value may be closer than the one chosen."""
    _, values = positive_codes_and_values(oracle_type, largest)
    grid = [Fraction(v) for v in values]
    x = np.abs(random_in_range(99, 300, largest))
    x = x[x <= largest]
    chosen = fmt.decode(fmt.encode(torch.from_numpy(x))).tolist()
    for value, q in zip(x.tolist(), chosen, strict=True):
        assert abs(Fraction(q) - Fraction(value)) == min(abs(g - Fraction(value)) for g in grid)


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (0.0, 0),
        (2.0**-149, 0),
        (2.0**-127, 0),
        (2.0**-127 + 2.0**-149, 1),
        (2.0**-126, 1),
        (2.0**-126 + 2.0**-149, 2),
        (0.75, 127),
        (1.0, 127),
        (1.0 + 2.0**-23, 128),
        (1.25, 128),
        (1.5, 128),
        (-3.0, 129),
        (2.0**127, 254),
        (FLT_MAX, 254),
        (INF, 255),
        (-INF, 255),
        (NAN, 255),
    ],
)
def test_e8m0_rounds_up_at_every_edge(value, byte):
    assert encode_one(E8M0, value) == byte


def test_e8m0_codes_are_fixed_points():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(E8M0.encode(E8M0.decode(codes)), codes)


# ---------------------------------------------------------------------------------------- zeros and subnormals


@pytest.mark.parametrize("dtype", FLOATS)
@signed
def test_zero_keeps_its_sign(fmt, oracle_type, largest, nan_code, sign_bit, dtype):
    assert encode_one(fmt, 0.0, dtype) == 0
    assert encode_one(fmt, -0.0, dtype) == sign_bit
    assert math.copysign(1.0, fmt.decode(fmt.encode(torch.tensor([-0.0], dtype=dtype))).item()) == -1.0


@signed
def test_underflow_keeps_its_sign(fmt, oracle_type, largest, nan_code, sign_bit):
    assert encode_one(fmt, 2.0**-149) == 0
    assert encode_one(fmt, -(2.0**-149)) == sign_bit


@pytest.mark.parametrize(
    ("fmt", "value", "expected"),
    [
        (E4M3, 2.0**-10, 0.0),
        (E4M3, 3 * 2.0**-10, 2.0**-8),
        (E4M3, 5 * 2.0**-10, 2.0**-8),
        (E4M3, 15 * 2.0**-10, 2.0**-6),  # the tie between the last subnormal and the first normal
        (E5M2, 2.0**-17, 0.0),
        (E5M2, 3 * 2.0**-17, 2.0**-15),
        (E5M2, 5 * 2.0**-17, 2.0**-15),
        (E5M2, 7 * 2.0**-17, 2.0**-14),
        (E2M1, 0.25, 0.0),
        (E2M1, 0.75, 1.0),
        (E2M1, 1.25, 1.0),
        (E2M1, 1.75, 2.0),
        (E2M1, 2.5, 2.0),
        (E2M1, 3.5, 4.0),
        (E2M1, 5.0, 4.0),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_named_by_the_specification(fmt, value, expected, dtype):
    x = torch.tensor([value, -value], dtype=dtype)
    assert fmt.decode(fmt.encode(x)).tolist() == [expected, -expected]


# ------------------------------------------------------------------------------------------------------ saturation


@pytest.mark.parametrize(
    ("fmt", "largest_code", "sign_bit", "values"),
    [
        (E4M3, 0x7E, 0x80, [432.00003, 448, 449, 464, 464.00003, 480, 1e38, FLT_MAX]),
        (E5M2, 0x7B, 0x80, [53248.004, 57344, 61439, 61440, 65536, 1e38, FLT_MAX]),
        (E2M1, 0x07, 0x08, [5.0000005, 6, 7, 8, 100, 1e38, FLT_MAX, INF]),
    ],
    ids=["e4m3", "e5m2", "e2m1"],
)
def test_out_of_range_saturates_to_the_largest_finite(fmt, largest_code, sign_bit, values):
    x = torch.tensor(values)
    assert code_bytes(fmt.encode(x)).tolist() == [largest_code] * len(values)
    assert code_bytes(fmt.encode(-x)).tolist() == [largest_code | sign_bit] * len(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@signed
def test_an_infinity_stays_visible_where_the_format_can_say_it(fmt, oracle_type, largest, nan_code, sign_bit, dtype):
    """A finite value too large, beside it, saturates."""
    x = torch.tensor([INF, -INF, torch.finfo(dtype).max], dtype=dtype)
    infinite = {"E4M3": [NAN, NAN], "E5M2": [INF, -INF], "E2M1": [6.0, -6.0]}[fmt.name]
    np.testing.assert_array_equal(fmt.decode(fmt.encode(x)).tolist(), [*infinite, largest])


# ------------------------------------------------------------------------------------------------------------- NaN


@signed
def test_nan_is_one_code_whatever_its_sign_and_payload(fmt, oracle_type, largest, nan_code, sign_bit):
    patterns = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FA00000]
    x = torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32))
    assert code_bytes(fmt.encode(x)).tolist() == [nan_code] * len(patterns)


def test_e8m0_nan_ignores_sign():
    assert code_bytes(E8M0.encode(torch.tensor([NAN, -NAN]))).tolist() == [255, 255]


# --------------------------------------------------------------------------------------------------------- nibbles


def test_every_pair_of_nibbles_packs_low_first_and_comes_back():
    low = torch.arange(256, dtype=torch.int32) % 16
    high = torch.arange(256, dtype=torch.int32) // 16
    codes = torch.stack([low, high], dim=-1).to(torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.flatten().tolist() == list(range(256))
    assert torch.equal(unpack_nibbles(packed), codes)


@pytest.mark.parametrize("shape", [(2,), (3, 4), (2, 3, 16), (0, 4), (4, 0)])
def test_nibbles_round_trip_in_any_rank_without_moving(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack_nibbles(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(packed & 15, codes[..., 0::2])
    assert torch.equal(packed >> 4, codes[..., 1::2])
    assert torch.equal(unpack_nibbles(packed), codes)


def test_nibbles_of_a_strided_view_pack_by_position_not_by_memory():
    codes = torch.arange(16, dtype=torch.uint8).reshape(4, 4)
    assert torch.equal(pack_nibbles(codes.t()), pack_nibbles(codes.t().contiguous()))


@pytest.mark.parametrize("shape", [(1,), (4, 3), (2, 2, 15)])
def test_an_odd_last_dim_is_refused(shape):
    with pytest.raises(UnsupportedShape):
        pack_nibbles(torch.zeros(shape, dtype=torch.uint8))


# ------------------------------------------------------------------------------------------------- shapes and dtypes


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, E8M0], ids=["e4m3", "e5m2", "e2m1", "e8m0"])
def test_a_strided_input_encodes_as_its_copy(fmt):
    x = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0))
    for view in (x.transpose(0, 2), x[:, ::2], x[0, 0, :1].expand(5)):
        assert np.array_equal(code_bytes(fmt.encode(view).contiguous()), code_bytes(fmt.encode(view.contiguous())))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, E8M0], ids=["e4m3", "e5m2", "e2m1", "e8m0"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_integers_are_refused_by_name(fmt, dtype):
    with pytest.raises(UnsupportedDtype):
        fmt.encode(torch.ones(4, dtype=dtype))


# -- eager == compiled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, E8M0], ids=str)
def test_a_compiled_encoder_writes_the_same_bytes(fmt, backend):
    """Every bfloat16 value, as float32: NaN payloads, infinities, subnormals and both zeros among them."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("Inductor needs g++ to compile for a CPU")
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    torch._dynamo.reset()
    compiled = torch.compile(fmt.encode, fullgraph=True, backend=backend)(x)
    assert torch.equal(compiled.view(torch.uint8), fmt.encode(x).view(torch.uint8))
