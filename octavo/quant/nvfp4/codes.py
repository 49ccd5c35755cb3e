"""E2M1 codes of NVFP4 on the GPU, and the random bytes that stochastic rounding takes, as inline PTX.

With a = |x| * e, the code of a is the nearest integer, ties to even, to 2a up to 2, then to 2 + a up to 4, then to
4 + a/2, and 7 at most. That is the sum of three terms, two of which are integers:

    4 sat(a/2) + 2 sat(a/2 - 1) + sat(a/2 - 2)            sat(t) = t, but 0 below 0 and 1 above 1

Each term is exact. Added to 1.5 * 2^23 it is rounded to an integer, with ties to even; to 1.5 * 2^23 * 16^j, to the
place of element j. So one float takes the codes of four elements, from the last to the first, and ends as
1.5 * 2^23 + all of them: its lower sixteen bits. Stochastic rounding adds r steps / 256 to a, for each term in the
steps of its range, and rounds down: below its range a term is less than 1 then, and rounds to nothing. A byte r is
the float32 r * 2^-133 where a float32's third byte is r.

An element is NaN or infinite only if its block's multiplier is NaN: then all sixteen codes are +6.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import struct

import triton
import triton.language as tl

from octavo.quant.nvfp4 import philox

_HALF, _ONE, _TWO = "0f3F000000", "0fBF800000", "0fC0000000"  # 1/2, -1, -2


def _f32(value: float) -> str:
    """A number as PTX writes a float32."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def codes_ptx(words: bool, random: bool) -> str:
    """PTX of the codes of eight neighbours, from four words of bfloat16 pairs or from eight float32, and the multiplier
    of their block. $0 is the eight codes; $1 is nothing."""
    first = 2 + (4 if words else 8)  # operands before the multiplier
    e, bytes_at = f"${first}", (f"${first + 8}", f"${first + 16}")
    lines = [
        "{", ".reg .pred bad;",
        ".reg .b32 p, q, s, low, high, random, code;", ".reg .f32 v, a, t, u, sum_low, sum_high;",
    ]  # fmt: skip
    way = "rm" if random else "rn"
    for part, total in ((1, "sum_high"), (0, "sum_low")):
        for j in (3, 2, 1, 0):
            i, unit = 4 * part + j, 16.0**j
            if words:
                source = f"${2 + i // 2}"
                lines.append(f"shl.b32 p, {source}, 16;" if i % 2 == 0 else f"and.b32 p, {source}, 0xFFFF0000;")
                lines.append("mov.b32 v, p;")
            else:
                lines.append(f"mov.b32 v, ${2 + i};")
            lines += ["abs.f32 v, v;", f"mul.rn.f32 a, v, {e};"]
            start = total
            if j == 3:
                lines.append(f"mov.f32 {total}, {_f32(1.5 * 2**23 * unit)};")
            else:
                lines.append(f"add.rn.f32 {total}, {total}, {_f32(-1.5 * 2**23 * unit * 15)};")
            if random:
                lines += [f"prmt.b32 random, {bytes_at[part]}, 0, 0x4{j}44;", "mov.b32 u, random;"]
            for term, (weight, shift) in enumerate(((4, None), (2, _ONE), (1, _TWO))):
                source = "a"
                if random:
                    lines.append(f"fma.rn.f32 t, u, {_f32(2.0 ** (124 + term))}, a;")
                    source = "t"
                if shift is None:
                    lines.append(f"mul.rn.sat.f32 t, {source}, {_HALF};")
                else:
                    lines.append(f"fma.rn.sat.f32 t, {source}, {_HALF}, {shift};")
                lines.append(f"fma.{way}.f32 {start}, t, {_f32(weight * unit)}, {start};")
    if words:  # the bytes with the signs: 0, 1, 2, 3 and 4, 5, 6, 7
        lines += ["prmt.b32 low, $2, $3, 0x7531;", "prmt.b32 high, $4, $5, 0x7531;"]
    else:
        for name, i in (("low", 2), ("high", 6)):
            lines += [
                f"prmt.b32 p, ${i}, ${i + 1}, 0x0073;", f"prmt.b32 q, ${i + 2}, ${i + 3}, 0x0073;",
                f"prmt.b32 {name}, p, q, 0x5410;",
            ]  # fmt: skip
    lines += [
        "prmt.b32 p, low, high, 0xECA8;",  # the signs of 0, 2, 4, 6, each all over its byte
        "prmt.b32 q, low, high, 0xFDB9;",
        "lop3.b32 s, p, q, 0x0F0F0F0F, 0xE4;",  # bits of p where the mask is set, else of q
        "mov.b32 low, sum_low;", "mov.b32 high, sum_high;", "prmt.b32 code, low, high, 0x5410;",
        "lop3.b32 code, s, 0x88888888, code, 0xEA;",  # (s & mask) | code
        f"mov.b32 v, {e};", "setp.nan.f32 bad, v, v;", "selp.b32 $0, 0x77777777, code, bad;", "mov.b32 $1, 0;", "}",
    ]  # fmt: skip
    return "\n".join(lines)


_CODES = {
    (words, random): (
        tl.constexpr(codes_ptx(words, random)),
        tl.constexpr(",".join(["=r"] * 2 + ["r"] * ((4 if words else 8) + 8 + 16 * random))),
    )
    for words in (False, True)
    for random in (False, True)
}
_NEAREST, _NEAREST_OPERANDS = _CODES[False, False]
_RANDOM, _RANDOM_OPERANDS = _CODES[False, True]
_NEAREST_OF_WORDS, _NEAREST_OF_WORDS_OPERANDS = _CODES[True, False]
_RANDOM_OF_WORDS, _RANDOM_OF_WORDS_OPERANDS = _CODES[True, True]


@triton.jit
def nearest_codes(v, e):
    """E2M1 codes of v * e, two to a byte, eight to the first four of every eight bytes."""
    if v.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _NEAREST_OF_WORDS, _NEAREST_OF_WORDS_OPERANDS, [v, e], dtype=tl.uint8, is_pure=True, pack=8
        )
    else:
        return tl.inline_asm_elementwise(
            _NEAREST, _NEAREST_OPERANDS, [v.to(tl.float32), e], dtype=tl.uint8, is_pure=True, pack=8
        )


@triton.jit
def random_codes(v, e, first, second):
    """The same, rounded up where a random byte carries it over: `first` has the bytes of four elements, `second` of the
    next four. The twin of reference.round_stochastically."""
    if v.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _RANDOM_OF_WORDS, _RANDOM_OF_WORDS_OPERANDS, [v, e, first, second], dtype=tl.uint8, is_pure=True, pack=8
        )
    else:
        return tl.inline_asm_elementwise(
            _RANDOM, _RANDOM_OPERANDS, [v.to(tl.float32), e, first, second], dtype=tl.uint8, is_pure=True, pack=8
        )


def _product_ptx(factor: int) -> str:
    """PTX of the low and the high word of a product, in one instruction; Triton's philox takes two."""
    return f"{{ .reg .b64 product; mul.wide.u32 product, $2, {factor:#x}; mov.b64 {{$0, $1}}, product; }}"


_PRODUCT0, _PRODUCT1 = (tl.constexpr(_product_ptx(factor)) for factor in philox.FACTORS)
_KEY0, _KEY1 = (tl.constexpr(step) for step in philox.KEY_STEPS)


@triton.jit
def _low_and_high(x, PRODUCT: tl.constexpr):
    words: tl.constexpr = (tl.uint32, tl.uint32)
    return tl.inline_asm_elementwise(PRODUCT, "=r,=r,r", [x], dtype=words, is_pure=True, pack=1)


@triton.jit
def random_words(seed, block_index, STREAM: tl.constexpr):
    """Sixteen random bytes for each block, as four words: the twin of philox.philox."""
    key = tl.load(seed)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0, c1 = block_index.to(tl.uint32), (block_index >> 32).to(tl.uint32)
    zero = c0 * 0
    c2, c3 = zero + tl.load(seed + 1).to(tl.uint32), zero + STREAM
    for _ in tl.static_range(10):
        low0, high0 = _low_and_high(c0, _PRODUCT0)
        low1, high1 = _low_and_high(c2, _PRODUCT1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEY0, k1 + _KEY1
    return c0, c1, c2, c3
