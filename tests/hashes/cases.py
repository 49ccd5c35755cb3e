"""The list of cases: layers × recipes × dtypes × options, each option of a layer with every shipped recipe."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import octavo
from tests.hashes import models
from tests.hashes.models import Kind

SHIPPED = octavo.recipes.SHIPPED
SETTINGS = (
    "fp8-delayed(history=2,algorithm='most_recent',margin=1)",
    "fp8-delayed(cold_start='one')",
    "fp8-delayed(grad_format=E4M3,wgrad='bf16')",
    "fp8-current(pow2=True)",
    "fp8-current(grad_format=E4M3,fast=())",
    "fp8-current(eps=1e6)",
    "fp8-current(backward='dequantized')",
    "fp8-rowwise(pow2=False)",
    "fp8-rowwise(wgrad='bf16')",
    "fp8-block(scale='fp32')",
    "fp8-block(grad_format=E5M2)",
    "fp8-block(fprop='bf16')",
    "fp8-block(dgrad='bf16')",
    "fp8-block(backward='high_precision')",
    "fp8-block(backward='dequantized')",
    "mxfp8(rounding='floor')",
    "mxfp8(rounding='ceil')",
    "mxfp8(rounding='even',grad_format=E5M2)",
    "mxfp8(square_weights=True)",
    "nvfp4(stochastic=False)",
    "nvfp4(rht=False)",
    "nvfp4(square_weights=False)",
    "nvfp4(stochastic=False,rht=False,wgrad='bf16')",
)


@dataclass(frozen=True)
class Option:
    """One way to build and call a layer."""

    settings: dict[str, Any] = field(default_factory=dict)  # of its constructor
    calls: tuple[dict[str, Any], ...] = ({},)  # keywords of each microbatch of a step
    frozen: tuple[str, ...] = ()  # "x", or a part of a parameter's name
    main_grad: str = ""  # "add" to float32, or "overwrite" bfloat16
    delay: bool = False  # backward_dw() after each backward
    quantized_weight: bool = False  # a weight that is stored as codes
    ambient: bool = False  # the recipe comes from octavo.autocast
    checkpoint: bool = False
    buffers: bool = False  # out= and dgrad_out=
    float32_weights: bool = False
    grad: bool = True
    spoiled: bool = False  # x and dy have values that are not finite
    lead: tuple[int, ...] | None = None  # in the place of the kind's own
    flag: bool = False  # is_first_microbatch as a tensor on the device
    sizes: tuple[int, ...] | None = None
    listed: bool = False  # sizes as a list
    in_graph: bool = True  # a graph can hold it


CACHED = ({"is_first_microbatch": True}, {"is_first_microbatch": False})
PLAIN = "plain"
COMMON = {  # of Linear and GroupedLinear
    "no bias": Option({"bias": False}),
    "frozen x": Option(frozen=("x",)),
    "frozen weight": Option(frozen=("weight",)),
    "cache": Option(calls=CACHED),
    "cache by flag": Option(calls=CACHED, flag=True),
    "main_grad": Option({"fuse_wgrad_accumulation": True}, main_grad="add"),
    "main_grad overwritten": Option({"fuse_wgrad_accumulation": True}, main_grad="overwrite"),
    "delayed dW": Option({"delay_wgrad_compute": True}, calls=({}, {}), delay=True),
    "delayed dW to main_grad, cache": Option(
        {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}, calls=CACHED, main_grad="add", delay=True
    ),
    "held weights": Option(quantized_weight=True),
    "checkpoint": Option(checkpoint=True),
    "autocast": Option(ambient=True),
    "float32 weights": Option(float32_weights=True),
    "no_grad": Option(grad=False),
    "not finite": Option(spoiled=True),
}
OF_LINEAR = {
    **COMMON,
    "no weight codes kept": Option({"keep_weight_codes": False}),
    "return_bias": Option({"return_bias": True}),
    "matrix x, frozen bias": Option(frozen=("bias",), lead=(7,)),
    "no rows": Option(lead=(0,)),
}
OF_GROUPS = {
    **COMMON,
    "buffers": Option(buffers=True),
    "buffers, delayed dW to main_grad": Option(
        {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}, main_grad="add", delay=True, buffers=True
    ),
    "untouched tail": Option({"tail": "untouched"}, sizes=(9, 1, 0, 170)),  # there is no tail then
    "sizes as a list": Option(listed=True, in_graph=False),
    "no rows": Option(lead=(0,), sizes=(0, 0, 0, 0)),
}
BY_GROUP = {name: OF_GROUPS[name] for name in ("cache", "main_grad", "delayed dW", "held weights", "buffers")} | {
    "one group frozen": Option(frozen=("weight2", "bias1")),
}
SHARED = ("cache", "main_grad", "held weights", "checkpoint", "autocast", "frozen x", "float32 weights", "no_grad")
OF_BLOCKS = {name: COMMON[name] for name in SHARED} | {
    "delayed dW": Option({"delay_wgrad_compute": True}, delay=True, in_graph=False)
}
OF_MLPS = OF_BLOCKS | {
    "recomputed": Option({"activation_recompute": True}),
    "weight codes kept": Option({"keep_weight_codes": True}),
}


@dataclass(frozen=True)
class Case:
    """One line of the record."""

    layer: str
    kind: Kind
    recipe: str = ""
    dtype: str = "bf16"
    option: str = PLAIN
    how: Option = Option()
    inductor: bool = False

    @property
    def name(self) -> str:
        return " | ".join(word for word in (self.layer, self.recipe, self.dtype, self.option) if word)

    @property
    def is_portable(self) -> bool:
        """Whether its hash holds on every CPU and with every version of torch: where octavo's own references compute
        it. GEMMs, quantized or not, sums, norms and activations are float64 there, rounded once at the end, so that a
        last bit of float64, which torch and the CPU decide, shows once in 2²⁹ values. What torch itself computes in
        float32, for an operation of one's own or in `linear-scale-add`, has no such room."""
        return not self.kind.native


def _listed() -> Iterator[Case]:
    yield from _linears()
    yield from _groups()
    yield from _blocks()
    yield from _runs()
    yield from _operations()


def _linears() -> Iterator[Case]:
    kind = models.LAYERS["Linear"]
    for dtype in ("bf16", "fp32"):
        for recipe in (*SHIPPED, *SETTINGS):
            yield Case("Linear", kind, recipe, dtype, inductor=dtype == "bf16" and recipe in SHIPPED)
    for recipe in SHIPPED:
        yield Case("Linear", kind, recipe, "fp16")
        for name, option in OF_LINEAR.items():
            yield Case("Linear", kind, recipe, "bf16", name, option)
        if recipe != "bf16":
            yield Case("Linear, codes between", models.LAYERS["Linear, codes between"], recipe)
        yield Case("Linear, converted", models.LAYERS["Linear, converted"], recipe)


def _groups() -> Iterator[Case]:
    kind = models.LAYERS["GroupedLinear"]
    for recipe in SHIPPED:
        for dtype in ("bf16", "fp32", "fp16"):
            yield Case("GroupedLinear", kind, recipe, dtype, inductor=recipe == "fp8-delayed" and dtype == "bf16")
        for name, option in OF_GROUPS.items():
            inductor = name == "buffers" and recipe == "fp8-current"
            yield Case("GroupedLinear", kind, recipe, "bf16", name, option, inductor)
        for layer in ("GroupedLinear, by group", "GroupedLinear, weights by group", "GroupedLinear, scaled bias"):
            yield Case(layer, models.LAYERS[layer], recipe)
        for name, option in BY_GROUP.items():
            layer = "GroupedLinear, by group"
            yield Case(layer, models.LAYERS[layer], recipe, "bf16", name, option)
    for recipe in SETTINGS:
        if "dequantized" not in recipe:
            yield Case("GroupedLinear", kind, recipe)


def _blocks() -> Iterator[Case]:
    for recipe in SHIPPED:
        for layer in ("LayerNormLinear", "LayerNormLinear, RMSNorm", "LayerNormMLP", "LayerNormMLP, swiglu"):
            for dtype in ("bf16", "fp32"):
                inductor = dtype == "bf16" and recipe == "fp8-block"
                yield Case(layer, models.LAYERS[layer], recipe, dtype, inductor=inductor)
    for recipe in ("fp8-delayed", "fp8-block", "nvfp4"):
        for name, option in OF_BLOCKS.items():
            yield Case("LayerNormLinear", models.LAYERS["LayerNormLinear"], recipe, "bf16", name, option)
        for name, option in OF_MLPS.items():
            yield Case("LayerNormMLP, swiglu", models.LAYERS["LayerNormMLP, swiglu"], recipe, "bf16", name, option)
    for layer, kind in models.MLPS.items():
        yield Case(layer, kind, "fp8-current")


def _runs() -> Iterator[Case]:
    for layer, kind in models.FUSIONS.items():
        for recipe in SHIPPED:
            yield Case(layer, kind, recipe, "fp32", inductor=layer == "residual block" and recipe == "nvfp4")
        for recipe in ("fp8-delayed", "nvfp4"):
            yield Case(layer, kind, recipe, "bf16")
        yield Case(layer, kind, "fp8-block", "bf16", "no fusions", Option({"rules": None}))
        yield Case(layer, kind, "fp8-block", "bf16", "frozen x", Option(frozen=("x",)))
    for layer, kind in models.RUNS.items():
        for recipe in SHIPPED:
            yield Case(layer, kind, recipe)
    for layer, kind in models.CUSTOM.items():
        for recipe in SHIPPED:
            yield Case(layer, kind, recipe, "fp32")
    for layer, kind in models.ONE_PIECE.items():
        yield Case(layer, kind, "fp8-current", "fp32", PLAIN, Option(in_graph=False))


def _operations() -> Iterator[Case]:
    for layer, kind in models.OPERATIONS.items():
        for dtype in ("bf16", "fp32", "fp16"):
            yield Case(layer, kind, "", dtype)
        yield Case(layer, kind, "", "bf16", "frozen x", Option(frozen=("x",)))
    for layer, kind in models.QUANTIZE.items():
        for recipe in (*SHIPPED, *SETTINGS):  # codes and scales as they are: in products powers of two cancel
            yield Case(layer, kind, recipe)


def _can_be(case: Case) -> bool:
    """A weight is stored as codes where its recipe makes some."""
    return not (case.how.quantized_weight and case.recipe == "bf16")


CASES = {case.name: case for case in _listed() if _can_be(case)}


def chosen(pattern: str = "") -> list[Case]:
    """The case of that name, or the cases whose names contain `pattern` or match it as a glob; all without one."""
    if pattern in CASES:
        return [CASES[pattern]]
    return [case for name, case in CASES.items() if pattern in name or fnmatchcase(name, pattern)]
