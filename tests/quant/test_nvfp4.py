"""NVFP4: two-level scales, stochastic rounding from a counter, and the Hadamard turn, each against its definition.

The oracle uses numpy's fp32 operations one at a time: the definition fixes every intermediate rounding. Its Philox is
written from the published algorithm and checked against a published vector first.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import octavo.quant as Q
from octavo.errors import UnsupportedConfig
from octavo.formats import E2M1, E4M3, unpack_nibbles
from octavo.quant.nvfp4 import hadamard
from octavo.recipes.nvfp4 import NVFP4 as NVFP4Recipe
from tests.support.linear_oracle import randn

INF, NAN = math.inf, math.nan
F = np.float32
FLT_MAX = np.finfo(F).max
TINY = 2.0**-126
E2M1_TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=F)


# ------------------------------------------------------------------------------------------------------------ oracles


def e4m3_byte(v: np.ndarray) -> np.ndarray:
    clamped = np.clip(np.where(np.isnan(v), F(0), v), F(-448), F(448))
    return np.where(np.isnan(v), np.uint8(0x7F), clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def e4m3_value(byte: np.ndarray) -> np.ndarray:
    return byte.view(ml_dtypes.float8_e4m3fn).astype(F)


def e2m1_nearest(v: np.ndarray) -> np.ndarray:
    """Codes of E2M1, by counting the thresholds passed. Odd codes lose both of their ties, so the comparisons
    alternate: .25 stays 0, .75 becomes 1, 1.25 stays 1, 1.75 becomes 2, 2.5 stays 2, 3.5 becomes 4, 5 stays 4."""
    a = np.abs(v)
    code = np.zeros(v.shape, np.uint8)
    for threshold, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (a >= threshold) if tie_goes_up else (a > threshold)
    code |= np.signbit(v).astype(np.uint8) << 3
    return np.where(np.isnan(v), np.uint8(7), code)


def e2m1_step(a: np.ndarray) -> np.ndarray:
    return np.where(a < 2, 0.5, np.where(a < 4, 1.0, 2.0))


def e2m1_stochastic(v: np.ndarray, r: np.ndarray) -> np.ndarray:
    a = np.minimum(np.abs(v.astype(np.float64)), 6.0)
    t = a + r / 256 * e2m1_step(a)
    q = np.minimum(np.floor(t / e2m1_step(t)) * e2m1_step(t), 6.0)
    code = np.searchsorted(E2M1_TABLE, np.where(np.isnan(q), 6.0, q)).astype(np.uint8)
    code |= np.signbit(v).astype(np.uint8) << 3
    return np.where(np.isnan(v), np.uint8(7), code)


def global_encode(g: np.float32) -> np.float32:
    if g == 0 or not np.isfinite(g):
        return F(1)
    with np.errstate(over="ignore"):
        return np.minimum(F(2688) / F(g), FLT_MAX)


def block_scales(block_amax: np.ndarray, g: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """(S_b as bytes, e): the folded reciprocal, then E4M3, then one reciprocal of the rounded product."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        folded = global_encode(g) * F(1 / 6)
        byte = e4m3_byte(block_amax.astype(F) * folded)
        e = F(1) / (e4m3_value(byte) * (F(1) / global_encode(g)))
    return byte, np.minimum(e, FLT_MAX)


def blocks_of_16(x: np.ndarray) -> np.ndarray:
    rows, columns = x.shape
    padded = np.zeros((rows, -(-columns // 16) * 16), F)
    padded[:, :columns] = x
    return padded.reshape(rows, -1, 16)


def oracle(x: np.ndarray, *, r: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(codes [M, padded K], S_b bytes [M, blocks], G) of 1x16 blocks of fp32 values."""
    blocks = blocks_of_16(x)
    g = np.abs(blocks).max() if blocks.size else F(0)
    byte, e = block_scales(np.abs(blocks).max(axis=-1), g)
    with np.errstate(over="ignore", invalid="ignore"):
        v = np.clip(blocks * e[..., None], F(-6), F(6))
    codes = e2m1_nearest(v) if r is None else e2m1_stochastic(v, r.reshape(v.shape))
    return codes.reshape(len(x), -1), byte, g


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon et al. 2011): counter [n, 4] of 32-bit words -> [n, 4]."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=-1).astype(np.uint32)


def random_bytes(seed: int, step: int, stream: int, blocks: int) -> np.ndarray:
    """r of every element [blocks, 16]: byte j of a block's four words, little end first, belongs to element j."""
    index = np.arange(blocks, dtype=np.uint64)
    counter = np.zeros((blocks, 4), np.uint64)
    counter[:, 0], counter[:, 1] = index & np.uint64(0xFFFFFFFF), index >> np.uint64(32)
    counter[:, 2], counter[:, 3] = step & 0xFFFFFFFF, stream
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)).astype("<u4").view(np.uint8).reshape(-1, 16)


def sylvester() -> np.ndarray:
    h = np.array([[1.0]])
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    return h


def turned(x: np.ndarray) -> np.ndarray:
    """diag(signs), butterflies in fp32 at distances 1, 2, 4, 8, a quarter, then bf16. x [R, C], zero padded to 16."""
    v = blocks_of_16(x) * SIGNS
    for distance in (1, 2, 4, 8):
        pair = v.reshape(*v.shape[:2], 16 // (2 * distance), 2, distance)
        v = np.stack([pair[..., 0, :] + pair[..., 1, :], pair[..., 0, :] - pair[..., 1, :]], axis=-2).reshape(v.shape)
    return (v * F(0.25)).astype(ml_dtypes.bfloat16).astype(F).reshape(len(x), -1)


# ------------------------------------------------------------------------------------------------------------ helpers


def codes_of(q) -> np.ndarray:
    return unpack_nibbles(q.codes).numpy()


def assert_equals(q, codes: np.ndarray, byte: np.ndarray, g: np.float32) -> None:
    assert np.array_equal(q.scale.numpy(), byte)
    assert np.array_equal(codes_of(q), codes)
    assert q.global_scale.dtype == torch.float32 and q.global_scale.shape == (1,)
    assert q.global_scale.item() == float(F(g) / F(2688))


def assert_same(a, b) -> None:
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scale, b.scale)
    assert torch.equal(a.global_scale, b.global_scale)


def seed_tensor(seed: int, step: int) -> torch.Tensor:
    return torch.tensor([seed, step], dtype=torch.int64)


def wide(*shape: int, seed: int = 0) -> torch.Tensor:
    """Blocks of very different size: exercises every S_b, underflow to 0 included."""
    scale = torch.exp2(torch.rand(*shape[:-1], 1, generator=torch.Generator().manual_seed(seed + 1)) * 24 - 20)
    return randn(*shape, seed=seed) * scale


# ---------------------------------------------------------------------------------------------- both levels of scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [randn, wide])
@pytest.mark.parametrize("shape", [(64, 256), (33, 47), (1, 1), (5, 16), (3, 17)])
def test_codes_and_scales_follow_the_definition(shape, make, dtype):
    x = make(*shape).to(dtype)
    assert_equals(Q.NVFP4().quantize(x), *oracle(x.float().numpy()))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 1.0, 1e10, 1e30])
def test_the_global_scale_follows_the_tensor(magnitude):
    x = randn(16, 64) * magnitude
    assert_equals(Q.NVFP4().quantize(x), *oracle(x.numpy()))


@pytest.mark.parametrize("g", [1.0, 2688.0, 3.0, 0.1, 1e20])
def test_block_scale_of_every_bf16_block_amax(g):
    """One row per bf16 value up to G, in a tensor whose amax is exactly G."""
    values = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = torch.cat([values[values <= g], torch.tensor([g])])
    x = torch.zeros(len(values), 16)
    x[:, 0], x[:, 1], x[:, 2] = values, -values / 2, values / 3
    assert_equals(Q.NVFP4().quantize(x), *oracle(x.numpy()))


def test_the_block_scale_rounds_to_nearest_and_may_clip_the_block_maximum():
    """G = 2688 makes S_enc 1, so S_b is the block's amax / 6 in E4M3."""
    x = torch.zeros(5, 16)
    x[0, 0] = 2688.0
    x[1, 0] = 6.0  # S_b = 1
    x[2, 0] = 6.375  # 1.0625 ties down to 1: the maximum is clipped from 6.375 to 6
    x[3, 0] = 6.5  # 1.083 rounds up to 1.125, so 6.5 -> 5.78 -> 6
    x[4, 0], x[4, 1] = 6.375, 3.3
    q = Q.NVFP4().quantize(x)
    assert q.scale.ravel().tolist() == [0x7E, 0x38, 0x38, 0x39, 0x38]
    assert q.dequantize(torch.float32)[:, 0].tolist() == [2688.0, 6.0, 6.0, 6.75, 6.0]
    assert codes_of(q)[4, :2].tolist() == [7, 5]  # 3.3 -> 3


def test_a_block_far_below_the_tensor_maximum_has_scale_zero_and_codes_of_six():
    x = torch.zeros(4, 16)
    x[0, 0] = 2688.0  # S_enc = 1
    x[1, :3] = torch.tensor([1e-4, -1e-4, 1e-30])  # 1e-4 / 6 is below half of E4M3's smallest
    x[2, 0] = 6 * 2.0**-10 * 1.001  # just above half of it: rounds up to 2^-9
    x[3, 0] = 6 * 2.0**-10 * 0.999
    q = Q.NVFP4().quantize(x)
    assert q.scale.ravel().tolist() == [0x7E, 0x00, 0x01, 0x00]
    # e = FLT_MAX: anything not negligible next to 1/FLT_MAX hits the clip, and zeros stay zero
    assert codes_of(q)[1].tolist() == [7, 15, 7] + [0] * 13
    assert not q.dequantize(torch.float32)[1].any()
    assert not q.dequantize(torch.float32)[3].any()


# amax of a one-element tensor -> (code, S_b byte, bits of global_scale). Worked by hand: up to 2688 / FLT_MAX the
# clamped S_enc = FLT_MAX leaves global_scale = 1 / FLT_MAX = 2^-128 (0x00200000) and e itself clamps to FLT_MAX.
EDGES = {
    0.0: (0, 0x00, 0x00000000),
    1e-45: (0, 0x00, 0x00200000),
    1e-38: (5, 0x31, 0x00200000),  # 3.403 / 6 = .567 -> .5625; 3.403 -> 3
    TINY: (6, 0x33, 0x00200000),  # 4 / 6 -> .6875; 4 -> 4
    float(FLT_MAX): (7, 0x7E, 0x79C30C30),
    INF: (7, 0x7F, 0x7FC00000),  # as NaN
    NAN: (7, 0x7F, 0x7FC00000),
}


@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["plus", "minus"])
@pytest.mark.parametrize("amax", EDGES, ids=str)
def test_edge_amaxes_give_these_bytes(amax, sign, square):
    code, byte, global_bits = EDGES[amax]
    q = Q.NVFP4(square=square).quantize(torch.tensor([[sign * amax]]))
    assert codes_of(q)[0, 0] == (code if not math.isfinite(amax) or sign > 0 else code | 8)
    assert q.scale.item() == byte
    if not math.isfinite(amax):
        assert q.global_scale.isnan().all()
    else:
        assert hex(q.global_scale.view(torch.int32).item()) == hex(global_bits)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_bad_element_marks_its_block_and_the_global_scale(bad):
    x = torch.full((1, 48), 3.0)
    x[0, 20] = bad
    q = Q.NVFP4().quantize(x)
    assert q.scale.ravel().tolist() == [0x30, 0x7F, 0x30]
    assert (codes_of(q)[0, 16:32] == 7).all()
    assert (codes_of(q)[0, :16] == 7).all()  # S_enc = 1, e = 2
    assert q.global_scale.isnan().all()
    assert q.dequantize(torch.float32).isnan().all()


def test_a_given_amax_replaces_the_tensors_own():
    x = randn(8, 32)
    g = x.abs().max() * 2
    q = Q.NVFP4().quantize(x, amax=g.view(Q.NVFP4().amax(x).shape))
    byte, e = block_scales(np.abs(blocks_of_16(x.numpy())).max(axis=-1), F(g.item()))
    codes = e2m1_nearest(np.clip(blocks_of_16(x.numpy()) * e[..., None], F(-6), F(6))).reshape(8, -1)
    assert_equals(q, codes, byte, F(g.item()))


def test_amax_is_the_tensors_one_number():
    x = randn(8, 32)
    x[3, 31] = -9.0
    assert Q.NVFP4().amax(x).ravel().tolist() == [9.0]


# --------------------------------------------------------------------------------------------------- the reciprocal


def test_the_sixth_is_folded_into_the_global_scale_before_the_product():
    """Three ways to write amax * S_enc / 6 differ in the last bit, and now and then in the E4M3 byte. Only the
    folded one is right: the others must be seen to differ on these inputs, or this test says nothing."""
    differ_divide = differ_order = 0
    for g in (F(1.0), F(3.0), F(5.7), F(11.0), F(100.3)):
        s_enc = global_encode(g)
        amax = near_e4m3_ties(g)
        folded = e4m3_byte(amax * (s_enc * F(1 / 6)))
        differ_divide += (folded != e4m3_byte(amax * s_enc / F(6))).sum()
        differ_order += (folded != e4m3_byte(amax * s_enc * F(1 / 6))).sum()
        x = np.zeros((len(amax) + 1, 16), F)
        x[:-1, 0], x[-1, 0] = amax, g
        q = Q.NVFP4().quantize(torch.from_numpy(x))
        assert np.array_equal(q.scale.numpy().ravel()[:-1], folded)
    assert differ_divide > 0 and differ_order > 0


def near_e4m3_ties(g: np.float32) -> np.ndarray:
    """fp32 amaxes within a few steps of where amax * S_enc / 6 lies between two E4M3 values."""
    values = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    ties = (values[:-1] + values[1:]) / 2
    centre = (ties * 6 / np.float64(global_encode(g))).astype(F)
    steps = np.arange(-4, 5, dtype=np.int64)
    around = (centre.view(np.uint32).astype(np.int64)[:, None] + steps).astype(np.uint32).view(F).ravel()
    return around[around < g]


# ------------------------------------------------------------------------------------------- layouts and dequantizing


def test_dequantize_is_code_times_scale_times_global_scale():
    x = wide(20, 40)
    q = Q.NVFP4().quantize(x)
    code = np.concatenate([E2M1_TABLE, -E2M1_TABLE])[codes_of(q)]
    product = code * e4m3_value(q.scale.numpy()).astype(np.float64).repeat(16, axis=1)  # exact: 1 + 3 mantissa bits
    expected = (product * np.float64(q.global_scale.item())).astype(F)[:, :40]
    assert np.array_equal(q.dequantize(torch.float32).numpy(), expected)
    as_bf16 = q.dequantize(torch.bfloat16).float().numpy()
    assert np.array_equal(as_bf16, expected.astype(ml_dtypes.bfloat16).astype(F))


def test_error_is_within_the_published_bound():
    """RNE: a quarter, a half, one of the block scale; plus the clipped 6.25% of a block's maximum."""
    x = randn(64, 256)
    q = Q.NVFP4().quantize(x)
    s = (e4m3_value(q.scale.numpy()).astype(np.float64) * q.global_scale.item()).repeat(16, axis=1)
    ratio = np.abs(x.numpy()) / s
    bound = s * np.where(ratio <= 2, 0.25, np.where(ratio <= 4, 0.5, 1.0)) * (1 + 1e-6)
    error = np.abs(q.dequantize(torch.float32).numpy().astype(np.float64) - x.numpy())
    assert ratio.max() <= 6 * 1.0625 * (1 + 1e-6)
    assert (error <= bound).all()


def test_padding_is_zero_codes():
    q = Q.NVFP4().quantize(torch.full((2, 19), -1.0))
    assert q.codes.shape == (2, 16)
    assert (codes_of(q)[:, 19:] == 0).all()
    assert (codes_of(q)[:, :19] == 15).all()


def test_square_blocks_share_a_scale_over_16_rows_and_transpose_losslessly():
    x = wide(40, 50)
    q = Q.NVFP4(square=True).quantize(x)
    padded = np.zeros((48, 64), F)
    padded[:40, :50] = x.numpy()
    block_amax = np.abs(padded).reshape(3, 16, 4, 16).max(axis=(1, 3))
    g = np.abs(padded).max()
    byte, e = block_scales(block_amax, g)
    spread = e.repeat(16, axis=0).repeat(16, axis=1)[:40]
    assert_equals(q, e2m1_nearest(np.clip(padded[:40] * spread, F(-6), F(6))), byte, g)
    assert_same(q.transpose(), Q.NVFP4(square=True).quantize(x, axis=0))
    with pytest.raises(TypeError):
        Q.NVFP4().quantize(x).transpose()


def test_columns_are_rows_of_the_transpose():
    x = wide(40, 50)
    assert_equals(Q.NVFP4().quantize(x, axis=0), *oracle(x.numpy().T))
    row, column = Q.NVFP4().quantize_both(x)
    assert_same(row, Q.NVFP4().quantize(x))
    assert_same(column, Q.NVFP4().quantize(x, axis=0))


# -------------------------------------------------------------------------------------------- D stochastic rounding

STOCHASTIC = Q.NVFP4(stochastic=True)


def test_the_oracles_philox_gives_the_published_vectors():
    zero = philox(np.zeros((1, 4), np.uint64), (0, 0))
    ones = philox(np.full((1, 4), 0xFFFFFFFF, np.uint64), (0xFFFFFFFF, 0xFFFFFFFF))
    assert [hex(w) for w in zero[0]] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    assert [hex(w) for w in ones[0]] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def exactly_scaled(v: np.ndarray) -> np.ndarray:
    """v [n, 16] with column 0 set to 6: then G = 6, S_b = 448, 448 * fp32(1/448) rounds to 1 and so does e. What is
    rounded is v itself."""
    out = v.astype(F)
    out[:, 0] = 6.0
    return out


def test_the_scaled_grid_is_rounded_without_a_scale():
    byte, e = block_scales(np.array([6.0], F), F(6))
    assert byte.tolist() == [0x7E] and e.tolist() == [1.0]


def test_every_random_byte_with_every_grid_value():
    """The bits are known before x is, so x is laid out to meet each of the 256 values of r with every grid value."""
    grid = np.concatenate([np.arange(0, 6 * 32 + 1) / 32, np.random.default_rng(0).uniform(0, 6, 63)]).astype(F)
    grid = np.concatenate([grid, -grid])
    r = random_bytes(seed=11, step=3, stream=0, blocks=256 * len(grid) // 10)
    rank = np.zeros(r.shape, np.int64)
    usable = np.zeros(r.shape, bool)
    usable[:, 1:] = True
    for value in range(256):
        here = (r == value) & usable
        rank[here] = np.arange(here.sum())
        assert here.sum() >= len(grid)
    x = exactly_scaled(grid[rank % len(grid)])
    q = STOCHASTIC.quantize(torch.from_numpy(x), seed=seed_tensor(11, 3))
    assert np.array_equal(codes_of(q), e2m1_stochastic(x, r))
    assert (q.scale == 0x7E).all()


def test_values_of_the_format_are_never_moved():
    table = np.concatenate([E2M1_TABLE, -E2M1_TABLE])
    x = exactly_scaled(np.tile(table, (4096, 1)))
    q = STOCHASTIC.quantize(torch.from_numpy(x), seed=seed_tensor(5, 0))
    assert np.array_equal(E2M1.decode(torch.from_numpy(codes_of(q))).numpy(), x)


def test_sign_of_zero_and_of_what_rounds_to_zero_is_kept():
    x = exactly_scaled(np.tile([0, -0.0, 1e-6, -1e-6] * 4, (64, 1)))
    codes = codes_of(STOCHASTIC.quantize(torch.from_numpy(x), seed=seed_tensor(5, 0)))
    assert codes[:, 4:].reshape(64, 3, 4).tolist() == [[[0, 8, 0, 8]] * 3] * 64


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (1, 0), (123456789012345, 7), (-1, 2**32 + 5), (2**63 - 1, 2**31)])
@pytest.mark.parametrize("shape", [(16, 64), (33, 47), (5, 1)])
def test_bits_come_from_seed_step_stream_and_block_index(shape, seed, step):
    x = wide(*shape)
    for axis, stream in ((-1, 0), (0, 1)):
        oriented = x.numpy() if axis == -1 else x.numpy().T
        rows, columns = oriented.shape
        r = random_bytes(seed, step, stream, rows * -(-columns // 16))
        q = STOCHASTIC.quantize(x, axis=axis, seed=seed_tensor(seed, step))
        assert_equals(q, *oracle(oriented, r=r))


def test_the_mean_is_the_value_less_at_most_a_256th_of_a_step():
    """P(up) = floor(256 f) / 256: a bias towards zero of at most step/256, and never away from zero."""
    count = 20_000
    values = np.array([0.01, 0.125, 0.3, 0.499, 0.777, 1.1, 1.49, 1.9, 2.2, 2.999, 3.5, 4.1, 5.0, 5.9, 0.25])
    x = exactly_scaled(np.tile(np.concatenate([[6.0], values]), (count, 1)))
    codes = codes_of(STOCHASTIC.quantize(torch.from_numpy(x), seed=seed_tensor(1, 1)))
    mean = E2M1.decode(torch.from_numpy(codes)).double().mean(dim=0).numpy()[1:]
    step = e2m1_step(values)
    fraction = values / step - np.floor(values / step)
    sigma = step * np.sqrt(fraction * (1 - fraction) / count)
    assert (mean <= values + 4 * sigma).all()
    assert (mean >= values - step / 256 - 4 * sigma).all()


def test_row_and_column_bits_are_independent():
    """The same blocks in both orientations: their ups and downs must agree as often as two coins, not always."""
    x = exactly_scaled(np.full((4096, 16), 0.25))  # halfway: up with probability 1/2
    row = codes_of(STOCHASTIC.quantize(torch.from_numpy(x), seed=seed_tensor(9, 4)))[:, 1:]
    column = codes_of(STOCHASTIC.quantize(torch.from_numpy(x.T.copy()), axis=0, seed=seed_tensor(9, 4)))[:, 1:]
    assert (row == column).mean() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(row.size))


def test_both_orientations_at_once_use_their_own_streams():
    x = randn(48, 80)
    row, column = STOCHASTIC.quantize_both(x, seed=seed_tensor(3, 2))
    assert_same(row, STOCHASTIC.quantize(x, seed=seed_tensor(3, 2)))
    assert_same(column, STOCHASTIC.quantize(x, axis=0, seed=seed_tensor(3, 2)))


def test_same_seed_and_step_give_the_same_bytes_whatever_torch_has_drawn():
    """Resume: the state of torch's generators is neither read nor moved, nor is the seed tensor."""
    x, seed = randn(32, 64), seed_tensor(3, 2)
    torch.manual_seed(0)
    first = STOCHASTIC.quantize(x, seed=seed)
    before = torch.get_rng_state()
    torch.manual_seed(1)
    torch.rand(100)
    assert_same(first, STOCHASTIC.quantize(x, seed=seed))
    assert seed.tolist() == [3, 2]
    torch.manual_seed(0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("other", [(3, 3), (4, 2), (3 + 2**32, 2)])
def test_another_seed_or_step_gives_other_bytes(other):
    x = randn(32, 64)
    a, b = (STOCHASTIC.quantize(x, seed=seed_tensor(*s)) for s in ((3, 2), other))
    assert torch.equal(a.scale, b.scale)
    assert 0.1 < (codes_of(a) != codes_of(b)).mean() < 0.6


def test_the_first_rows_bits_do_not_depend_on_how_many_rows_follow():
    """A shard that starts at row 0 must draw what the whole tensor draws there."""
    x = randn(64, 48)
    x[0, 0] = 9.0  # the same G in both
    whole, part = (STOCHASTIC.quantize(v, seed=seed_tensor(1, 1)) for v in (x, x[:16]))
    assert torch.equal(whole.codes[:16], part.codes)


def test_nan_is_plus_six_under_stochastic_rounding_too():
    x = torch.full((1, 16), -1.0)
    x[0, 3] = NAN
    q = STOCHASTIC.quantize(x, seed=seed_tensor(0, 0))
    assert (codes_of(q) == 7).all() and q.scale.item() == 0x7F


def test_a_stochastic_quantizer_without_a_seed_is_refused():
    with pytest.raises(UnsupportedConfig):
        STOCHASTIC.quantize(randn(4, 16))


def test_only_gradients_are_rounded_stochastically():
    linear = NVFP4Recipe().linear()
    forward_operands = [linear.fprop.left, linear.fprop.right, linear.dgrad.right, linear.wgrad.right]
    assert [spec.stochastic for spec in forward_operands] == [False] * 4
    assert [linear.dgrad.left.stochastic, linear.wgrad.left.stochastic] == [True, True]
    assert not Q.NVFP4().stochastic


# -------------------------------------------------------------------------------------------------- E Hadamard turn


def test_signs_are_the_published_constant():
    assert list(hadamard.SIGNS) == SIGNS.tolist()
    assert "".join("+" if s > 0 else "-" for s in hadamard.SIGNS) == "+++-+------+-+--"


def test_the_turn_is_diag_signs_times_sylvester_over_four():
    matrix = hadamard.turn(torch.eye(16)).double().numpy()
    assert np.array_equal(matrix, np.diag(SIGNS.astype(np.float64)) @ sylvester() / 4)


def test_the_turn_times_its_transpose_is_exactly_the_identity_in_bf16():
    matrix = hadamard.turn(torch.eye(16))
    assert torch.equal(matrix.bfloat16().float(), matrix)
    assert torch.equal(matrix.bfloat16() @ matrix.bfloat16().t(), torch.eye(16, dtype=torch.bfloat16))


def test_each_group_of_16_turns_on_its_own():
    matrix = hadamard.turn(torch.eye(48)).numpy()
    block = np.diag(SIGNS) @ sylvester() / 4
    assert np.array_equal(matrix, np.kron(np.eye(3), block))


def cancelling(*shape: int) -> torch.Tensor:
    """±1, ±2^26 side by side: fp32 loses the small one or not depending on which sums are taken first."""
    rng = np.random.default_rng(0)
    return torch.from_numpy((rng.choice([-1, 1], shape) * rng.choice([1, 3, 2**26], shape)).astype(F))


@pytest.mark.parametrize("make", [randn, wide, cancelling])
def test_every_bit_of_the_turn_is_fixed_by_the_order_of_additions(make):
    x = make(257, 64).bfloat16().float()
    assert np.array_equal(hadamard.turn(x).numpy().view(np.uint32), turned(x.numpy()).view(np.uint32))


def test_turning_back_undoes_the_turn():
    small = torch.randint(-8, 9, (64, 32), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(hadamard.turn_back(hadamard.turn(small)), small)  # every sum fits bf16: exact
    x = randn(64, 32)
    error = (hadamard.turn_back(hadamard.turn(x)) - x).norm() / x.norm()
    assert error < 2.0**-8  # bf16's rounding of the turned values


def test_turning_back_adds_no_rounding():
    y = randn(64, 32)
    expected = y.double().view(64, 2, 16) @ torch.from_numpy(sylvester() / 4) * torch.from_numpy(SIGNS).double()
    error = hadamard.turn_back(y).double() - expected.view(64, 32)
    assert error.abs().max() < 2.0**-21


def test_wgrad_of_turned_operands_is_the_plain_wgrad():
    tokens, x, dy = 128, randn(128, 24, seed=1), randn(128, 40, seed=2)
    plain = dy.double().t() @ x.double()
    product = hadamard.turn(dy.t().contiguous()).double() @ hadamard.turn(x.t().contiguous()).double().t()
    # two bf16 roundings per product, of random sign: the error grows as the plain sum's own norm does
    assert (product - plain).norm() / plain.norm() < 2.0**-8
    ints = [torch.randint(-4, 5, (tokens, n), generator=torch.Generator().manual_seed(n)).float() for n in (24, 40)]
    exact = hadamard.turn(ints[1].t().contiguous()) @ hadamard.turn(ints[0].t().contiguous()).t()
    assert torch.equal(exact, ints[1].t() @ ints[0])


def test_forgetting_to_turn_one_operand_would_show():
    """The two checks above can fail: an unturned operand is not close."""
    x, dy = randn(128, 24, seed=1), randn(128, 40, seed=2)
    plain = dy.t() @ x
    assert (hadamard.turn(dy.t().contiguous()) @ x - plain).norm() / plain.norm() > 0.5


TURNED = Q.NVFP4(rht=True)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 40, 64])
@pytest.mark.parametrize("axis", [-1, 0])
def test_the_turned_tensor_is_what_is_quantized(columns, axis):
    """Codes, block scales and G all come from the turned, zero-padded values."""
    x = wide(20, columns).bfloat16()
    oriented = x.float().numpy() if axis == -1 else x.float().numpy().T
    given = x if axis == -1 else x.t().contiguous().t()
    assert_equals(TURNED.quantize(given, axis=axis), *oracle(turned(oriented)))
    assert TURNED.amax(given, axis).item() == np.abs(turned(oriented)).max()


@pytest.mark.parametrize("columns", [1, 17, 40])
def test_a_ragged_contraction_equals_the_zero_padded_one(columns):
    x = randn(20, columns).bfloat16()
    padded = torch.zeros(20, -(-columns // 16) * 16, dtype=torch.bfloat16)
    padded[:, :columns] = x
    assert_same(TURNED.quantize(x), TURNED.quantize(padded))
    ragged = TURNED.quantize(x).dequantize(torch.float32)
    assert torch.equal(ragged, TURNED.quantize(padded).dequantize(torch.float32)[:, :columns])


def test_dequantize_turns_back():
    x = randn(64, 64).bfloat16()
    q = TURNED.quantize(x)
    values = np.concatenate([E2M1_TABLE, -E2M1_TABLE])[codes_of(q)] * e4m3_value(q.scale.numpy()).repeat(16, axis=1)
    values = (values * np.float64(q.global_scale.item())).astype(F)
    expected = values.astype(np.float64).reshape(64, 4, 16) @ (sylvester() / 4) * SIGNS
    back = q.dequantize(torch.float32).double().numpy()
    assert np.abs(back - expected.reshape(64, 64)).max() < 2.0**-19
    assert (torch.from_numpy(back) - x.double()).norm() / x.double().norm() < 0.13


def test_wgrad_of_quantized_turned_operands_is_as_close_as_the_plain_quantized_one():
    x, dy = randn(256, 48, seed=1).bfloat16(), randn(256, 32, seed=2).bfloat16()
    plain = dy.double().t() @ x.double()
    error = {}
    for spec in (Q.NVFP4(), TURNED):
        left, right = (spec.quantize(v, axis=0).dequantize(torch.float32).double() for v in (dy, x))
        error[spec.rht] = (left @ right.t() - plain).norm() / plain.norm()
    assert error[True] < 0.17 and error[False] < 0.17


def test_turned_and_stochastic_together():
    x = wide(64, 32).bfloat16()
    q = Q.NVFP4(rht=True, stochastic=True).quantize(x, axis=0, seed=seed_tensor(7, 8))
    values = turned(x.float().numpy().T)
    assert_equals(q, *oracle(values, r=random_bytes(7, 8, 1, values.size // 16)))


def test_the_recipe_turns_both_operands_of_wgrad_and_nothing_else():
    linear = NVFP4Recipe().linear()
    assert [linear.wgrad.left.rht, linear.wgrad.right.rht] == [True, True]
    others = [linear.fprop.left, linear.fprop.right, linear.dgrad.left, linear.dgrad.right]
    assert [spec.rht for spec in others] == [False] * 4
    assert [linear.fprop.right.square, linear.dgrad.right.square] == [True, True]


def test_scale_bytes_are_e4m3():
    q = Q.NVFP4().quantize(wide(8, 64))
    assert q.scale.dtype == torch.uint8
    assert np.array_equal(E4M3.decode(q.scale).numpy(), e4m3_value(q.scale.numpy()))
