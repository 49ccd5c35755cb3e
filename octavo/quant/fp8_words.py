"""Casts to FP8 on the GPU, in words of four codes, from two words of bfloat16 or float16 or four of float32.

A value stays in its own dtype until its code is made: widened earlier it would hold twice the registers. The code is
that of the product v * s in float32, rounded to nearest even. What becomes of an infinite v is the caller's choice:

saturate    the largest code of its sign
show        E5M2 has an Inf; E4M3 has none, and the code is NaN

The product of a finite v saturates either way, and NaN stays NaN (0x7f).

Four codes are made at once because ptxas of CUDA 12.8 crashed on codes that Triton cast in pairs.
"""

import triton
import triton.language as tl

_WIDEN = {
    "bf16": ("shl.b32 {a}, {word}, 16;", "and.b32 {b}, {word}, 0xFFFF0000;"),
    "fp16": ("mov.b32 {{low, high}}, {word};", "cvt.f32.f16 {a}, low;", "cvt.f32.f16 {b}, high;"),
}


@triton.constexpr_function
def _operands(dtype):
    """Return the constraints of one word of codes: the words of four values, then the inverse scale four times."""
    return ",".join(["=r", *["r"] * (4 if str(dtype) == "fp32" else 2), *["r"] * 4])


@triton.constexpr_function
def _instructions(kind, dtype, show):
    """Return the instructions of one word of codes."""
    fmt, half = {"fp8e5": "e5m2", "fp8e4nv": "e4m3"}[str(kind)], str(dtype) != "fp32"
    scale = 3 if half else 5  # operands before it: the result, and the words of v
    lines = [".reg .b16 low, high;", ".reg .b32 word, v<4>;", ".reg .f32 p<4>, m;", ".reg .pred is_inf;"]
    for i in range(0, 4, 2):
        if half:
            lines += [line.format(a=f"v{i}", b=f"v{i + 1}", word=f"${1 + i // 2}") for line in _WIDEN[str(dtype)]]
        else:
            lines += [f"mov.b32 v{i + j}, ${1 + i + j};" for j in range(2)]
    for i in range(4):
        lines.append(f"mul.f32 p{i}, v{i}, ${scale + i};")
        if show and fmt == "e4m3":  # v * 0 is zero for a finite v, whatever its product, else NaN
            lines.append(f"fma.rn.f32 p{i}, v{i}, 0f00000000, p{i};")
    lines += [f"cvt.rn.satfinite.{fmt}x2.f32 low, p1, p0;", f"cvt.rn.satfinite.{fmt}x2.f32 high, p3, p2;"]
    lines.append("mov.b32 word, {low, high};")
    if show and fmt == "e5m2":
        for i in range(4):  # the cast saturates Inf to 0x7b or 0xfb: the next byte is the Inf of that sign
            lines += [
                f"abs.f32 m, v{i};",
                "setp.eq.f32 is_inf, m, 0f7F800000;",
                f"@is_inf add.u32 word, word, {1 << 8 * i};",
            ]
    return "\n".join(["{", *lines, "mov.b32 $0, word;", "}"])


@triton.jit
def cast(v, s, kind: tl.constexpr, SHOW: tl.constexpr):
    """Return codes of v * s; SHOW tells whether an infinite v stays visible. Every thread holds a multiple of four."""
    asm: tl.constexpr = _instructions(kind, v.dtype, SHOW)
    operands: tl.constexpr = _operands(v.dtype)
    code = tl.inline_asm_elementwise(asm, operands, [v, s], dtype=tl.uint8, is_pure=True, pack=4)
    return code.to(kind, bitcast=True)
