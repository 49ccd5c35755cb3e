"""Operations that a rule fuses, by name: what they are, the rule, and inputs for them."""

import torch

import octavo
from octavo import ops
from tests.support.linear_oracle import spiky
from tests.support.sequentials import (
    FFN,
    H,
    M,
    fill,
    unbiased,
)

ROUNDED_ONCE = ("linear-scale-add",)  # rules whose forward rounds once where the operations round twice, in float32 too
CASES = {  # name -> (rule, its operations)
    "norm, linear": ("norm-linear", lambda r: [ops.RMSNorm(H), unbiased(r)]),
    "layer norm, linear with bias": ("norm-linear", lambda r: [ops.LayerNorm(H), unbiased(r, FFN, bias=True)]),
    "zero-centered norm, linear": ("norm-linear", lambda r: [ops.RMSNorm(H, zero_centered_gamma=True), unbiased(r)]),
    "add, norm, linear": ("add-norm-linear", lambda r: [ops.AddExtraInput(), ops.RMSNorm(H), unbiased(r)]),
    "add, extra output, layer norm, linear": (
        "add-norm-linear",
        lambda r: [ops.AddExtraInput(), ops.MakeExtraOutput(), ops.LayerNorm(H), unbiased(r, FFN, bias=True)],
    ),
    "swiglu, linear": ("activation-linear", lambda r: [ops.SwiGLU(), unbiased(r, k=H // 2)]),
    "gelu, linear with bias": ("activation-linear", lambda r: [ops.GELU(), unbiased(r, FFN, bias=True)]),
    "linear, bias": ("linear-bias", lambda r: [unbiased(r, FFN), ops.Bias(FFN)]),
    "linear, bias, gelu": ("linear-bias-activation", lambda r: [unbiased(r), ops.Bias(H), ops.GELU()]),
    "linear, bias, relu": ("linear-bias-activation", lambda r: [unbiased(r), ops.Bias(H), ops.ReLU()]),
    "linear, bias, add": ("linear-bias-add", lambda r: [unbiased(r), ops.Bias(H), ops.AddExtraInput()]),
    "linear, scale, add": ("linear-scale-add", lambda r: [unbiased(r), ops.ConstantScale(-2.5), ops.AddExtraInput()]),
    "linear, scale 0, add": ("linear-scale-add", lambda r: [unbiased(r), ops.ConstantScale(0.0), ops.AddExtraInput()]),
    "linear, scale 1, add": ("linear-scale-add", lambda r: [unbiased(r), ops.ConstantScale(1.0), ops.AddExtraInput()]),
    "linear, scale 3.5, add": (
        "linear-scale-add",
        lambda r: [unbiased(r), ops.ConstantScale(3.5), ops.AddExtraInput()],
    ),
    "extra output, linear": ("linear-add", lambda r: [ops.MakeExtraOutput(), unbiased(r, FFN, bias=True)]),
    "linear, scale": ("linear-scale", lambda r: [unbiased(r, FFN), ops.ConstantScale(3.5)]),
    "linear, swiglu, linear": ("mlp", lambda r: [unbiased(r, 2 * FFN), ops.SwiGLU(), unbiased(r, H, FFN)]),
    "linear, gelu, linear with biases": (
        "mlp",
        lambda r: [unbiased(r, FFN, bias=True), ops.GELU(), unbiased(r, H, FFN, bias=True)],
    ),
}  # fmt: skip


def build(name, recipe, dtype=torch.float32, **settings):
    return fill(octavo.Sequential(*CASES[name][1](recipe), **settings).to(dtype))


def data(model, lead=(M,), dtype=torch.float32, seed=0):
    """Inputs, and a dy for each output."""
    inputs = [spiky(*lead, H, seed=seed, dtype=dtype, size=8.0)]
    extra = [op for op in model if isinstance(op, ops.AddExtraInput)]
    inputs += [spiky(*lead, H, seed=50 + i + seed, dtype=dtype) for i, _ in enumerate(extra)]
    with torch.no_grad():
        y = model(*inputs)
    outputs = y if isinstance(y, tuple) else (y,)
    return inputs, [spiky(*t.shape, seed=90 + i + seed, dtype=dtype) for i, t in enumerate(outputs)]
