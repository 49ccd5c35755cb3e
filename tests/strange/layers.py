"""The layers of the harness: every public module, functions that are layers, and converted modules. Adding one is a
line of `LAYERS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import octavo
from octavo import moe, ops
from octavo.recipes import SHIPPED
from tests.hashes.models import ACTIVATIONS
from tests.support.dispatched_experts import Config, Gated
from tests.support.recipe_traits import is_stateful, is_stochastic
from tests.support.titan_experts import GroupedExperts

K, N, ROWS = 144, 80, 72  # no multiples of 128
GROUPS, SIZES = 4, (17, 0, 40, 5)  # the last rows are a tail
HEADS, HEAD_WIDTH, LENGTH = 3, 16, 24
Place = dict[str, Any]  # device and dtype

SETTINGS = ("fp8-rowwise(pow2=False)", "fp8-block(scale='fp32')", "nvfp4(stochastic=False)", "mxfp8(rounding='even')")
RECIPES = (*SHIPPED, *SETTINGS)
UNQUANTIZED = ("bf16",)  # for operations that have no recipe
QUANTIZED = tuple(name for name in RECIPES if name not in UNQUANTIZED)
STATELESS = tuple(
    name for name in RECIPES if not is_stateful(name) and not is_stochastic(name)
)  # a function keeps no state


class Draw:
    """Draws the inputs of one call: on the CPU, in float32, and then moved, so that they are the same everywhere."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.generator = place, torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float32)

    def values(self, *shape: int) -> Tensor:
        return self.normal(*shape).to(**self.place).requires_grad_()

    def integers(self, values: Any) -> Tensor:
        return torch.as_tensor(values, device="cpu", dtype=torch.int64).to(self.place["device"])


def rows(draw: Draw) -> tuple[Any, ...]:
    return (draw.values(ROWS, K),)


def with_sizes(draw: Draw) -> tuple[Any, ...]:
    return draw.values(ROWS, K), draw.integers(SIZES)


def with_listed_sizes(draw: Draw) -> tuple[Any, ...]:
    return draw.values(ROWS, K), list(SIZES)


def with_residual(draw: Draw) -> tuple[Any, ...]:
    return draw.values(ROWS, K), draw.values(ROWS, K)


def with_scales(draw: Draw) -> tuple[Any, ...]:
    return draw.values(ROWS, K), draw.values(ROWS)


def with_sizes_and_scales(draw: Draw) -> tuple[Any, ...]:
    return *with_sizes(draw), draw.values(ROWS), draw.integers(SIZES)


def with_routing(draw: Draw) -> tuple[Any, ...]:
    probs, index = draw.normal(ROWS, GROUPS).softmax(-1).topk(2)
    return draw.values(ROWS, K), draw.integers(index), probs.to(draw.place["device"]).requires_grad_()


def sequences(draw: Draw) -> tuple[Any, ...]:
    return (draw.values(2, LENGTH, 3 * HEADS * HEAD_WIDTH),)


@dataclass(frozen=True)
class Layer:
    """A module as a function of its recipe and place, and the inputs of a call."""

    name: str
    build: Callable[[str, Place], nn.Module]
    inputs: Callable[[Draw], tuple[Any, ...]] = rows
    recipes: tuple[str, ...] = RECIPES
    prepare: Callable[[nn.Module], object] = lambda module: None  # once its weights have values

    def __str__(self) -> str:
        return self.name


# -- functions and converted modules -----------------------------------------------------------------------------------


class GroupedFunction(nn.Module):
    """octavo.grouped_linear."""

    def __init__(self, recipe: str, place: Place) -> None:
        super().__init__()
        self.recipe, self.weight = recipe, nn.Parameter(torch.empty(GROUPS, N, K, **place))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return octavo.grouped_linear(x, self.weight, sizes, recipe=self.recipe)


class Microbatches(nn.Module):
    """A layer that quantizes its weight for two microbatches at once."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with octavo.microbatch(first=True):
            first = self.layer(x)
        return first + self.layer(2 * x, is_first_microbatch=False)


class Shift(nn.Module):
    """A module with a buffer."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((K,), 0.5, **place))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Codes(nn.Module):
    """Two layers with codes between them, in an ambient recipe, whose state is made by the first call. A module with a
    buffer follows."""

    def __init__(self, recipe: str, place: Place) -> None:
        super().__init__()
        self.recipe = recipe
        self.first, self.second, self.last = octavo.Linear(K, N, **place), octavo.Linear(N, K, **place), Shift(place)

    def forward(self, x: Tensor) -> Tensor:
        with octavo.autocast(self.recipe):
            return self.last(self.second(self.first(x, fp8_output=self.recipe != "bf16")))


class Buffers(nn.Module):
    """A GroupedLinear that writes to memory of its caller."""

    def __init__(self, recipe: str, place: Place) -> None:
        super().__init__()
        self.place, self.layer = place, octavo.GroupedLinear(GROUPS, K, N, recipe=recipe, **place)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        out, dgrad_out = (octavo.buffer(ROWS, width, **self.place).zero_() for width in (N, K))  # the tail stays zero
        return self.layer(x, sizes, out=out, dgrad_out=dgrad_out if torch.is_grad_enabled() else None)


def add_main_grads(module: nn.Module) -> None:
    for p in module.parameters():
        p.main_grad = torch.zeros(p.shape, device=p.device, dtype=torch.float32)


def hold_codes(module: nn.Module) -> None:
    octavo.quantize_weights(module)
    module.requires_grad_(False)  # no optimizer updates codes


class Casts(nn.Module):
    """The quantizers of a recipe, called as functions."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        gemms = octavo.recipe(recipe).linear()
        operands = (side for gemm in (gemms.fprop, gemms.dgrad, gemms.wgrad) for side in (gemm.left, gemm.right))
        self.specs = [spec for spec in dict.fromkeys(operands) if spec is not None]

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        seed = torch.zeros_like(x.detach()[0, :2], dtype=torch.int64)
        pairs = [spec.quantize_both(x.detach(), seed=seed if spec.is_stochastic else None) for spec in self.specs]
        return (*(q for pair in pairs for q in pair), *(q.dequantize() for pair in pairs for q in pair))


class Routing(nn.Module):
    """The functions of a mixture: every one of `octavo.moe`."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.router = moe.Router(K, GROUPS, **place)
        self.register_buffer("bias", torch.zeros(GROUPS, device=place["device"], dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = self.router(x)
        probs, index = moe.route(logits, 2, score="sigmoid", bias=self.bias, groups=2, top_groups=1)
        permuted, order = moe.permute(x, index, GROUPS)
        weights = moe.permute_probs(probs, order)
        y = moe.unpermute(permuted * weights[:, None].to(x.dtype), order)
        if torch.is_grad_enabled():
            moe.update_bias(self.bias, moe.counts(index, GROUPS))
        return y, moe.aux_loss(logits, index), moe.z_loss(logits)


class Subclass(nn.Linear):
    """A subclass as frameworks have them."""


def converted(module: nn.Module, recipe: str) -> nn.Module:
    octavo.convert(module, recipe)
    return module


def stock(recipe: str, place: Place) -> nn.Module:
    body = nn.Sequential(nn.Linear(K, N, **place), nn.ReLU(), nn.LayerNorm(N, **place), Subclass(N, K, **place))
    return converted(body, recipe)


# -- runs --------------------------------------------------------------------------------------------------------------


def residual_block(recipe: str, place: Place) -> nn.Module:
    return octavo.Sequential(
        ops.MakeExtraOutput(channel="residual", output_to_caller=False),
        ops.RMSNorm(K, **place), ops.Linear(K, 2 * N, bias=False, recipe=recipe, **place), ops.SwiGLU(),
        ops.Linear(N, K, bias=False, recipe=recipe, **place), ops.AddExtraInput(source="residual"),
    )  # fmt: skip


def grouped_mlp(recipe: str, place: Place) -> nn.Module:
    first, second = (
        octavo.GroupedLinear(GROUPS, k, n, bias=False, recipe=recipe, **place) for k, n in ((K, 2 * N), (N, K))
    )
    return octavo.Sequential(first, ops.ScaledSwiGLU(), second)


class Attention(nn.Module):
    """A block with torch's attention, whose fast kernels on a GPU sum in another order each time."""

    def __init__(self, recipe: str, place: Place) -> None:
        super().__init__()
        width = HEADS * HEAD_WIDTH
        self.block = octavo.Sequential(
            ops.RMSNorm(3 * width, **place), ops.Linear(3 * width, 3 * width, recipe=recipe, **place),
            ops.RotaryAttention(HEADS, HEAD_WIDTH, positions=LENGTH, device=place["device"]),
            ops.Linear(width, width, recipe=recipe, **place),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.block(x)


def mixed_run(recipe: str, place: Place) -> nn.Module:
    return octavo.Sequential(
        ops.LayerNorm(K, **place), ops.GELU(), ops.Linear(K, N, bias=False, recipe=recipe, **place),
        ops.Bias(N, **place), ops.ConstantScale(0.5), nn.Hardtanh(), ops.Dropout(0.25), ops.ReLU(),
    )  # fmt: skip


LOSSES = {"score": "sqrtsoftplus", "expert_bias": True, "aux_loss_coef": 0.1, "z_loss_coef": 0.1}


def alone(kind: type[nn.Module], *sizes: Any, inputs: Callable[[Draw], tuple[Any, ...]] = rows, **settings: Any):
    """An operation without parameters and recipe."""
    return Layer(kind.__name__, lambda recipe, place: kind(*sizes, **settings), inputs, UNQUANTIZED)


LAYERS: tuple[Layer, ...] = (
    Layer("Linear", lambda r, p: octavo.Linear(K, N, recipe=r, **p)),
    Layer("Linear, no bias", lambda r, p: octavo.Linear(K, N, bias=False, recipe=r, **p)),
    Layer("Linear, weight cached", lambda r, p: Microbatches(octavo.Linear(K, N, recipe=r, **p))),
    Layer("Linear, weight as codes", lambda r, p: octavo.Linear(K, N, recipe=r, **p), recipes=QUANTIZED,
          prepare=hold_codes),
    Layer("Linear, main_grad", lambda r, p: octavo.Linear(K, N, recipe=r, fuse_wgrad_accumulation=True, **p),
          prepare=add_main_grads),
    Layer("Linear, deferred wgrad", lambda r, p: octavo.Linear(K, N, recipe=r, delay_wgrad_compute=True, **p)),
    Layer("Linear, codes between", Codes),
    Layer("GroupedLinear", lambda r, p: octavo.GroupedLinear(GROUPS, K, N, recipe=r, **p), with_sizes),
    Layer("GroupedLinear, sizes in a list", lambda r, p: octavo.GroupedLinear(GROUPS, K, N, recipe=r, **p),
          with_listed_sizes),
    Layer("GroupedLinear, weights by group", lambda r, p: octavo.GroupedLinear(
        GROUPS, K, N, recipe=r, single_grouped_weight=False, single_grouped_bias=False, **p), with_sizes),
    Layer("GroupedLinear, caller's buffers", Buffers, with_sizes),
    Layer("grouped_linear", GroupedFunction, with_sizes, STATELESS),
    Layer("LayerNormLinear", lambda r, p: octavo.LayerNormLinear(K, N, recipe=r, **p)),
    Layer("LayerNormMLP", lambda r, p: octavo.LayerNormMLP(K, N, recipe=r, **p)),
    Layer("LayerNormMLP, swiglu", lambda r, p: octavo.LayerNormMLP(
        K, N, normalization="RMSNorm", activation="swiglu", bias=False, recipe=r, **p)),
    Layer("LayerNormMLP, recomputed", lambda r, p: octavo.LayerNormMLP(K, N, activation_recompute=True, recipe=r, **p)),
    Layer("residual block", residual_block),
    Layer("grouped MLP", grouped_mlp, with_sizes_and_scales),
    Layer("attention block", Attention, sequences),
    Layer("run with dropout", mixed_run),
    Layer("Quantize, Linear", lambda r, p: octavo.Sequential(
        ops.Quantize(backward=True, recipe=r), ops.Linear(K, N, recipe=r, **p))),
    Layer("MoE", lambda r, p: octavo.MoE(K, N, GROUPS, 2, recipe=r, shared_ffn_size=32, **LOSSES, **p)),
    Layer("MoE, dispatcher", lambda r, p: octavo.MoE(
        K, N, GROUPS, 2, recipe=r, dispatcher=moe.LocalDispatch(2 * ROWS), **p)),
    Layer("Experts", lambda r, p: moe.Experts(GROUPS, K, N, recipe=r, **p), with_routing),
    Layer("Experts, stored in fp8", lambda r, p: moe.Experts(
        GROUPS, K, N, recipe=r, fc1_output_storage="fp8", **p), with_routing),
    Layer("converted linears", stock),
    Layer("converted experts of transformers", lambda r, p: converted(
        Gated(Config(), GROUPS, K, N, **p), r), with_routing),
    Layer("converted experts of torchtitan", lambda r, p: converted(GroupedExperts(GROUPS, K, N, **p), r), with_sizes),
    Layer("quantizers", lambda r, p: Casts(r), recipes=QUANTIZED),
    Layer("routing functions", lambda r, p: Routing(p), recipes=UNQUANTIZED),
    Layer("Bias", lambda r, p: ops.Bias(K, **p), recipes=UNQUANTIZED),
    Layer("LayerNorm", lambda r, p: ops.LayerNorm(K, **p), recipes=UNQUANTIZED),
    Layer("RMSNorm", lambda r, p: ops.RMSNorm(K, zero_centered_gamma=True, **p), recipes=UNQUANTIZED),
    *[alone(getattr(ops, name), inputs=with_scales if name.startswith("Scaled") else rows) for name in ACTIVATIONS],
    *[alone(getattr(ops, name)) for name in (
        "L2Normalization", "Identity", "MakeExtraOutput", "AllGather", "AllReduce", "ReduceScatter", "SumGradient",
    )],
    alone(ops.ConstantScale, 0.3),
    alone(ops.Dropout, 0.3),
    alone(ops.Reshape, (-1, 2, K // 2)),
    alone(ops.AddExtraInput, inputs=with_residual),
)  # fmt: skip
BY_NAME = {layer.name: layer for layer in LAYERS}
