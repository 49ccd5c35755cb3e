"""The inline assembly that makes NVFP4's codes on a GPU, run in numpy: the bits of the reference for every bfloat16."""

import numpy as np
import pytest
import torch

from octavo.formats import E2M1, E4M3
from octavo.quant.blocks import no_larger
from octavo.quant.nvfp4.reference import block_scales, round_stochastically, tensor_scales
from tests.quant import ptx

pytest.importorskip("triton")

from octavo.quant.nvfp4.codes import codes_ptx

EVERY = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
# maxima of a tensor: everyday ones, and those at which S_enc, its reciprocal or a multiplier leaves the normal numbers
MAXIMA = (1.0, 3.1415927, 447.99997, 1e-3, 65504.0, 1e-45, 1e-40, 2.0**-126, 1e-36, 2.0**100, 1e37, 2.6e38, 3.39e38)


def words_of(x: torch.Tensor) -> list[np.ndarray]:
    """Operands of eight bfloat16: four words of two."""
    pairs = x.view(torch.int16).view(-1, 8).numpy().view(np.uint16).astype(np.uint32)
    return [np.ascontiguousarray(pairs[:, i] | pairs[:, i + 1] << 16) for i in range(0, 8, 2)]


def floats_of(x: torch.Tensor) -> list[np.ndarray]:
    return [np.ascontiguousarray(x.float().view(-1, 8)[:, i].numpy()) for i in range(8)]


def codes(x: torch.Tensor, e: torch.Tensor, words: bool, r: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of x * e, eight to an e, from the assembly; r are the random bytes."""
    operands = (words_of if words else floats_of)(x) + [e.numpy()] * 8
    if r is not None:
        bytes_of = r.to(torch.uint8).view(-1, 8).numpy().view("<u4")
        operands += [np.ascontiguousarray(bytes_of[:, 0])] * 8 + [np.ascontiguousarray(bytes_of[:, 1])] * 8
    text = codes_ptx(words, r is not None)
    packed, _ = ptx.run(text, operands, 2)
    packed = np.broadcast_to(packed, e.shape)
    nibbles = [packed >> np.uint32(4 * i) & np.uint32(15) for i in range(8)]
    return torch.from_numpy(np.stack(nibbles, 1).astype(np.uint8))


def multipliers(g: float) -> torch.Tensor:
    """The multiplier of every block scale there is, NaN last, for a tensor with this maximum."""
    s_enc, _ = tensor_scales(torch.tensor([g]))
    # E4M3 has 127 codes without a sign; a block maximum for each, and NaN
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    amax_b = scales.double() * 6 / s_enc.double()
    found, e = block_scales(torch.cat((amax_b.clamp(max=3.4e38).float(), torch.tensor([float("nan")]))), s_enc)
    assert len(found.view(torch.uint8).unique()) > 1
    return e.unique()


@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("g", MAXIMA)
def test_every_bfloat16_by_every_multiplier(g, words, step):
    """By every fortieth, and with `-m slow` by all of them."""
    finite = EVERY[EVERY.isfinite()]
    x = torch.cat((finite, finite[: -finite.numel() % 8]))
    for e in multipliers(g)[::step]:
        got = codes(x, e.expand(x.numel() // 8).contiguous(), words).flatten()
        want = E2M1.encode(no_larger(x.float() * e, E2M1.max))
        assert torch.equal(got, want), (g, float(e), int((got != want).sum()))


@pytest.mark.parametrize("words", [True, False])
def test_around_every_tie_and_at_random(words):
    """x * e is a few last places around each boundary between codes, for multipliers with all their bits."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.rand(1 << 16, generator=generator) + 0.5).to(torch.bfloat16)
    tie = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 1.0, 2.0, 4.0, 6.0])
    tie = tie[torch.randint(len(tie), (x.numel() // 8,), generator=generator)]
    off = torch.randint(-2, 3, tie.shape, generator=generator, dtype=torch.int32)
    e = ((tie / x[::8].float()).view(torch.int32) + off).view(torch.float32)
    x[4::8] = -x[::8]
    got, want = codes(x, e, words), E2M1.encode(no_larger(x.view(-1, 8).float() * e[:, None], E2M1.max))
    assert torch.equal(got, want)


@pytest.mark.parametrize("step", [60, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("g", MAXIMA[:6])
def test_stochastic_rounding_of_every_bfloat16(g, words, step):
    finite = EVERY[EVERY.isfinite()]
    x = torch.cat((finite, finite[: -finite.numel() % 8]))
    generator = torch.Generator().manual_seed(5)
    for e in multipliers(g)[::step]:
        r = torch.randint(256, x.shape, generator=generator)
        got = codes(x, e.expand(x.numel() // 8).contiguous(), words, r).flatten()
        want = round_stochastically(no_larger(x.float() * e, E2M1.max), r)
        assert torch.equal(got, want), (g, float(e), int((got != want).sum()))


@pytest.mark.parametrize("words", [True, False])
def test_every_random_byte_around_every_step(words):
    """Sums that are a few last places around a multiple of the step, with every byte."""
    generator = torch.Generator().manual_seed(7)
    r = torch.arange(256).repeat_interleave(8 * 64)
    step = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0]).repeat(r.numel() // 8)
    base = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.0]).repeat(r.numel() // 8)
    want_a = base - r * step / 256
    x = (torch.rand(r.numel(), generator=generator) + 0.5).to(torch.bfloat16)
    for i in range(8):  # one multiplier for eight elements: exact for one of them, in turn
        e = (want_a[i::8] / x[i::8].float()).view(torch.int32)
        e = (e + torch.randint(-2, 3, e.shape, generator=generator, dtype=torch.int32)).view(torch.float32)
        got = codes(x, e, words, r)
        want = round_stochastically(no_larger(x.view(-1, 8).float() * e[:, None], E2M1.max), r.view(-1, 8))
        assert torch.equal(got, want)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("words", [True, False])
def test_a_block_of_nan_has_codes_of_six(words, random):
    x = torch.randn(64).to(torch.bfloat16)
    x[:3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    e = torch.full((8,), float("nan"))
    assert (codes(x, e, words, torch.full((64,), 255) if random else None) == 7).all()


def test_multipliers_reach_the_largest_float32_and_below_the_normal_ones():
    """So that the tests above have them."""
    every = torch.cat([multipliers(g) for g in MAXIMA])
    assert float(every[every.isfinite()].max()) == torch.finfo(torch.float32).max
    assert float(every[every.isfinite()].min()) < 2.0**-125
    assert E4M3.max == 448
