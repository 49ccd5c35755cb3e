"""Data and tolerances of Transformer Engine's suites: numbers from 0 to 1 that a format holds exactly, and tolerances
by recipe; beside them signed numbers with outliers, and a bound on the error of the whole tensor."""

import torch
import torch.nn.functional as F

import octavo
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import spiky
from tests.support.steps import relative_error

RECIPES = tuple(SHIPPED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DATA = ("positive", "signed")
OF_DTYPE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (1e-3, 1e-3)}  # rtol, atol
OF_FP8, OF_FP4 = (0.125, 0.0675), (0.25, 0.125)
# errors of signed tensors, in the Frobenius norm; 0.12 in FP8, whose dy is E5M2. In NVFP4 an outlier takes the scale of
# its block
WHOLE = {"bf16": 1e-2, "nvfp4": 0.6}


def numbers(*shape, data="positive", recipe="bf16", dtype=torch.float32, seed=0, operand="x"):
    """A tensor of that kind. A positive one has values that the recipe's codes of such an operand hold."""
    if data == "signed":
        return spiky(*shape, seed=seed).to(dtype)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1234 + seed))
    quant = octavo.recipe(recipe).linear()
    spec = {"x": quant.fprop.left, "w": quant.fprop.right, "dy": quant.dgrad.left}[operand]
    if spec is None or not x.numel():
        return x.to(dtype)
    given = {"seed": torch.zeros(2, dtype=torch.int64)} if spec.is_stochastic else {}
    return spec.quantize(x.to(dtype), **given).dequantize()


def assert_near(found, want, *, recipe="bf16", data="positive", what=""):
    """The result is as near to the float64 one as upstream asks for, or as the format allows for signed data."""
    assert tuple(found.shape) == tuple(want.shape), what
    if not found.numel():
        return
    if data == "signed":
        error = relative_error(found, want)
        bound = WHOLE.get(recipe, 0.12)
        assert error <= bound, f"{what}: {error:.3g} of {bound}"
        return
    rtol, atol = OF_DTYPE[found.dtype] if recipe == "bf16" else OF_FP4 if recipe == "nvfp4" else OF_FP8
    scale = max(1.0, float(want.abs().max()))
    torch.testing.assert_close(
        found.double(), want.double(), rtol=rtol, atol=atol * scale, msg=lambda m: f"{what}: {m}"
    )


def normed(x, norm, weight, bias, zero_centered, eps):
    """The formula of a norm."""
    weight = weight + 1 if zero_centered else weight
    if norm == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
