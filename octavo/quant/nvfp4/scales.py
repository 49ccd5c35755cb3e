"""Scales of NVFP4 on the GPU: of a tensor, and of its blocks with the inverse scales."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.quant.nvfp4.codes import guarded
from octavo.quant.nvfp4.rotation import halves
from octavo.quant.tile import amax_along, divide

_LARGER_OF_PAIRS = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
_RECIPROCAL = tl.constexpr("rcp.rn.f32 $0, $1;")
# what rcp.rn does where neither x nor 1 / x is out of range, but float32's max for zero: half of that is doubled
_FAST_RECIPROCAL = tl.constexpr("""
{
    .reg .f32 x, r, t;
    rcp.approx.ftz.f32 r, $1;
    min.NaN.f32 r, r, 0f7EFFFFFF;
    neg.f32 x, $1;
    fma.rn.f32 t, x, r, 0f3F800000;
    fma.rn.f32 $0, r, t, r;
}
""")
# of two bfloat16, the larger magnitude as a float32; $1 is nothing
_LARGER_OF_TWO = tl.constexpr("""
{
    .reg .b32 p;
    .reg .f32 v;
    prmt.b32 p, $2, $2, 0x1032;
    max.NaN.xorsign.abs.bf16x2 p, p, $2;
    shl.b32 p, p, 16;
    mov.b32 v, p;
    abs.f32 $0, v;
    mov.b32 $1, 0;
}
""")


@triton.jit
def _larger(a, b):
    """Return the larger magnitude of two bfloat16, of any sign; NaN if either is."""
    return tl.inline_asm_elementwise(_LARGER_OF_PAIRS, "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def multiplier(d, usual, LARGEST: tl.constexpr):
    """Return 1 / d, correctly rounded, and LARGEST if that is infinite; `usual` says that d is zero, NaN or a normal
    number whose reciprocal is one."""
    if usual:
        e = tl.inline_asm_elementwise(_FAST_RECIPROCAL, "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
    else:
        e = tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
        e = tl.where(e > LARGEST, LARGEST, e)
    return e


@triton.jit
def _larger_of_two(v):
    """Return the larger magnitude of every two neighbours, float32, NaN kept, and nothing beside it."""
    return tl.inline_asm_elementwise(_LARGER_OF_TWO, "=f,=f,r", [v], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def inverse_scale_from(g, TOP: tl.constexpr, LARGEST: tl.constexpr):
    """Return S_enc, as reference.tensor_scales computes it; `global_scale` is the other result of that."""
    quotient = divide(TOP, g)
    bad = (g == float("inf")) | (g != g)
    return tl.where((g == 0) | bad, 1.0, tl.where(quotient > LARGEST, LARGEST, quotient))


@triton.jit
def global_scale(g, TOP: tl.constexpr, LARGEST: tl.constexpr):
    plain = tl.div_rn(g, tl.where(g == g, TOP, TOP))
    scale = tl.where(divide(TOP, g) > LARGEST, divide(1.0, inverse_scale_from(g, TOP, LARGEST)), plain)
    bad = (g == float("inf")) | (g != g)
    return tl.where(bad, float("nan"), tl.where(g == 0, 0.0, scale))


@gluon.jit
def block_amax(v):
    """Return the largest magnitude of v [R, G, 16] along the last dim, float32, NaN kept."""
    if v.dtype == gl.bfloat16:
        a, b = halves(v, 8)
        a, b = halves(_larger(a, b), 4)
        a, b = halves(_larger(a, b), 2)
        largest, _ = gl.split(_larger_of_two(_larger(a, b)))
        return largest
    else:
        return amax_along(v, 2)


@triton.jit
def block_scales(a, s_enc, undo, LARGEST: tl.constexpr, GUARDED: tl.constexpr):
    """Return (E4M3 scale, inverse scale) of blocks with these maxima: as reference.block_scales computes it."""
    # a * 0 is NaN if a is infinite: the hardware's cast would saturate
    s_b = tl.fma(a, s_enc * (1 / 6), a * 0).to(tl.float8e4nv)
    d = s_b.to(tl.float32) * undo
    usual = (undo >= 2.0**-117) & (undo <= 2.0**103)  # E4M3 scales that are not zero are between 2^-9 and 2^9
    e = multiplier(d, usual, LARGEST)
    s_b = s_b.to(tl.uint8, bitcast=True)
    if GUARDED:
        e = guarded(e, d, a, s_b, tl.where(usual, 0x76, 0).to(tl.uint32))
    return s_b, e
