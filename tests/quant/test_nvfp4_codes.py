"""The inline assembly that makes NVFP4's codes on a GPU, run in numpy: the bits of the reference for every bfloat16."""

import numpy as np
import pytest
import torch

from octavo.formats import E2M1, E4M3
from octavo.quant.nvfp4.reference import block_scales, round_stochastically, tensor_scales
from octavo.quant.scale import divide
from octavo.quant.scale_blocks import no_larger
from tests.support import ptx

pytest.importorskip("triton")

import triton
import triton.language as tl

from octavo.quant.nvfp4.codes import guard_ptx, nearest_ptx, random_ptx
from octavo.quant.nvfp4.scales import multiplier

EVERY = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
# maxima of a tensor: everyday ones, and those at which S_enc, its reciprocal or a multiplier leaves the normal numbers
MAXIMA = (1.0, 3.1415927, 447.99997, 1e-3, 65504.0, 1e-45, 1e-40, 2.0**-126, 1e-36, 2.0**100, 1e37, 2.6e38, 3.39e38)


def words_of(x: torch.Tensor) -> list[np.ndarray]:
    """Operands of rows of bfloat16: words of two."""
    pairs = x.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return [np.ascontiguousarray(pairs[:, i] | pairs[:, i + 1] << 16) for i in range(0, x.shape[1], 2)]


def floats_of(x: torch.Tensor) -> list[np.ndarray]:
    return [np.ascontiguousarray(x[:, i].float().numpy()) for i in range(8)]


def codes(x: torch.Tensor, e: torch.Tensor, words: bool, r: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of x * e, sixteen to an e, from the assembly; r are the random bytes. On a GPU a warp takes sums if one of
    its multipliers is not positive; here every block for itself."""
    if r is None and words:
        found = torch.empty(x.numel() // 16, 16, dtype=torch.uint8)
        for some in (e > 0, ~(e > 0)):
            if some.any():
                operands = words_of(x.view(-1, 16)[some]) + [e[some].numpy()] * 16
                found[some] = nibbles(ptx.run(nearest_ptx(True), operands, 4), int(some.sum()))
        return found
    e = e.repeat_interleave(2)
    operands = (words_of if words else floats_of)(x.view(-1, 8)) + [e.numpy()] * 8
    if r is not None:
        bytes_of = r.to(torch.uint8).view(-1, 8).numpy().view("<u4")
        operands += [np.ascontiguousarray(bytes_of[:, 0])] * 8 + [np.ascontiguousarray(bytes_of[:, 1])] * 8
    text = nearest_ptx(words) if r is None else random_ptx(words)
    return nibbles(ptx.run(text, operands, 2), len(e)).view(-1, 16)


def nibbles(outputs: list[np.ndarray], length: int) -> torch.Tensor:
    """The eight codes of every other output."""
    assert not any(np.any(nothing) for nothing in outputs[1::2])
    found = [
        np.broadcast_to(word, length) >> np.uint32(4 * i) & np.uint32(15) for word in outputs[::2] for i in range(8)
    ]
    return torch.from_numpy(np.stack(found, 1).astype(np.uint8))


def guard(
    e: torch.Tensor, d: torch.Tensor, amax_b: torch.Tensor, s_b: torch.Tensor, undo: torch.Tensor
) -> torch.Tensor:
    """The multipliers e = 1 / d of blocks, negative where the kernel wants sums."""
    in_order = torch.where((undo >= 2.0**-117) & (undo <= 2.0**103), 0x76, 0)  # as the kernel says
    integers = [t.expand(e.shape).to(torch.int32).numpy().view(np.uint32) for t in (s_b.view(torch.uint8), in_order)]
    found = ptx.run(guard_ptx(), [e.numpy(), d.numpy(), amax_b.numpy(), *integers], 1)[0]
    return torch.from_numpy(np.ascontiguousarray(found).view(np.float32))


def multipliers(g: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every multiplier that a block of bfloat16 may have in a tensor with this maximum, NaN last, as the kernel has it
    for bfloat16, and the largest magnitude in such a block."""
    s_enc, _ = tensor_scales(torch.tensor([g]))
    undo = divide(1.0, s_enc)
    # a maximum may be larger than the tensor's where a caller gave that
    amax_b = torch.cat((EVERY[EVERY.isfinite() & (EVERY >= 0)].float().unique(), torch.tensor([float("nan")])))
    s_b, e = block_scales(amax_b, s_enc)
    e = guard(e, s_b.float() * undo, amax_b, s_b, undo)
    last = torch.cat((e[1:].view(torch.int32) != e[:-1].view(torch.int32), torch.tensor([True])))
    return e[last], amax_b[last]


def in_sixteens(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x[:1].expand(-x.numel() % 16)))


def nearest(x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    return E2M1.encode(no_larger(x.view(-1, 16).float() * e.abs()[:, None], E2M1.max))


@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("g", MAXIMA)
def test_every_bfloat16_by_every_multiplier(g, words, step):
    """By every fortieth, and with `-m slow` by all of them. Only sums take more than the block's maximum."""
    finite = EVERY[EVERY.isfinite()]
    for e, largest in list(zip(*multipliers(g), strict=True))[:-1][::-step]:
        x = in_sixteens(finite if not words or e < 0 else finite[finite.abs() <= largest])
        e = (e if words else e.abs()).expand(x.numel() // 16).contiguous()
        got, want = codes(x, e, words), nearest(x, e)
        assert torch.equal(got, want), (g, float(e[0]), int((got != want).sum()))


@pytest.mark.parametrize("words", [True, False])
def test_around_every_tie_and_at_random(words):
    """x * e is a few last places around each boundary between codes, for multipliers with all their bits."""
    generator = torch.Generator().manual_seed(3)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 1.0, 2.0, 4.0, 6.0])
    for _ in range(4):
        x = (torch.rand(1 << 17, generator=generator) + 0.5).to(torch.bfloat16)
        tie = ties[torch.randint(len(ties), (x.numel() // 16,), generator=generator)]
        off = torch.randint(-20, 21, tie.shape, generator=generator, dtype=torch.int32)
        off[::2] = off[::2] % 5 - 2
        d = ((x[::16].float() / tie).view(torch.int32) + off).view(torch.float32)
        e = 1 / d
        x[4::16] = -x[::16]
        x = (x.view(-1, 16).float() / torch.cat((torch.ones(5), torch.tensor([2.0, 4, 8]).repeat(4)))[:16]).bfloat16()
        x = torch.where(x.float().abs() * e[:, None] < 6.4, x, 0).flatten()
        if words:
            one = torch.tensor(0x38, dtype=torch.uint8)
            e = guard(e, d, torch.ones_like(e), one, torch.tensor(1.0))
            assert 0.1 < float((e < 0).float().mean()) < 0.9  # both ways
        assert torch.equal(codes(x, e, words), nearest(x, e))


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_the_bfloat16_nearest_to_every_tie_in_tensors_with_any_maximum(count):
    """Each block scale of many tensors, and for each boundary between codes the three bfloat16 closest to it."""
    generator = torch.Generator().manual_seed(11)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    sums = 0.0
    for g in torch.exp2(torch.rand(count, generator=generator) * 40 - 20).bfloat16().float():
        e, largest = (t[:-1] for t in multipliers(float(g)))
        e, largest = e[largest <= g], largest[largest <= g]
        middle = (ties / e.abs()[:, None]).bfloat16().view(torch.int16).clamp(1, 0x7F7E)
        for off in (-1, 0, 1):
            x = (middle + off).view(torch.bfloat16)
            x = torch.where(x <= largest[:, None], x, 0)
            x = torch.cat((x, -x), 1).flatten()
            assert torch.equal(codes(x, e, True), nearest(x, e)), float(g)
        sums += float((e[e.abs() < 2.0**100] < 0).float().mean())
    assert sums / count < 0.2  # subnormal scales, the largest one, and a few that may make ties


def test_everyday_blocks_take_no_sums():
    """Nor do zeros."""
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    x[::7] = 0
    amax_b, (s_enc, _) = x.abs().amax(1), tensor_scales(x.abs().max().view(1))
    undo = divide(1.0, s_enc)
    s_b, e = block_scales(amax_b, s_enc)
    e = guard(e, s_b.float() * undo, amax_b, s_b, undo)
    assert float((e < 0).float().mean()) < 1e-2
    assert bool((e[::7] > 0).all())


@pytest.mark.parametrize("step", [60, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("g", MAXIMA)
def test_stochastic_rounding_of_every_bfloat16(g, words, step):
    x = in_sixteens(EVERY[EVERY.isfinite()])
    generator = torch.Generator().manual_seed(5)
    for e in multipliers(g)[0][:-1].abs().unique()[::step]:
        r = torch.randint(256, x.shape, generator=generator)
        got = codes(x, e.expand(x.numel() // 16).contiguous(), words, r).flatten()
        want = round_stochastically(no_larger(x.float() * e, E2M1.max), r)
        assert torch.equal(got, want), (g, float(e), int((got != want).sum()))


@pytest.mark.parametrize("words", [True, False])
def test_every_random_byte_around_every_step(words):
    """Sums that are a few last places around a multiple of the step, with every byte."""
    generator = torch.Generator().manual_seed(7)
    r = torch.arange(256).repeat_interleave(16 * 64)
    step = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0]).repeat(r.numel() // 8)
    base = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.0]).repeat(r.numel() // 8)
    want_a = base - r * step / 256
    x = (torch.rand(r.numel(), generator=generator) + 0.5).to(torch.bfloat16)
    for i in range(16):  # one multiplier for sixteen elements: exact for one of them, in turn
        e = (want_a[i::16] / x[i::16].float()).view(torch.int32)
        e = (e + torch.randint(-2, 3, e.shape, generator=generator, dtype=torch.int32)).view(torch.float32)
        got = codes(x, e, words, r)
        want = round_stochastically(no_larger(x.view(-1, 16).float() * e[:, None], E2M1.max), r.view(-1, 16))
        assert torch.equal(got, want)


@pytest.mark.parametrize("words", [True, False])
def test_sums_that_float32_rounds_up_to_a_half(words):
    """a + r / 512 is below 1/2 by about 2^-26, for small a with many more places than the sum has."""
    generator = torch.Generator().manual_seed(13)
    r = torch.randint(129, 256, (1 << 16,), generator=generator)
    lacking = torch.randint(-12, 13, (r.numel() // 16,), generator=generator).double() / 8 * 2.0**-26
    x = torch.exp2(-torch.rand(r.numel(), generator=generator) * 4).to(torch.bfloat16)
    for i in range(16):
        e = ((0.5 - r[i::16] / 512 - lacking) / x[i::16].double()).float()
        got = codes(x, e, words, r)
        want = round_stochastically(no_larger(x.view(-1, 16).float() * e[:, None], E2M1.max), r.view(-1, 16))
        assert torch.equal(got, want)
        exact = torch.floor((x[i::16].double() * e + r[i::16] / 512) * 2)
        assert bool((want[:, i] & 7 != exact).any())  # some are rounded up


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("words", [True, False])
def test_a_block_of_nan_has_codes_of_six(words, random):
    x = torch.randn(128).to(torch.bfloat16)
    x[:3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    e = torch.full((8,), float("nan"))
    assert (codes(x, e, words, torch.full((128,), 255) if random else None) == 7).all()


def test_multipliers_reach_the_largest_float32_and_below_the_normal_ones():
    """So that the tests above have them."""
    every = torch.cat([multipliers(g)[0].abs() for g in MAXIMA])
    assert float(every[every.isfinite()].max()) == torch.finfo(torch.float32).max
    assert float(every[every.isfinite()].min()) < 2.0**-125
    assert E4M3.max == 448


@triton.jit
def _reciprocals(x, fast, slow, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    d = tl.load(x + at)
    tl.store(fast + at, multiplier(d, True, 3.4028234663852886e38))
    tl.store(slow + at, tl.div_rn(d * 0 + 1.0, d))


@pytest.mark.gpu
def test_the_fast_reciprocal_is_correctly_rounded():
    """Checks every significand, at the smallest and largest exponents in use, and zero and NaN."""
    for exponent in (1, 2, 126, 127, 238):
        bits = torch.arange(1 << 23, dtype=torch.int32, device="cuda") + (exponent << 23)
        x, fast, slow = bits.view(torch.float32), *torch.empty(2, 1 << 23, device="cuda")
        _reciprocals[(1 << 13,)](x, fast, slow, 1024)
        assert torch.equal(fast, slow)
    x = torch.tensor([0.0, float("nan")], device="cuda").repeat(512)
    _reciprocals[(1,)](x, fast, slow, 1024)
    assert float(fast[0]) == torch.finfo(torch.float32).max
    assert bool(fast[1].isnan())
