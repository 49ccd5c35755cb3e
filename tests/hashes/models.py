"""The modules of the cases, and the inputs that each takes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo import ops, values

K, N = 160, 144  # in and out: more than one block of 128, and no multiple of it
LEAD = (2, 70)
GROUPS, SIZES, ROWS = 4, (5, 0, 150, 21), 180  # the last four rows are a tail


@dataclass(frozen=True)
class Kind:
    """A module as a function of its recipe and settings, with the inputs it takes."""

    build: Callable[..., nn.Module]
    width: int = K
    lead: tuple[int, ...] = LEAD
    extra: tuple[str, ...] = ()  # inputs after x: "residual", "scales" or "sizes"
    extra_width: int = N
    keywords: dict[str, Any] = field(default_factory=dict)  # of every call
    native: bool = False  # computes in float32 with torch itself, whose last bits differ between machines
    rule: str = ""  # the fusion that it is there for


# -- layers ------------------------------------------------------------------------------------------------------------


class Codes(nn.Module):
    """Two Linears; the first hands the second codes."""

    def __init__(self, recipe: str | None, **settings: Any) -> None:
        super().__init__()
        self.first = octavo.Linear(K, N, recipe=recipe, **settings)
        self.second = octavo.Linear(N, K, recipe=recipe, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, fp8_output=True))


class Stock(nn.Module):
    """Stock modules that `octavo.convert` turned into layers."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K, bias=False))
        octavo.convert(self.body, recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def linear(recipe: str | None, **settings: Any) -> nn.Module:
    return octavo.Linear(K, N, recipe=recipe, **settings)


def grouped(recipe: str | None, **settings: Any) -> nn.Module:
    return octavo.GroupedLinear(GROUPS, K, N, recipe=recipe, **settings)


def by_group(recipe: str | None, **settings: Any) -> nn.Module:
    return grouped(recipe, single_grouped_weight=False, single_grouped_bias=False, **settings)


def of_groups(build: Callable[..., nn.Module], *extra: str, **others: Any) -> Kind:
    return Kind(build, lead=(ROWS,), extra=("sizes", *extra), **others)


LAYERS = {
    "Linear": Kind(linear),
    "Linear, codes between": Kind(Codes),
    "Linear, converted": Kind(Stock),
    "GroupedLinear": of_groups(grouped),
    "GroupedLinear, by group": of_groups(by_group),
    "GroupedLinear, weights by group": of_groups(lambda r, **s: grouped(r, single_grouped_weight=False, **s)),
    "GroupedLinear, scaled bias": of_groups(
        lambda r, **s: octavo.Sequential(grouped(r, scale_bias=True, **s)), "scales"
    ),
    "LayerNormLinear": Kind(lambda r, **s: octavo.LayerNormLinear(K, N, recipe=r, **s)),
    "LayerNormLinear, RMSNorm": Kind(
        lambda r, **s: octavo.LayerNormLinear(
            K, N, recipe=r, normalization="RMSNorm", zero_centered_gamma=True, bias=False, **s
        )
    ),
    "LayerNormMLP": Kind(lambda r, **s: octavo.LayerNormMLP(K, N, recipe=r, **s)),
    "LayerNormMLP, swiglu": Kind(
        lambda r, **s: octavo.LayerNormMLP(
            K, N, recipe=r, normalization="RMSNorm", activation="swiglu", bias=False, **s
        )
    ),
}
MLP_ACTIVATIONS = (
    "gelu", "qgelu", "relu", "srelu", "silu", "glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped-swiglu",
    "situglu",
)  # fmt: skip
MLPS = {
    f"LayerNormMLP, activation {name}": Kind(
        lambda r, name=name, **s: octavo.LayerNormMLP(K, N, recipe=r, activation=name, **s)
    )
    for name in MLP_ACTIVATIONS
}


# -- runs --------------------------------------------------------------------------------------------------------------


def run_of(rule: str, *parts: Callable[[str], nn.Module], **others: Any) -> Kind:
    return Kind(lambda r, **s: octavo.Sequential(*[part(r) for part in parts], **s), rule=rule, **others)


def plain(n: int = N, k: int = K, bias: bool = False) -> Callable[[str], nn.Module]:
    return lambda recipe: octavo.Linear(k, n, bias=bias, recipe=recipe)


def of(kind: Callable[..., nn.Module], *sizes: Any, **settings: Any) -> Callable[[str], nn.Module]:
    return lambda _: kind(*sizes, **settings)


def experts_of(n: int, k: int) -> Callable[[str], nn.Module]:
    return lambda recipe: octavo.GroupedLinear(GROUPS, k, n, bias=False, recipe=recipe)


def grouped_run(rule: str, *parts: Callable[[str], nn.Module], **others: Any) -> Kind:
    return run_of(rule, *parts, lead=(ROWS,), **others)


BLOCK = (
    of(ops.MakeExtraOutput, channel="residual", output_to_caller=False), of(ops.RMSNorm, K), plain(2 * N),
    of(ops.SwiGLU), plain(K, N), of(ops.AddExtraInput, source="residual"),
)  # fmt: skip
FUSIONS = {
    "norm, linear": run_of("norm-linear", of(ops.RMSNorm, K), plain()),
    "layer norm, linear with bias": run_of("norm-linear", of(ops.LayerNorm, K), plain(bias=True)),
    "add, norm, linear": run_of(
        "add-norm-linear", of(ops.AddExtraInput), of(ops.LayerNorm, K), plain(bias=True), extra=("residual",),
        extra_width=K,
    ),
    "add, extra output, norm, linear": run_of(
        "add-norm-linear", of(ops.AddExtraInput), of(ops.MakeExtraOutput), of(ops.RMSNorm, K), plain(),
        extra=("residual",), extra_width=K,
    ),
    "swiglu, linear": run_of("activation-linear", of(ops.SwiGLU), plain(k=K // 2)),
    "gelu, linear with bias": run_of("activation-linear", of(ops.GELU), plain(bias=True)),
    "scaled swiglu, linear": run_of("activation-linear", of(ops.ScaledSwiGLU), plain(k=K // 2), extra=("scales",)),
    "linear, swiglu, linear": run_of("mlp", plain(2 * N), of(ops.SwiGLU), plain(K, N)),
    "linear, gelu, linear with biases": run_of("mlp", plain(bias=True), of(ops.GELU), plain(K, N, bias=True)),
    "grouped, scaled swiglu, grouped": grouped_run(
        "grouped-mlp", experts_of(2 * N, K), of(ops.ScaledSwiGLU), experts_of(K, N), extra=("sizes", "scales", "sizes")
    ),
    "grouped, gelu, grouped": grouped_run(
        "grouped-mlp", experts_of(N, K), of(ops.GELU), experts_of(K, N), extra=("sizes", "sizes")
    ),
    "swiglu, grouped": grouped_run(
        "activation-grouped-linear", of(ops.SwiGLU), experts_of(N, K // 2), extra=("sizes",)
    ),
    "grouped, silu": grouped_run(
        "grouped-linear-activation", experts_of(N, K), of(ops.SiLU), extra=("sizes",)
    ),
    "linear, silu": run_of("activation-bias", plain(bias=True), of(ops.SiLU)),
    "linear, bias, geglu": run_of("activation-bias", plain(), of(ops.Bias, N), of(ops.GEGLU)),
    "linear, scale": run_of("linear-scale", plain(), of(ops.ConstantScale, 3.5)),
    "linear, bias": run_of("linear-bias", plain(), of(ops.Bias, N)),
    "linear, bias, relu": run_of("linear-bias-activation", plain(), of(ops.Bias, N), of(ops.ReLU)),
    "linear, add": run_of("linear-bias-add", plain(bias=True), of(ops.AddExtraInput), extra=("residual",)),
    "linear, bias, add": run_of(
        "linear-bias-add", plain(), of(ops.Bias, N), of(ops.AddExtraInput), extra=("residual",)
    ),
    "linear, scale, add": run_of(  # torch.add with alpha, which is one rounding or two, as the CPU has it
        "linear-scale-add", plain(), of(ops.ConstantScale, -2.5), of(ops.AddExtraInput), extra=("residual",),
        native=True,
    ),
    "extra output, linear": run_of("linear-add", of(ops.MakeExtraOutput), plain(bias=True)),
    "extra output, norm, linear": run_of("add-rmsnorm", of(ops.MakeExtraOutput), of(ops.RMSNorm, K), plain()),
    "residual block": run_of("mlp", *BLOCK),
}  # fmt: skip
RUNS = {
    "quantize, linear": run_of("", lambda r: ops.Quantize(recipe=r), plain()),
    "quantize both ways, linear": run_of("", lambda r: ops.Quantize(backward=True, recipe=r), plain()),
    "linear, dropout, linear": run_of(
        "", plain(), of(ops.Dropout, 0.25), plain(K, N),
        keywords={"op_kwargs": {1: {"seed": torch.tensor([7, 3])}}},
    ),
    "experts between norms": Kind(
        lambda r, **s: octavo.Sequential(ops.RMSNorm(K), grouped(r), ops.SwiGLU(), ops.L2Normalization(), **s),
        lead=(ROWS,), extra=("sizes",),
    ),
    "ordinary module between": run_of("", of(ops.RMSNorm, K), plain(), of(nn.Hardtanh), plain(K, N), of(ops.ReLU)),
}  # fmt: skip


# -- operations alone --------------------------------------------------------------------------------------------------


def alone(kind: Callable[..., nn.Module], *sizes: Any, extra: tuple[str, ...] = (), **settings: Any) -> Kind:
    return Kind(lambda _: kind(*sizes, **settings), extra=extra, extra_width=K)


CLASSES = {name: getattr(ops, name) for name in ops.__all__ if isinstance(getattr(ops, name), type)}
ACTIVATIONS = [  # those whose settings have defaults
    name for name, kind in CLASSES.items() if issubclass(kind, ops.Activation)
    and kind not in (ops.Activation, ops.ConstantScale)
]  # fmt: skip
OPERATIONS = {
    **{name: alone(getattr(ops, name), extra=("scales",) * name.startswith("Scaled")) for name in ACTIVATIONS},
    **{name: alone(getattr(ops, name)) for name in (
        "L2Normalization", "Identity", "MakeExtraOutput", "AllGather", "AllReduce", "ReduceScatter", "SumGradient",
    )},
    "SwiGLU, interleaved": alone(ops.SwiGLU, glu_interleave_size=16),
    "ClampedSwiGLU, settings": alone(ops.ClampedSwiGLU, limit=2.0, alpha=1.5, glu_linear_offset=0.5),
    "SiTUGLU, settings": alone(ops.SiTUGLU, beta1=2.0, beta2=8.0, glu_interleave_size=8),
    "LayerNorm": alone(ops.LayerNorm, K),
    "LayerNorm, zero-centered": alone(ops.LayerNorm, K, zero_centered_gamma=True),
    "LayerNorm, no bias": alone(ops.LayerNorm, K, bias=False, eps=1e-3),
    "LayerNorm, two dims": alone(ops.LayerNorm, (LEAD[1], K)),
    "RMSNorm": alone(ops.RMSNorm, K),
    "RMSNorm, zero-centered": alone(ops.RMSNorm, K, zero_centered_gamma=True),
    "ConstantScale": alone(ops.ConstantScale, 0.3),
    "Bias": alone(ops.Bias, K),
    "Dropout": Kind(lambda _: ops.Dropout(0.3), keywords={"seed": torch.tensor([5, 2])}),
    "Reshape": alone(ops.Reshape, (-1, 2, K // 2)),
    "AddExtraInput": alone(ops.AddExtraInput, extra=("residual",)),
}  # fmt: skip
QUANTIZE = {
    "Quantize": Kind(lambda r: ops.Quantize(recipe=r)),
    "Quantize, backward alone": Kind(lambda r: ops.Quantize(forward=False, backward=True, recipe=r)),
}


# -- users' operations, as docs/writing-an-operation.md writes them ----------------------------------------------------


@values.register("hashed-softcap")
class Cap(values.Value):
    cap: float = 4.0


class SoftCap(ops.BasicOperation):
    """gain · cap · tanh(x / cap)"""

    params = ("gain",)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.settings = Cap()

    def op_config(self):
        return self.settings

    @staticmethod
    def op_forward_compute(config, inputs):
        t = torch.tanh(inputs.x / config.cap)
        return inputs.gain * config.cap * t, (t,)

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return fresh[0], inputs.gain

    @staticmethod
    def op_backward(config, saved, dy, wants):
        t, gain = saved
        dx = dy * gain * (1 - t * t) if wants.x else None
        dgain = (dy * config.cap * t).reshape(-1, gain.numel()).sum(0) if wants.gain else None
        return dx, dgain


class Square(ops.BasicOperation):
    """x², as a forward in one piece, which no graph holds."""

    def op_forward(self, ctx, x):
        ctx.save_for_backward(x)
        return x * x

    def op_backward(self, ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy, ()


class Halves(ops.BasicOperation):
    """x / 2, and x / 4 beside it."""

    num_extra_outputs = 1

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return inputs.x / 2, (inputs.x / 4,), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return ()

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        parts = [g / n for g, n in zip(grads, (2, 4), strict=True) if g is not None]
        return (sum(parts),)


class CapAndScale(ops.FusedOperation):
    """SoftCap and ConstantScale in one step, both ways."""

    @staticmethod
    def fuser_forward_compute(configs, inputs):
        y, fresh = SoftCap.op_forward_compute(configs[0], inputs[0])
        return y * 0.5, ((), ()), (fresh, ())

    @staticmethod
    def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
        return (fresh[0][0], inputs[0].gain), ()

    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        return SoftCap.op_backward(configs[0], saved[0], grads[0] * 0.5, wants[0]), (None, None, None, None)


JOINT = ops.Joint(ops.Rule("hashed-cap-and-scale", (SoftCap, ops.ConstantScale), CapAndScale))
CUSTOM = {
    "custom operation, linear": run_of("", of(SoftCap, K), plain(), native=True),
    "linear, custom with an extra output": run_of("", plain(), of(Halves)),
    "custom fusion": Kind(
        lambda r: octavo.Sequential(SoftCap(K), ops.ConstantScale(0.5), plain()(r), rules=(JOINT,)),
        native=True, rule="hashed-cap-and-scale",
    ),
}  # fmt: skip
ONE_PIECE = {"custom operation in one piece, linear": run_of("", of(Square), plain())}
