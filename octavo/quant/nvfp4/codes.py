"""E2M1 codes of NVFP4 on the GPU, and the random bytes that stochastic rounding takes, as inline PTX.

With a = |x| * e, scaled by 2^-14, the least normal float16 is 1, the least normal E2M1. The bits of that float16, less
their lower nine, are the code of a, rounded down; they grow in proportion to the code, through every range. So:

- Stochastic rounding adds r * 2 to the bits, for a random byte r; a is 6 at most. The reference adds r steps / 256 to a
  in float32. That sum is exact, or it is below 1/2 and is rounded to a multiple of 2^-25: up to 1/2 if it lacks 2^-26
  or less. So a has 2^-26 added, and what follows rounds down: from 1/4 on that changes nothing.
- Rounding to nearest adds half a code. Float16 cannot tell a tie from what lies just above it, and a tie must go to the
  even code. So the inverse scale e of a block is negative if a bfloat16 may make a tie that goes down (`guard_ptx`), if
  a code might not end below 7.5, or if e * 2^-14 is not exact; then, and if e is NaN, its warp takes sums instead.
  Zeros need no sums. Of everyday blocks one in four thousand does.

Sums are right for every float32. The code of a is the nearest integer, ties to even, to 2a up to 2, then to 2 + a up to
4, then to 4 + a/2, and 7 at most. That is the sum of three terms, two of which are integers:

    4 sat(a/2) + 2 sat(a/2 - 1) + sat(a/2 - 2)            sat(t) = t, but 0 below 0 and 1 above 1

Each term is exact. Added to 1.5 * 2^23 it is rounded to an integer, with ties to even; to 1.5 * 2^23 * 16^j, to the
place of element j. So one float takes the codes of four elements, from the last to the first, and ends as
1.5 * 2^23 + all of them: its lower sixteen bits.

An element is NaN or infinite only if its block's inverse scale is NaN: then all sixteen codes are +6.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import struct

import triton
import triton.language as tl

from octavo.quant.nvfp4 import philox

_HALF, _ONE, _TWO = "0f3F000000", "0fBF800000", "0fC0000000"  # 1/2, -1, -2


def _f32(value: float) -> str:
    """Return a number as PTX writes a float32."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


_TO_HALF = _f32(2.0**-14)
_REGISTERS = [
    ".reg .pred bad;", ".reg .b32 p, q, s, low, high, even, odd, six, kept;",
    ".reg .f32 v, a, t, e, sum_low, sum_high, f0, f1, f2, f3, f4, f5, f6, f7;",
]  # fmt: skip


def _element(source: list[str], i: int) -> list[str]:
    """Return the instructions of v = element i, from words of two bfloat16 or from eight float32."""
    if len(source) == 8:
        return [f"mov.b32 v, {source[i]};"]
    word = source[i // 2]
    return [f"shl.b32 p, {word}, 16;" if i % 2 == 0 else f"and.b32 p, {word}, 0xFFFF0000;", "mov.b32 v, p;"]


def _sign_bytes(source: list[str]) -> list[str]:
    """Return the instructions of low, high = the bytes with the signs of 0, 1, 2, 3 and of 4, 5, 6, 7."""
    lines = []
    for name, i in (("low", 0), ("high", len(source) // 2)):
        if len(source) == 4:
            lines.append(f"prmt.b32 {name}, {source[i]}, {source[i + 1]}, 0x7531;")
        else:
            lines += [
                f"prmt.b32 p, {source[i]}, {source[i + 1]}, 0x0073;",
                f"prmt.b32 q, {source[i + 2]}, {source[i + 3]}, 0x0073;",
                f"prmt.b32 {name}, p, q, 0x5410;",
            ]
    return lines


def _sums(source: list[str], out: str) -> list[str]:
    """Return the nearest codes of eight elements times e, by sums."""
    lines = []
    for part, total in ((1, "sum_high"), (0, "sum_low")):
        for j in (3, 2, 1, 0):
            unit = 16.0**j
            lines += [*_element(source, 4 * part + j), "abs.f32 v, v;", "mul.rn.f32 a, v, e;"]
            if j == 3:
                lines.append(f"mov.f32 {total}, {_f32(1.5 * 2**23 * unit)};")
            else:
                lines.append(f"add.rn.f32 {total}, {total}, {_f32(-1.5 * 2**23 * unit * 15)};")
            for weight, shift in ((4, None), (2, _ONE), (1, _TWO)):
                term = f"mul.rn.sat.f32 t, a, {_HALF};" if shift is None else f"fma.rn.sat.f32 t, a, {_HALF}, {shift};"
                lines += [term, f"fma.rn.f32 {total}, t, {_f32(weight * unit)}, {total};"]
    return [
        *lines, *_sign_bytes(source),
        "prmt.b32 p, low, high, 0xECA8;",  # the signs of 0, 2, 4, 6, each all over its byte
        "prmt.b32 q, low, high, 0xFDB9;",
        "lop3.b32 s, p, q, 0x0F0F0F0F, 0xE4;",  # bits of p where the mask is set, else of q
        "mov.b32 low, sum_low;", "mov.b32 high, sum_high;", "prmt.b32 q, low, high, 0x5410;",
        "lop3.b32 q, s, 0x88888888, q, 0xEA;",  # (s & mask) | codes
        "setp.nan.f32 bad, e, e;", f"selp.b32 {out}, 0x77777777, q, bad;",
    ]  # fmt: skip


def _halves(source: list[str], out: str) -> list[str]:
    """Return the nearest codes of eight bfloat16 times e * 2^14, where ties that go down cannot be."""
    lines = []
    for i in range(8):
        lines += [*_element(source, i), f"mul.rn.f32 f{i}, v, e;"]
    for name, i in (("even", 0), ("odd", 1)):
        lines += [
            f"cvt.rz.f16x2.f32 p, f{i + 2}, f{i};", f"cvt.rz.f16x2.f32 q, f{i + 6}, f{i + 4};",
            f"prmt.b32 {name}, p, q, 0x7531;",  # in each byte: sign, nothing, nothing, nothing, code, half a code
            f"mad.lo.u32 s, {name}, 8, 0x08080808;", f"lop3.b32 {name}, s, {name}, 0x70707070, 0xE4;",
        ]  # fmt: skip
    return [*lines, *_woven(out)]


def _woven(out: str) -> list[str]:
    """Return the upper four bits of the bytes of `even` and `odd`, in turn."""
    return ["shr.u32 even, even, 4;", f"lop3.b32 {out}, even, odd, 0x0F0F0F0F, 0xE4;"]


def nearest_ptx(words: bool) -> str:
    """Return PTX of the codes of sixteen neighbours, from eight words of bfloat16 pairs, or of eight from as many
    float32, and the inverse scale of their block. $0 and $2 are eight codes each; $1 and $3 are nothing."""
    if not words:
        lines = ["mov.b32 e, $10;", *_sums([f"${2 + i}" for i in range(8)], "$0"), "mov.b32 $1, 0;"]
    else:
        halves = ((["$4", "$5", "$6", "$7"], "$0"), (["$8", "$9", "$10", "$11"], "$2"))
        lines = ["mov.b32 e, $12;", "setp.gt.f32 bad, e, 0f00000000;", "@bad bra PLAIN;", "abs.f32 e, e;"]
        lines += [line for part in halves for line in _sums(*part)] + ["bra DONE;", "PLAIN:"]
        lines += [f"mul.rn.f32 e, e, {_TO_HALF};"] + [line for part in halves for line in _halves(*part)]
        lines += ["DONE:", "mov.b32 $1, 0;", "mov.b32 $3, 0;"]
    return "\n".join(["{", *_REGISTERS, *lines, "}"])


def random_ptx(words: bool) -> str:
    """Return PTX of the codes of eight neighbours, from four words of bfloat16 pairs or from eight float32, the inverse
    scale of their block, the random bytes of four elements and those of the next four. $0 is eight codes; $1 is
    nothing."""
    first = 2 + (4 if words else 8)
    source = [f"${2 + i}" for i in range(first - 2)]
    lines = [f"mov.b32 e, ${first};", "mov.b32 six, 0x0E000E00;"]
    # NaN is no less than 6 and has no sign: the bit of the sign is taken where the code has none
    lines += ["setp.nan.f32 bad, e, e;", "selp.b32 kept, 0xF0F0F0F0, 0x70707070, bad;"]
    for i in range(8):
        lines += [*_element(source, i), "abs.f32 v, v;", "mul.rn.f32 a, v, e;"]
        lines.append(f"fma.rz.f32 f{i}, a, {_TO_HALF}, {_f32(2.0**-40)};")
    lines += _sign_bytes(source)
    for name, i, bytes_of in (("even", 0, "0x4240"), ("odd", 1, "0x4341")):
        signs = "0x6420" if i == 0 else "0x7531"
        for sum_of, j, at in (("p", i, first + 8), ("q", i + 4, first + 16)):
            lines += [
                f"cvt.rz.f16x2.f32 {sum_of}, f{j + 2}, f{j};", f"min.f16x2 {sum_of}, {sum_of}, six;",
                f"prmt.b32 s, ${at}, 0, {bytes_of};", f"mad.lo.u32 {sum_of}, s, 2, {sum_of};",
            ]  # fmt: skip
        lines += [
            "prmt.b32 p, p, q, 0x7531;", "shl.b32 p, p, 3;", f"prmt.b32 q, low, high, {signs};",
            f"lop3.b32 {name}, p, q, kept, 0xE4;",
        ]  # fmt: skip
    lines += [*_woven("$0"), "mov.b32 $1, 0;"]
    return "\n".join(["{", *_REGISTERS, *lines, "}"])


def guard_ptx() -> str:
    """Return PTX of the inverse scale $1 = 1 / $2 of a block, negative where `_halves` may be wrong: $2 is the block's
    scale, $3 the largest magnitude in it, $4 its E4M3 scale and $5 how many of these from the least normal one are in
    order.

    x * e is a tie that goes down at 1/4, 5/4, 5/2 and 5. If it is one after it was rounded, then the scale, or 5 of it,
    is x times a power of two but for one part in 2^23; x has eight bits. So the last sixteen of the scale are within 2
    of zero, or the last eighteen of 5 of it within 16."""
    return """
{
    .reg .pred bad;
    .reg .b32 p;
    mad.lo.u32 p, $2, 0x10000, 0x20000;
    setp.le.u32 bad, p, 0x40000;
    mad.lo.u32 p, $2, 0x14000, 0x40000;
    setp.le.or.u32 bad, p, 0x80000, bad;
    sub.u32 p, $4, 8;
    setp.ge.or.u32 bad, p, $5, bad;
    setp.neu.and.f32 bad, $3, 0f00000000, bad;
    xor.b32 p, $1, 0x80000000;
    selp.b32 $0, p, $1, bad;
}
"""


_GUARD = tl.constexpr(guard_ptx())
_NEAREST, _NEAREST_OF_WORDS = tl.constexpr(nearest_ptx(False)), tl.constexpr(nearest_ptx(True))
_RANDOM, _RANDOM_OF_WORDS = tl.constexpr(random_ptx(False)), tl.constexpr(random_ptx(True))


def _operands(outputs: int, inputs: int) -> tl.constexpr:
    return tl.constexpr(",".join(["=r"] * outputs + ["r"] * inputs))


_NEAREST_OPERANDS, _NEAREST_OF_WORDS_OPERANDS = _operands(2, 16), _operands(4, 8 + 16)
_RANDOM_OPERANDS, _RANDOM_OF_WORDS_OPERANDS = _operands(2, 8 + 24), _operands(2, 4 + 24)


@triton.jit
def guarded(e, d, a, s_b, in_order):
    """Return the inverse scale e = 1 / d of blocks with maxima a and scales s_b, for `nearest_codes` of bfloat16."""
    return tl.inline_asm_elementwise(
        _GUARD, "=r,r,r,f,r,r", [e, d, a, s_b.to(tl.uint32), in_order], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def nearest_codes(v, e):
    """Return E2M1 codes of v * e, two to a byte, eight to the first four of every eight bytes. If v is bfloat16, e
    comes from `guarded`."""
    if v.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _NEAREST_OF_WORDS, _NEAREST_OF_WORDS_OPERANDS, [v, e], dtype=tl.uint8, is_pure=True, pack=16
        )
    else:
        return tl.inline_asm_elementwise(
            _NEAREST, _NEAREST_OPERANDS, [v.to(tl.float32), e], dtype=tl.uint8, is_pure=True, pack=8
        )


@triton.jit
def random_codes(v, e, first, second):
    """Return the same, rounded up where a random byte carries it over: `first` has the bytes of four elements, `second`
    of the next four. As reference.round_stochastically computes them."""
    if v.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _RANDOM_OF_WORDS, _RANDOM_OF_WORDS_OPERANDS, [v, e, first, second], dtype=tl.uint8, is_pure=True, pack=8
        )
    else:
        return tl.inline_asm_elementwise(
            _RANDOM, _RANDOM_OPERANDS, [v.to(tl.float32), e, first, second], dtype=tl.uint8, is_pure=True, pack=8
        )


def _product_ptx(factor: int) -> str:
    """Return PTX of the low and the high word of a product, in one instruction; Triton's philox takes two."""
    return f"{{ .reg .b64 product; mul.wide.u32 product, $2, {factor:#x}; mov.b64 {{$0, $1}}, product; }}"


_PRODUCT0, _PRODUCT1 = (tl.constexpr(_product_ptx(factor)) for factor in philox.FACTORS)
_KEY0, _KEY1 = (tl.constexpr(step) for step in philox.KEY_STEPS)


@triton.jit
def _low_and_high(x, PRODUCT: tl.constexpr):
    # a name for the dtypes would be one constant, which Triton 3.9 does not take apart
    return tl.inline_asm_elementwise(PRODUCT, "=r,=r,r", [x], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)


@triton.jit
def random_words(key, step, low, high, STREAM: tl.constexpr):
    """Return sixteen random bytes for each block, as four words, from the words of its index: those of
    philox.philox."""
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    zero = low * 0
    c0, c1, c2, c3 = low, zero + high, zero + step.to(tl.uint32), zero + STREAM
    for _ in tl.static_range(10):
        low0, high0 = _low_and_high(c0, _PRODUCT0)
        low1, high1 = _low_and_high(c2, _PRODUCT1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEY0, k1 + _KEY1
    return c0, c1, c2, c3
