"""NVFP4 in plain torch. Its bits are the definition; `triton.py` matches them."""

import torch
from torch import Tensor

from octavo.formats import E2M1, E4M3, pack_nibbles
from octavo.quant import scale_blocks
from octavo.quant.nvfp4 import BLOCK, NVFP4
from octavo.quant.nvfp4.hadamard import turn
from octavo.quant.nvfp4.philox import random_bytes
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.reference_cast import casts, measures
from octavo.quant.scale import FLOAT32_MAX, Codes, divide

TOP = E2M1.max * E4M3.max  # 2688: the largest code times the largest block scale


def tensor_scales(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return (S_enc, global_scale) from the tensor's amax [1]. If TOP/G overflows, the global scale is 1 / S_enc, so
    that decoding undoes encoding. If G is not finite, the global scale is NaN, and so is the whole tensor."""
    quotient = divide(TOP, g)
    s_enc = torch.where(quotient > FLOAT32_MAX, FLOAT32_MAX, quotient)
    s_enc = torch.where((g == 0) | ~g.isfinite(), 1.0, s_enc)
    global_scale = torch.where(quotient > FLOAT32_MAX, divide(1.0, s_enc), g / torch.full_like(g, TOP))
    global_scale = torch.where(g == 0, 0.0, global_scale)
    return s_enc, torch.where(g.isfinite(), global_scale, float("nan"))


def block_scales(amax_b: Tensor, s_enc: Tensor) -> tuple[Tensor, Tensor]:
    """Return (S_b as E4M3 codes, the inverse scale e_b into codes) from block maxima."""
    scaled = scale_blocks.no_larger(amax_b * (s_enc * (1 / E2M1.max)), E4M3.max)
    s_b = E4M3.encode(torch.where(amax_b.isinf(), float("nan"), scaled))
    e = divide(1.0, s_b.float() * divide(1.0, s_enc))
    return s_b, torch.where(e > FLOAT32_MAX, FLOAT32_MAX, e)


def round_stochastically(x: Tensor, r: Tensor) -> Tensor:
    """Return E2M1 codes of x, |x| <= 6, rounded up where the random byte r carries x over: P(up) = floor(256 f) / 256,
    with the sum taken in float32."""
    a = x.abs()
    t = a + r.float() * (_step(a) * (1 / 256))
    magnitude = torch.floor(t / _step(t)) * _step(t)
    codes = E2M1.encode(torch.copysign(magnitude.clamp(max=E2M1.max), x))
    return torch.where(x.isnan(), E2M1.encode(x), codes)


def _step(a: Tensor) -> Tensor:
    # arithmetic in a's own dtype: torch.where of two numbers has the default dtype
    return torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, torch.full_like(a, 2.0)))


def _operand(x: Tensor, spec: Quantizer) -> Tensor:
    """Return x as float32 [R, C padded to 16], rotated if the quantizer has `rht`."""
    assert isinstance(spec, NVFP4)
    padded = scale_blocks.pad_columns(x, BLOCK).float()
    return turn(padded) if spec.rht else padded


@measures
def amax(x: Tensor, spec: Quantizer) -> Tensor:
    return scale_blocks.amax(_operand(x, spec), (None, None)).view(1)


@casts
def cast(x: Tensor, spec: Quantizer, amax: Tensor | None, cast_args: CastArgs, is_column: bool) -> Codes:
    assert isinstance(spec, NVFP4) and amax is not None
    v = _operand(x, spec)
    s_enc, global_scale = tensor_scales(amax)
    s_b, e = block_scales(scale_blocks.amax(v, spec.block), s_enc)
    scaled = scale_blocks.no_larger(v * scale_blocks.spread(e, spec.block, *v.shape), E2M1.max)
    if spec.stochastic:
        assert cast_args.seed is not None
        r = random_bytes(v.shape[0], v.shape[1] // BLOCK, cast_args.seed, stream=int(is_column))
        codes = round_stochastically(scaled, r)
    else:
        codes = E2M1.encode(scaled)
    if not spec.rht:  # rotated padding holds values; otherwise padding is zero, in a block of NaN too
        codes[:, x.shape[1] :] = 0
    return Codes(pack_nibbles(codes), s_b.view(torch.uint8), global_scale)
