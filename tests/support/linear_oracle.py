"""A linear layer a second time, from nothing but quantizers: decode with ml_dtypes, multiply in numpy's float64, round
once to float32, add the bias there, round to the dtype. It shares no code with `octavo.ops`."""

import math
from collections import deque
from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

import octavo
import octavo.quant as Q

F = np.float32
CODES = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}
OVERRIDES = ("fprop='bf16'", "dgrad='bf16'", "wgrad='bf16'", "backward='high_precision'", "backward='dequantized'")
OTHERS = (  # settings that change which codes are made, beyond each recipe's defaults
    "fp8-current(pow2=True)",
    "fp8-current(grad_format=E4M3)",
    "fp8-delayed(grad_format=E4M3)",
    "fp8-rowwise(grad_format=E5M2,pow2=False)",
    "fp8-block(scale='fp32')",
    "fp8-block(grad_format=E5M2)",
    "mxfp8(square_weights=True)",
    "mxfp8(rounding='floor',grad_format=E5M2)",
    "nvfp4(stochastic=False)",
    "nvfp4(rht=False)",
    "nvfp4(square_weights=False)",
)


@dataclass
class Result:
    """What one forward and backward leaves; None where nothing was asked for."""

    y: Tensor | None
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


def assert_same(found: Tensor | None, want: Tensor | None, what: str = "") -> None:
    """Same dtype, shape and values; NaN equals NaN."""
    assert (found is None) == (want is None), f"{what}: {found} instead of {want}"
    if found is not None:
        assert (found.dtype, tuple(found.shape)) == (want.dtype, tuple(want.shape)), what
        same = (found == want) | (found.isnan() & want.isnan())
        assert same.all(), f"{what}: {(~same).sum()} of {same.numel()} differ"


def assert_result(found: Result, want: Result) -> None:
    for field in fields(Result):
        assert_same(getattr(found, field.name), getattr(want, field.name), field.name)


def differs(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a.float(), b.float())


# -- data ----------------------------------------------------------------------------------------------------------


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spiky(*shape, dtype=torch.float32, seed=0, size=30.0):
    """Signed, one element in 61 an outlier."""
    x = randn(*shape, seed=seed)
    x.view(-1)[seed % 7 :: 61] *= size
    return x.to(dtype)


def make(recipe, k=48, n=40, *, bias=True, dtype=torch.float32, seed=1, **settings):
    """An octavo.Linear with weights that do not depend on torch's generator."""
    layer = octavo.Linear(k, n, bias=bias, dtype=dtype, recipe=recipe, **settings)
    with torch.no_grad():
        layer.weight.copy_(spiky(n, k, seed=seed, size=8.0) * 0.1)
        if bias:
            layer.bias.copy_(randn(n, seed=seed + 1))
    return layer


def run(layer, x, dy=None, **settings) -> Result:
    """Forward and backward of fresh leaves; gradients are taken off the parameters again."""
    x = x.detach().requires_grad_()
    y = layer(x, **settings)
    y.backward(spiky(*y.shape, dtype=y.dtype, seed=9) if dy is None else dy)
    grads = [None if p is None else p.grad for p in (layer.weight, layer.bias)]
    for p in layer.parameters():
        p.grad = None
    return Result(y.detach(), x.grad, *grads)


def seed_of(model, path: str = "") -> Tensor | None:
    """[seed, step] of a layer's stochastic rounding as it stands, or None."""
    found = octavo.state_dict(model).get(f"{path}.rounding.seed".lstrip("."))
    return None if found is None else found.clone()


def spec_of(recipe) -> Q.Quantizer:
    """How a recipe quantizes x for fprop."""
    return octavo.recipe(recipe).linear().fprop.left


def codes_of(recipe, x: Tensor) -> Q.QTensor:
    """The codes of x in a recipe's fprop; delayed scaling begins with a multiplier of 1."""
    return spec_of(recipe).quantize(x, **({"inverse_scale": torch.ones(1)} if octavo.recipe(recipe).stateful else {}))


# -- the composition -----------------------------------------------------------------------------------------------


def decoded_codes(q: Q.QTensor) -> np.ndarray:
    raw = q.codes.view(torch.uint8).numpy()
    if isinstance(q.spec, Q.NVFP4):
        nibbles = np.stack((raw & 0xF, raw >> 4), -1).reshape(raw.shape[0], -1)
        return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return raw.view(CODES[q.codes.dtype]).astype(np.float64)


def decoded_scale(q: Q.QTensor) -> np.ndarray:
    raw = q.scale.contiguous().numpy()
    byte = {Q.MX: ml_dtypes.float8_e8m0fnu, Q.NVFP4: ml_dtypes.float8_e4m3fn}.get(type(q.spec))
    return (raw if byte is None else raw.view(byte)).astype(np.float64)


def factors(x: Tensor | Q.QTensor) -> tuple[np.ndarray, np.ndarray]:
    """(what is summed [M, K], what multiplies each row of the sum [M or 1, 1]). A scale that does not change along the
    contraction multiplies the sum, so that a sum of codes that is zero stays zero."""
    if isinstance(x, Tensor):
        return x.detach().double().numpy(), np.ones((1, 1))
    codes, scale = decoded_codes(x), decoded_scale(x)
    if x.spec.block[1] is None:
        return codes, scale
    for dim, block in enumerate(x.spec.block):
        scale = np.repeat(scale, block, axis=dim)
    return codes * scale[: codes.shape[0], : codes.shape[1]], np.ones((1, 1))


def product(a: Tensor | Q.QTensor, b: Tensor | Q.QTensor) -> Tensor:
    """a · bᵀ as float32. NVFP4's two global scales are multiplied in float32 first."""
    (u, s), (v, t) = factors(a), factors(b)
    total = (u @ v.T) * (s * t.T)
    if isinstance(a, Q.QTensor) and a.global_scale is not None:
        total = total * float(F(a.global_scale.item()) * F(b.global_scale.item()))
    with np.errstate(over="ignore"):
        return torch.from_numpy(total.astype(F))


def multiplier(recipe, name, tensor, inverse_scale) -> Tensor:
    """Delayed scaling's: the one given, or, of what was not seen yet, what the tensor's own amax leads to."""
    if inverse_scale is not None and inverse_scale[name] is not None:
        return torch.tensor([inverse_scale[name]], dtype=torch.float32)
    if recipe.cold_start == "one":
        return torch.ones(1)
    fmt = (recipe.gemms().dgrad if name == "dy" else recipe.gemms().fprop).left.fmt
    amax = F(tensor.float().abs().amax()) if tensor.numel() else F(0)
    own = F(LARGEST[fmt.name]) / amax if amax > 0 else F(1)
    return torch.tensor([float(own * F(2.0**-recipe.margin))])


def expected(recipe, x, w, bias, dy, *, seed=None, inverse_scale=None) -> Result:
    """What Linear(recipe) gives for x and dy. `encode`: the multipliers of delayed scaling, None of what is fresh;
    `seed`: of stochastic rounding."""
    recipe = octavo.recipe(recipe)
    quant = recipe.linear()
    x, w, dy = x.detach(), w.detach(), dy.detach()
    shape, (n, k), m = x.shape, w.shape, math.prod(x.shape[:-1])
    x, dy, cast_w = x.reshape(m, k), dy.reshape(m, n), w.to(x.dtype)

    def codes(name, spec, tensor, axis):
        given = {"seed": seed} if spec.is_stochastic else {}
        if recipe.stateful:
            given["inverse_scale"] = multiplier(recipe, name, tensor, inverse_scale)
        return spec.quantize(tensor, axis, **given)

    def forward_values(name, tensor):
        spec = quant.fprop.left if name == "x" else quant.fprop.right
        return codes(name, spec, tensor, -1).dequantize(x.dtype)

    if quant.fprop.mode == "quantized":
        y = product(codes("x", quant.fprop.left, x, -1), codes("w", quant.fprop.right, w, -1))
    else:
        y = product(x, cast_w)
    if bias is not None:
        y = y + bias.detach().float()

    if quant.dgrad.mode == "quantized":
        dx = product(codes("dy", quant.dgrad.left, dy, -1), codes("w", quant.dgrad.right, w, 0))
    else:
        dx = product(dy, (forward_values("w", w) if quant.dgrad.mode == "dequantized" else cast_w).T)

    if quant.wgrad.mode == "quantized":
        dw = product(codes("dy", quant.wgrad.left, dy, 0), codes("x", quant.wgrad.right, x, 0))
    else:
        dw = product(dy.T, (forward_values("x", x) if quant.wgrad.mode == "dequantized" else x).T)

    db = None if bias is None else torch.from_numpy(dy.double().numpy().sum(0)).to(bias.dtype)
    return Result(y.to(x.dtype).view(*shape[:-1], n), dx.to(x.dtype).view(shape), dw.to(w.dtype), db)


def check(layer, recipe, x, dy, *, path="", model=None, inverse_scale=None, **settings) -> Result:
    """Run a layer once and hold all four results to the composition; returns them."""
    seed = seed_of(layer if model is None else model, path)
    weight = layer.weight.detach().clone()
    found = run(layer, x, dy, **settings)
    assert_result(found, expected(recipe, x, weight, layer.bias, dy, seed=seed, inverse_scale=inverse_scale))
    return found


# -- delayed scaling -----------------------------------------------------------------------------------------------


class Slot:
    """One tensor's memory in delayed scaling, as numerics.md words it."""

    def __init__(self, fmt, length=1024, algorithm="max", margin=0):
        self.window: deque[float] = deque(maxlen=length)
        self.largest, self.algorithm, self.margin = LARGEST[fmt.name], algorithm, margin
        self.inverse_scale, self.current = None, 0.0  # None: nothing was seen

    def observe(self, tensor: Tensor) -> None:
        amax = float(tensor.detach().float().abs().amax()) if tensor.numel() else 0.0
        self.current = math.nan if math.isnan(amax) or math.isnan(self.current) else max(self.current, amax)

    def step(self) -> None:
        amax, self.current = self.current, 0.0
        if math.isfinite(amax) and amax > 0:
            self.window.append(amax)
            a = max(self.window) if self.algorithm == "max" else amax
            self.inverse_scale = float(F(self.largest) / F(a) * F(2.0**-self.margin))

    def history(self) -> list[float]:
        """Oldest to newest, zeros where nothing has come yet."""
        return list(self.window) + [0.0] * (self.window.maxlen - len(self.window))


class Memory:
    """The three slots of a layer."""

    def __init__(self, recipe):
        recipe = octavo.recipe(recipe)
        quant, settings = recipe.gemms(), (recipe.history, recipe.algorithm, recipe.margin)
        formats = {"x": quant.fprop.left.fmt, "w": quant.fprop.right.fmt, "dy": quant.dgrad.left.fmt}
        self.slots = {name: Slot(fmt, *settings) for name, fmt in formats.items()}

    @property
    def inverse_scale(self) -> dict[str, float]:
        return {name: slot.inverse_scale for name, slot in self.slots.items()}

    def observe(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.slots[name].observe(tensor)

    def step(self) -> None:
        for slot in self.slots.values():
            slot.step()

    def assert_state(self, state: dict[str, Tensor], prefix: str = "") -> None:
        """The windows as octavo.state_dict holds them."""
        forward, backward = (state[f"{prefix}scaling.{side}.history"] for side in ("forward", "backward"))
        assert forward.tolist() == [self.slots["x"].history(), self.slots["w"].history()]
        assert backward.tolist() == [self.slots["dy"].history()]


def graphs_of(recipe, count=1) -> int:
    """How many graphs a compiled layer has that is stepped, if other recipes have `count`: before delayed scaling has
    seen its tensors it measures them, in a graph of its own."""
    recipe = octavo.recipe(recipe)
    return count * (2 if recipe.stateful and recipe.cold_start == "current" else 1)
