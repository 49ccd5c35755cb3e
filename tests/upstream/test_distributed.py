"""Layers split over two ranks, blocks and collectives: against the same layer in one process, and against float64."""

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo import ops
from tests.support.activation_formulas import FORMULAS, applied
from tests.support.linear_oracle import randn
from tests.support.linear_shards import cut, joined, steps_of
from tests.support.pairs import turns
from tests.support.recipe_traits import has_own_scale_of_dy, is_stochastic
from tests.support.steps import relative_error
from tests.support.upstream_data import DTYPES, RECIPES, assert_near, normed, numbers

RANKS, HIDDEN, FFN, TOKENS, EPS = 2, 256, 512, 64, 1e-5
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # where a sum is rounded in parts
EXACT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of unquantized layers, against float64
FORMAT = {"nvfp4": 0.6}  # of quantized layers, against float64; 0.35 in FP8
# against one process, where ranks have scales or random numbers of their own, of dy
OWN = {name: 0.4 if is_stochastic(name) else 0.1
       for name in RECIPES if is_stochastic(name) or has_own_scale_of_dy(name)}  # fmt: skip
# where an activation comes after a sum that is rounded in parts: gradients before it fall on other codes
AFTER_SUMS = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
SPLITS = {"column": ("column", False), "column, rows": ("column", True),
          "row": ("row", False), "row, rows": ("row", True)}  # fmt: skip
DATA = ("positive", "signed", "outlier")  # the outlier is in the last row and feature, on the last rank
OF_LINEARS = {
    "plain": {}, "no bias": {"bias": False}, "main_grad": {"fuse_wgrad_accumulation": True},
    "returned bias": {"return_bias": True}, "float16": {"dtype": torch.float16}, "bfloat16": {"dtype": torch.bfloat16},
    "deferred": {"delay_wgrad_compute": True},
}  # fmt: skip
OF_LINEAR = {**OF_LINEARS, "kept input": {"save_original_input": True}}
OF_BLOCKS = {
    **OF_LINEARS, "RMSNorm": {"normalization": "RMSNorm"}, "zero-centered": {"zero_centered_gamma": True},
    "returned norm": {"return_layernorm_output": True},
}  # fmt: skip
OF_MLP = {
    **OF_BLOCKS, "relu": {"activation": "relu"}, "swiglu": {"activation": "swiglu"},
    "recomputed": {"activation_recompute": True},
}  # fmt: skip


# -- a layer, whole and split ------------------------------------------------------------------------------------------


def built(kind, recipe, settings, **split):
    """The layer, with the parallel mode and the group that are given."""
    keywords = {"dtype": torch.float32, "recipe": recipe, **settings, **split}
    if kind == "Linear":
        return octavo.Linear(HIDDEN, FFN, keywords.pop("bias", True), **keywords)
    if kind == "LayerNormLinear":
        return octavo.LayerNormLinear(HIDDEN, FFN, eps=EPS, **keywords)
    if kind == "operations":
        bias, mode = keywords.pop("bias", True), keywords.pop("parallel_mode", None)
        return octavo.Sequential(
            ops.GELU(), octavo.Linear(HIDDEN, FFN, bias, parallel_mode=mode, **keywords),
            ops.GELU(), octavo.Linear(FFN, HIDDEN, bias, parallel_mode=mode and "row", **keywords), ops.GELU(),
        )  # fmt: skip
    if "parallel_mode" in keywords:
        keywords["set_parallel_mode"] = keywords.pop("parallel_mode") is not None
    return octavo.LayerNormMLP(HIDDEN, FFN, eps=EPS, **keywords)


def whole_layer(kind, recipe, settings, data):
    """The layer of one process, with its values, x and dy."""
    layer = built(kind, recipe, settings)
    dtype = next(layer.parameters()).dtype
    drawn = {"recipe": recipe, "dtype": dtype}
    y_size = HIDDEN if kind in ("LayerNormMLP", "operations") else FFN
    if data == "outlier":
        x, dy = randn(TOKENS, HIDDEN, dtype=dtype, seed=3), randn(TOKENS, y_size, dtype=dtype, seed=4)
        x[-1, -1] = 11.0
    else:
        x = numbers(TOKENS, HIDDEN, data=data, seed=3, **drawn)
        dy = numbers(TOKENS, y_size, data=data, seed=4, operand="dy", **drawn)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            if data == "positive" and p.dim() == 2 and kind == "Linear":
                p.copy_(numbers(*p.shape, seed=10 + i, operand="w", **drawn))
            else:
                p.copy_(randn(*p.shape, seed=10 + i) * (p.shape[-1] ** -0.5 if p.dim() == 2 else 0.5))
    return layer, x, dy


def dims_of(kind, mode, sequence, settings):
    """By result and parameter: (the dim that ranks have parts of, in how many blocks), None where all have the same."""
    rows, features = (0, 1) if sequence else None, (1, 1)
    if kind == "Linear" and mode == "row":
        return {"x": features, "y": rows, "weight": features, "bias": None}
    if kind == "Linear":
        return {"x": rows, "y": features, "weight": (0, 1), "bias": (0, 1)}
    if kind == "operations":
        return {"x": rows, "y": rows, "1.weight": (0, 1), "1.bias": (0, 1), "3.weight": (1, 1), "3.bias": None}
    norm = {"x": rows, "norm.weight": None, "norm.bias": None, "norm": rows}
    if kind == "LayerNormLinear":
        return {**norm, "y": features, "linear.weight": (0, 1), "linear.bias": (0, 1)}
    wide = (0, 2 if settings.get("activation") == "swiglu" else 1)
    return {**norm, "y": rows, "fc1.weight": wide, "fc1.bias": wide, "fc2.weight": (1, 1), "fc2.bias": None}


def part(tensor, group, place):
    if place is None:
        return tensor
    dim, blocks = place
    return torch.cat([cut(block, group, dim) for block in tensor.chunk(blocks, dim)], dim).contiguous()


def put_together(parts, place, what):
    if place is None:
        assert all(torch.equal(own, parts[0]) for own in parts), f"{what} differs from rank to rank"
        return parts[0]
    dim, blocks = place
    return joined(parts, blocks, dim)


def step(layer, x, dy, recipe, group=None):
    """y, dx, what is returned beside y, and the gradients, by name, of the last step."""
    linears = [module for module in layer.modules() if isinstance(module, octavo.Linear)]
    returned = [module.return_bias for module in linears]
    for _ in range(steps_of(recipe)):
        layer.zero_grad()
        for linear in linears:
            if linear.fuse_wgrad_accumulation:
                linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
        leaf = x.clone().requires_grad_()
        made = layer(leaf)
        y, *more = made if isinstance(made, tuple) else (made,)
        if any(returned):
            y = y + more.pop(0)
        y.backward(dy)
        for linear in linears:
            linear.backward_dw()
        octavo.step(layer, group)
    found = {"y": y.detach(), "x": leaf.grad, **({"norm": more[0].detach()} if more else {})}
    for name, p in layer.named_parameters():
        found[name] = p.main_grad if p.grad is None else p.grad
    return found


def split_step(group, rank, kind, recipe, settings, data, mode, sequence):
    """This rank's part of the same."""
    layer, x, dy = whole_layer(kind, recipe, settings, data)
    dims = dims_of(kind, mode, sequence, settings)
    own = built(kind, recipe, settings, parallel_mode=mode, sequence_parallel=sequence, tp_group=group)
    with torch.no_grad():
        for (name, p), q in zip(layer.named_parameters(), own.parameters(), strict=True):
            q.copy_(part(p, group, dims[name]))
    return step(own, part(x, group, dims["x"]), part(dy, group, dims["y"]), recipe, group)


def formula(kind, x, p, settings):
    """y and the norm's output, of parameters in float64."""
    if kind == "Linear":
        return F.linear(x, p["weight"], p.get("bias")), None
    if kind == "operations":
        gelu = FORMULAS["gelu"]
        h = gelu(F.linear(gelu(x), p["1.weight"], p.get("1.bias")))
        return gelu(F.linear(h, p["3.weight"], p.get("3.bias"))), None
    kind_of_norm = settings.get("normalization", "LayerNorm")
    n = normed(x, kind_of_norm, p["norm.weight"], p.get("norm.bias"), settings.get("zero_centered_gamma", False), EPS)
    if kind == "LayerNormLinear":
        return F.linear(n, p["linear.weight"], p.get("linear.bias")), n
    activation = settings.get("activation", "gelu")
    h = applied(FORMULAS[activation], activation == "swiglu", F.linear(n, p["fc1.weight"], p.get("fc1.bias")))
    return F.linear(h, p["fc2.weight"], p.get("fc2.bias")), n


def exact_step(kind, layer, x, dy, settings):
    leaf = x.double().requires_grad_()
    p = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    y, n = formula(kind, leaf, p, settings)
    y.backward(dy.double())
    found = {"y": y.detach(), "x": leaf.grad, **{name: each.grad for name, each in p.items()}}
    return found if n is None else {**found, "norm": n.detach()}


def assert_split(ranks, kind, recipe, settings, data, mode, sequence):
    """What two ranks compute has the bits of one process where no sum is rounded in parts and no scale is a rank's."""
    parts = ranks.run(split_step, kind, recipe, settings, data, mode, sequence, size=RANKS)
    layer, x, dy = whole_layer(kind, recipe, settings, data)
    one = step(layer, x, dy, recipe)
    exact, dims = exact_step(kind, layer, x, dy, settings), dims_of(kind, mode, sequence, settings)
    for name, alone in one.items():
        found = put_together([own[name] for own in parts], dims[name], name)
        assert (found.shape, found.dtype) == (alone.shape, alone.dtype), name
        distance, bound = relative_error(found, alone), ROUNDING[x.dtype]
        if name != "y":
            requantized = kind == "operations" and recipe != "bf16"
            bound = OWN.get(recipe, AFTER_SUMS[x.dtype] if requantized else bound)
        if kind == "Linear" and mode == "column" and name in ("y", "bias"):
            bound = 0
        assert distance <= bound, f"{name}: {distance:.3g} of {bound} from one process"
        if kind == "Linear":
            assert_near(
                found, exact[name], recipe=recipe, data="positive" if data == "positive" else "signed", what=name
            )
        else:
            allowed = EXACT[x.dtype] if recipe == "bf16" else FORMAT.get(recipe, 0.35)
            error = relative_error(found, exact[name])
            assert error <= allowed, f"{name}: {error:.3g} of {allowed} from float64"


@turns(split=SPLITS, recipe=RECIPES, settings=OF_LINEAR, data=DATA)
def test_a_linear(ranks, split, recipe, settings, data):
    assert_split(ranks, "Linear", recipe, settings, data, *split)


@turns(rows=(False, True), recipe=RECIPES, settings=OF_BLOCKS, data=DATA)
def test_a_norm_and_a_linear(ranks, rows, recipe, settings, data):
    assert_split(ranks, "LayerNormLinear", recipe, settings, data, "column", rows)


@turns(rows=(False, True), recipe=RECIPES, settings=OF_MLP, data=DATA)
def test_an_mlp_block(ranks, rows, recipe, settings, data):
    assert_split(ranks, "LayerNormMLP", recipe, settings, data, "column", rows)


# -- operations --------------------------------------------------------------------------------------------------------


def collective(group, rank, name, dtype, recipe):
    """x, y, dy and dx of this rank; x as codes of a recipe, if it has any."""
    rows = {"AllGather": 4 * RANKS, "ReduceScatter": 4 // RANKS, "AllReduce": 4}[name]
    x = numbers(4, 64, dtype=dtype, recipe=recipe, seed=10 + rank)
    dy = numbers(rows, 64, dtype=dtype, seed=20 if name == "AllReduce" else 20 + rank)  # one y has one dy
    leaf = x.clone().requires_grad_()
    y = getattr(ops, name)(group)(leaf if recipe == "bf16" else ops.Quantize(recipe=recipe)(leaf))
    y = y.dequantize() if isinstance(y, octavo.quant.QTensor) else y
    y.backward(dy)
    return x, y.detach(), dy, leaf.grad


def assert_collective(ranks, name, dtype, recipe="bf16"):
    """Sums are near those in float64; what is moved has equal bits."""
    x, y, dy, dx = zip(*ranks.run(collective, name, dtype, recipe, size=RANKS), strict=True)
    sums = {"x": sum(each.double() for each in x), "dy": sum(each.double() for each in dy)}
    for rank in range(RANKS):
        if name == "AllGather":
            assert torch.equal(y[rank], torch.cat(x))
            assert_near(dx[rank], sums["dy"].chunk(RANKS)[rank], what="dx")
        elif name == "ReduceScatter":
            assert_near(y[rank], sums["x"].chunk(RANKS)[rank], what="y")
            assert torch.equal(dx[rank], torch.cat(dy))
        else:
            assert_near(y[rank], sums["x"], what="y")
            assert torch.equal(dx[rank], dy[rank])


@turns(name=("AllReduce", "AllGather", "ReduceScatter"), dtype=DTYPES)
def test_collectives(ranks, name, dtype):
    assert_collective(ranks, name, dtype)


@turns(recipe=[recipe for recipe in RECIPES if recipe != "bf16"], dtype=DTYPES)
def test_codes_are_gathered(ranks, recipe, dtype):
    assert_collective(ranks, "AllGather", dtype, recipe)


@turns(
    rows=(False, True), recipe=RECIPES, data=DATA,
    settings={name: OF_LINEARS[name] for name in ("plain", "no bias", "float16", "bfloat16")},
)  # fmt: skip
def test_an_mlp_of_operations(ranks, rows, recipe, data, settings):
    assert_split(ranks, "operations", recipe, settings, data, "column", rows)


def scales(group, rank, margin, mode, sequence):
    """The multipliers of delayed scaling after a step, for x, w and dy."""
    layer, x, dy = whole_layer("Linear", "bf16", {}, "signed")
    own = built(
        "Linear", f"fp8-delayed(history=31,margin={margin})", {}, parallel_mode=mode, sequence_parallel=sequence,
        tp_group=group,
    )  # fmt: skip
    dims = dims_of("Linear", mode, sequence, {})
    with torch.no_grad():
        own.weight.copy_(part(layer.weight, group, dims["weight"]))
    own(part(x, group, dims["x"])).backward(part(dy, group, dims["y"]))
    octavo.step(own, group)
    state = octavo.state_dict(own)
    return [*state["scaling.forward.encode"].tolist(), *state["scaling.backward.encode"].tolist()]


@turns(split=SPLITS, margin=(2, 0, -1))
def test_scales_are_those_of_whole_tensors(ranks, split, margin):
    layer, x, dy = whole_layer("Linear", "bf16", {}, "signed")
    amaxes = [float(t.detach().abs().max()) for t in (x, layer.weight, dy)]
    want = [largest / amax / 2.0**margin for largest, amax in zip((448.0, 448.0, 57344.0), amaxes, strict=True)]
    for found in ranks.run(scales, margin, *split, size=RANKS):
        assert found == pytest.approx(want, rel=1e-6)
