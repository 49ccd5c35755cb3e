"""The Hadamard rotation of `octavo.quant.nvfp4.hadamard` on the GPU, in Gluon: the same additions in the same order."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _sums_and_differences(v, R: gl.constexpr, G: gl.constexpr, DISTANCE: gl.constexpr):
    """Return one round of the butterfly over v [R, G, 16]; sixteen neighbours are one thread's, so nothing moves."""
    pairs = gl.reshape(v, (R, G, 8 // DISTANCE, 2, DISTANCE))
    a, b = gl.split(gl.permute(pairs, (0, 1, 2, 4, 3)))
    mixed = gl.permute(gl.join(a + b, a - b), (0, 1, 2, 4, 3))
    return gl.reshape(mixed, (R, G, 16))


@gluon.jit
def within_block(v):
    """Return 0...15 along the last dim of v [R, G, 16], as [1, 1, 16]."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, v.type.layout))
    return gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=layout), 0), 0)


_WIDEN = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@triton.jit
def _widened(v):
    """Return v as float32. Triton itself takes three instructions for two bfloat16."""
    if v.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [v], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return v.to(tl.float32)


@gluon.jit
def _signed(v, R: gl.constexpr, C: gl.constexpr, NEGATIVE: gl.constexpr):
    """Return v [R, C] as float32 [R, C/16, 16], by the signs of the rotation: it begins with these."""
    t = gl.reshape(_widened(v), (R, C // 16, 16))
    return t * (1.0 - 2.0 * ((NEGATIVE >> within_block(t)) & 1).to(gl.float32))


@gluon.jit
def turn(v, R: gl.constexpr, C: gl.constexpr, NEGATIVE: gl.constexpr):
    """Return v [R, C] turned, bfloat16, as hadamard.turn computes it."""
    layout: gl.constexpr = v.type.layout
    groups: gl.constexpr = C // 16
    t = _signed(v, R, C, NEGATIVE)
    t = _sums_and_differences(t, R, groups, 1)
    t = _sums_and_differences(t, R, groups, 2)
    t = _sums_and_differences(t, R, groups, 4)
    t = _sums_and_differences(t, R, groups, 8)
    return gl.convert_layout(gl.reshape((t * 0.25).to(gl.bfloat16), (R, C)), layout)


@gluon.jit
def halves(v, S: gl.constexpr):
    """Return v [..., 2 S], as its first S and its last S."""
    parts = gl.reshape(v, (v.shape[0], v.shape[1], 2, S))
    return gl.split(gl.permute(parts, (0, 1, 3, 2)))


@gluon.jit
def turned_magnitudes(v, R: gl.constexpr, C: gl.constexpr, NEGATIVE: gl.constexpr):
    """Return float32 bits [R, C/16] whose maximum is that of |v turned|, four times as large and not rounded. The last
    round makes a + b and a - b; the larger magnitude is |a| + |b|. Where both are infinite it is infinite, and not
    NaN."""
    groups: gl.constexpr = C // 16
    t = _signed(v, R, C, NEGATIVE)
    t = _sums_and_differences(t, R, groups, 1)
    t = _sums_and_differences(t, R, groups, 2)
    t = _sums_and_differences(t, R, groups, 4)
    a, b = halves(t, 8)
    return gl.max((gl.abs(a) + gl.abs(b)).to(gl.int32, bitcast=True), 2)
